"""Task + plan + policy -> episode: what an environment is, the episode loop, the threaded pool.

Every thread of the pool has a browser of its own (browser.py). The threads put their generation requests into
one queue; the calling thread, which owns the models, answers whatever has gathered there in dynamic batches.
A model that lives on a server takes each request as it comes. No episode waits for another one; plans and
steps of several tasks are in flight at once. An episode depends on (task, plan, k, m, seed) only.

A broken browser or site is data: the episode is run again, and if it still fails its status is `infra`, its
reward None (PAPER-GAP 7). Three unparsable answers in a row end an episode (12); `response` ends it like
`terminate` does (13). episode_log.py writes down what happened.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import queue
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

import actions
import dialects
from browser import Session
from chromium import SITE, Watchdog, web_errors
from prompts import format_plan, parse_plan
from runtime import UserError, check, need_directories


# -------------------------------------------------------------------------------------------- what things are
@dataclass(frozen=True)
class Task:
    id: str                                       # unique within its environment
    site: str                                     # the column of a table that it counts in
    instruction: str = ""                         # x; "" where the page makes it up when it opens
    seed: int = 0                                 # instance of a generated task
    data: dict = field(default_factory=dict, compare=False)
    changes_state: bool = False                   # its episodes must not share a site replica (PAPER-GAP 18)
    leaves_traces: bool = False                   # no reset: the site's later tasks find what it changed


@dataclass
class Verdict:
    reward: float | None                          # R in {0, 1}; None: unknown (an outage of the judge, say)
    reason: str = ""
    rewards: dict = field(default_factory=dict)   # the same episode by other rules: name -> 0, 1 or None


class Environment:
    """What the pool needs of an environment. Methods with a session run in that session's thread."""
    name = ""
    width, height, scale = 1280, 720, 1.0         # viewport in CSS pixels; screenshot pixels per CSS pixel
    fresh_context = True                          # False only where pages keep no state of their own
    quick = False                                 # True where an action on a page requests nothing
    browser_args: list[str] = []                  # further switches of Chromium

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in order; UserError for an unknown one."""
        raise NotImplementedError

    def origins(self, task: Task) -> list[str]:
        """Addresses (scheme://host:port) the browser may navigate to during this task."""
        raise NotImplementedError

    def open(self, task: Task, session: Session) -> str:
        """Bring the session's page to the start of the task; returns the instruction x."""
        raise NotImplementedError

    def done(self, session: Session) -> bool:
        """Whether the page itself has ended the episode."""
        return False

    def judge(self, task: Task, session: Session, answer: str) -> Verdict:
        """The terminal reward; called once, after the last step. Without one, the episode is run again."""
        raise NotImplementedError

    def leave(self, session: Session) -> dict:
        """The attempt at an episode is over, well or not; returns what its record should keep (`details`)."""
        return {}

    def close(self) -> None:
        """Stop what the environment started."""


@dataclass
class Request:
    """One prompt for one role's policy."""
    role: str
    system: str
    user: str
    png: bytes
    seed: int
    temperature: float
    max_new_tokens: int
    earlier: list = field(default_factory=list)   # Steps before this one, for a model that sees them again


@dataclass
class Plan:
    k: int
    text: str = ""                                # what the actor reads: the list, or a malformed text
    subtasks: list = field(default_factory=list)  # g_1 … g_L, [] when malformed
    malformed: bool = False
    sample: object = None                         # policy.Sample of the decomposer, None without a decomposer


@dataclass
class Step:
    png: bytes                                    # o_k, the screenshot the action was chosen from
    sample: object                                # policy.Sample of the actor
    line: str = ""                                # this step in later prompts' history (PAPER-GAP 11)
    calls: tuple = ()                             # with page coordinates
    error: str = ""


@dataclass
class Episode:
    group: "Group" = field(repr=False)
    plan: Plan
    m: int
    seed: int
    steps: list[Step] = field(default_factory=list)
    status: str = "infra"
    reward: float | None = None
    reason: str = ""
    answer: str = ""
    seconds: float = 0.0
    error: str = ""                               # traceback of the fault that made it infra
    fault: str = ""                               # its kind, "" where there is none
    retried: list[str] = field(default_factory=list)  # kinds of the faults of earlier attempts
    rewards: dict = field(default_factory=dict)   # of the same episode by other rules, if there are any
    details: dict = field(default_factory=dict)   # what the environment wants to be kept
    secrets: set = field(default_factory=set, repr=False)  # texts that no file may hold
    final_png: bytes | None = None


@dataclass
class Group:
    """All episodes of one task in one rollout batch: K plans, K x M episodes."""
    task: Task
    run: int = 0
    instruction: str = ""
    png: bytes = b""                              # o_0, what the decomposer saw
    plans: list[Plan] = field(default_factory=list)
    episodes: list[list[Episode]] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutConfig:
    """The settings of stages 3 and 4 that say where and how episodes happen; their Config extends it."""
    env: str = "webarena"                         # environment: miniwob or webarena (env_NAME.py)
    split: str = "train647"                       # which tasks; webarena: README; miniwob: train, eval
    tasks: str = ""                               # miniwob: page names; webarena: task file or folder
    instances: int = 100                          # miniwob: instances per page and split
    scale: float = 1.0                            # miniwob: screenshot pixels per CSS pixel
    sites: str = "sites.json"                     # webarena: addresses, accounts, replicas, resets
    patch: str = ""                               # webarena: file with repairs of tasks, by task_id
    auth: str = ""                                # webarena: directory of storage states of logins
    leases: str = ""                              # webarena: directory of locks that all nodes share
    profile: str = "fixed"                        # webarena: evaluator; or scalecua_v2, vab, webarena
    also: str = ""                                # webarena: further profiles to score by, by commas
    judge_model: str = ""                         # webarena: model that grades answers; "": none
    judge_base_url: str = ""                      # webarena: the judge's server; "": OpenAI's
    judge_api: str = "responses"                  # webarena: its protocol: responses or chat
    judge_cache: str = ""                         # webarena: directory of the judge's answers
    prompts: str = ""                             # JSON file that replaces texts of prompts.py
    threads: int = 8                              # browsers
    max_steps: int = 15                           # T, actions per episode, sec. 4.3
    temperature_D: float = 0.8                    # sampling temperature of the decomposer
    temperature_A: float = 0.8                    # sampling temperature of the actor
    max_tokens_D: int = 512                       # new tokens of a plan
    max_tokens_A: int = 512                       # new tokens of an action
    retries: int = 2                              # further attempts at an episode that browser or site broke
    retry_wait: float = 1.0                       # s before another attempt at a site that is down, doubled
    call_timeout: float = 15.0                    # s, any single browser call, also a navigation
    open_timeout: float = 120.0                   # s, opening a task's start page, or judging an episode
    deadline: float = 600.0                       # s, one attempt at an episode with everything in it
    settle: float = 3.0                           # s, longest wait for a page to become quiet after an action
    quiet: float = 0.1                            # s without a change of the page that count as quiet
    fixed_wait: float = 0.0                       # s after every action, as ScaleCUA; 0: as long as needed
    extra_origins: str = ""                       # further addresses where pages may go, by commas; * for all
    recycle: int = 200                            # a new browser after as many episodes
    browser_ws: str = ""                          # remote Playwright servers, ws://…, by commas; "": local
    memory: float = 2000.0                        # MB that the processes of one browser may take
    max_batch: int = 64                           # requests answered by one forward pass
    cpu_threads: int = 1                          # torch's, where models run on the CPU beside browsers
    coordinates: str = "image"                    # the actor's: pixels of image or page, 0-1 or 0-1000
    dialect: str = "scalecua"                     # the actor's form of an action; or uitars, guilibra

    def __post_init__(self):
        check(self, "threads", "instances", "max_steps", "max_tokens_D", "max_tokens_A", "max_batch",
              "cpu_threads")
        need_directories(self, "auth", "leases", "judge_cache")
        if set("@?") & set(self.browser_ws):
            raise UserError("--browser_ws: no password or token in an address, it would be written down; "
                            "forward the port (ssh -L) and give ws://127.0.0.1:PORT/")


def load_environment(cfg: RolloutConfig) -> Environment:
    """`make(cfg)` of env_NAME.py: a new environment needs such a file and nothing else."""
    if importlib.util.find_spec(f"env_{cfg.env}") is None:
        raise UserError(f"--env {cfg.env}: there is no env_{cfg.env}.py; there are miniwob and webarena")
    return importlib.import_module(f"env_{cfg.env}").make(cfg)


# --------------------------------------------------------------------------------------------------- episodes
def request_seed(*parts) -> int:
    """A 63-bit seed from what a draw depends on, equal on every rank and in every order."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Agent:
    """The two roles as an episode sees them: prompts in, a Future of a sample out, through `ask(Request)`."""

    def __init__(self, prompts, cfg: RolloutConfig, ask):
        self.prompts, self.cfg, self.ask = prompts, cfg, ask
        self.read, self.space = dialects.reader(cfg.dialect), dialects.space(cfg.coordinates)

    def plan(self, instruction: str, png: bytes, k: int, seed: int) -> Future:
        """Eq. 1: d ~ π_D(· | x, o_0)."""
        c, (system, user) = self.cfg, self.prompts.decomposer(instruction)
        return self.ask(Request("decomposer", system, user, png, seed, c.temperature_D, c.max_tokens_D))

    def act(self, instruction: str, png: bytes, history: list[str], plan: str, seed: int, steps=()) -> Future:
        """Eq. 2: a_t ~ π_A(· | x, o_t, h_t, d)."""
        c, (system, user) = self.cfg, self.prompts.actor(instruction, history, plan)
        sampling = seed, c.temperature_A, c.max_tokens_A
        return self.ask(Request("actor", system, user, png, *sampling, earlier=list(steps)))


def read_plan(k: int, sample) -> Plan:
    """A sampled plan as the actor will read it; a malformed one as it is, clipped (PAPER-GAP 10)."""
    subtasks = parse_plan(sample.text)
    text = format_plan(subtasks) if subtasks else sample.text.strip()[:1000]
    return Plan(k, text, subtasks, not subtasks, sample)


def run_episode(session: Session, agent: Agent, episode: Episode) -> None:
    """One complete episode τ_ij, from the start page to its terminal reward; fills in `episode`."""
    cfg, history, unparsable = agent.cfg, [], 0
    episode.steps, episode.status = [], "max_steps"
    instruction = session.open(episode.group.task)
    session.settle()
    png = session.screenshot()
    for t in range(cfg.max_steps):
        asked = agent.act(instruction, png, history, episode.plan.text, request_seed(episode.seed, t),
                          episode.steps)
        sample = session.answer(asked)
        action = agent.read(sample.text)
        step = Step(png, sample, error=action.error)
        episode.steps.append(step)
        if not action.error:
            page = session.env.width, session.env.height
            seen = agent.space(sample.image_size, page)
            step.calls = tuple(actions.rescale(c, seen, page) for c in action.calls)
            carry_out(session, step, cfg)
        png = session.screenshot()                # by now the browser has said what it has to say
        step.line = history_line(action, step.error, session.notes)
        session.notes.clear()
        history.append(step.line)
        unparsable = unparsable + 1 if action.error else 0
        if unparsable == 3:
            episode.status = "unparsable"
            break
        if any(map(actions.is_final, step.calls)) or session.done():
            episode.status = "failure"
            break
    episode.final_png = png
    episode.answer = actions.answer([c for s in episode.steps for c in s.calls])
    verdict = session.asked(lambda session: session.env.judge(episode.group.task, session, episode.answer))
    episode.reward, episode.reason, episode.rewards = verdict.reward, verdict.reason, verdict.rewards
    if verdict.reward is None:
        raise ConnectionError(f"no verdict: {verdict.reason}")
    if verdict.reward == 1:
        episode.status = "success"


def carry_out(session: Session, step: Step, cfg: RolloutConfig) -> None:
    """The calls of a step up to a final one, each with the wait for its consequences."""
    for call in step.calls:
        if actions.is_final(call):
            return
        try:
            session.perform(call, actions.ActionSettings(timeout=cfg.call_timeout))
        except actions.ActionError as e:
            step.error = str(e)
        session.settle()


def history_line(action, error: str, notes: list[str]) -> str:
    """One step as later prompts tell it: operation, else calls; then what went wrong (PAPER-GAPs 11, 12)."""
    said = action.operation or "; ".join(map(actions.format_call, action.calls)) or "(unreadable answer)"
    return " ".join(" | ".join([said, *([f"failed: {error}"] if error else []), *notes]).split())[:500]


# --------------------------------------------------------------------------------------------------- the pool
class Pool(contextlib.AbstractContextManager):
    """Browsers that run episodes; `run` answers their requests with the given models until all are done."""

    def __init__(self, env: Environment, prompts, cfg: RolloutConfig):
        self.env, self.cfg, self.watchdog = env, cfg, Watchdog(cfg.memory)
        self.inbox = queue.SimpleQueue()          # (Request, Future), finished Episodes, exceptions
        self.jobs = queue.PriorityQueue()         # (urgency, number, job): open tasks go before further ones
        self.numbers, self.closing = itertools.count(), threading.Event()
        self.waiting, self.live = set(), set()    # Futures without an answer; Episodes under way
        self.spent = Counter(generation=0.0)      # seconds in models that answer here, and their batches
        self.agent = Agent(prompts, cfg, self._ask)
        servers = itertools.cycle([ws.strip() for ws in cfg.browser_ws.split(",")])
        self.sessions = [Session(env, cfg, self.watchdog, next(servers)) for _ in range(cfg.threads)]
        self.threads = [threading.Thread(target=self._work, args=(session,), daemon=True, name=f"browser-{i}")
                        for i, session in enumerate(self.sessions)]
        for t in self.threads:
            t.start()

    def run(self, tasks: list[Task], K: int, M: int, seed, models: dict, use_plan=True, runs=(0,), bar=""):
        """K plans for every task, M episodes for every plan; yields the Group of each task and run.

        `models` maps a role to a function from a list of Requests to the list of their Samples, or to an
        object whose `submit(Request)` returns a Future of one; that one's ConnectionErrors are data, as the
        web's are. Requests' seeds come from (seed, task, run, k, m, step) alone. Without `use_plan` there is
        one empty plan and no decomposer. `bar` names the progress bar; "" for none.
        """
        self.models = models
        K = K if use_plan else 1
        groups = [Group(task, run) for task in tasks for run in runs]
        for group in groups:
            job = partial(self._open, group=group, K=K, M=M, seed=seed, use_plan=use_plan)
            self.jobs.put((1, next(self.numbers), job))
        left = {id(g): K * M for g in groups}
        with Progress(len(groups) * K * M, bar, self.live) as progress:
            while left:
                got = self._gather()
                for role, model in models.items():
                    self._answer([g for g in got if isinstance(g, tuple) and g[0].role == role], model)
                for episode in (e for e in got if isinstance(e, Episode)):
                    progress.count(episode)
                    left[id(episode.group)] -= 1
                    if not left[id(episode.group)]:
                        del left[id(episode.group)]
                        yield episode.group

    def _answer(self, asked: list[tuple], answer) -> None:
        """One forward pass for up to max_batch requests at a time."""
        for i in range(0, len(asked), self.cfg.max_batch):
            part, start = asked[i:i + self.cfg.max_batch], time.monotonic()
            samples = answer([request for request, _ in part])
            self.spent["generation"] += time.monotonic() - start
            self.spent["batches"] += 1
            for (_, future), sample in zip(part, samples, strict=True):
                self.waiting.discard(future)
                future.set_result(sample)

    def clock(self) -> Counter:
        """Seconds so far, of all browsers: busy, of these waiting for a model and for pages; generation."""
        return sum((session.spent for session in self.sessions), self.spent)

    def _gather(self) -> list:
        """Block for one message, then take all that have arrived. A thread's exception ends the run here."""
        got = [self.inbox.get()]
        while not self.inbox.empty():
            got.append(self.inbox.get())
        for error in (g for g in got if isinstance(g, BaseException)):
            raise error
        return got

    def _ask(self, request: Request) -> Future:
        future, model = Future(), self.models[request.role]
        self.waiting.add(future)
        if self.closing.is_set():                 # nobody will answer any more
            future.cancel()
        elif hasattr(model, "submit"):
            model.submit(request).add_done_callback(partial(self._pass_on, future))
        else:
            self.inbox.put((request, future))
        return future

    def _pass_on(self, future: Future, answered: Future) -> None:
        self.waiting.discard(future)
        if not future.set_running_or_notify_cancel():     # the pool is closing
            return
        if error := answered.exception():
            future.set_exception(error)
        else:
            future.set_result(answered.result())

    def _open(self, session: Session, group: Group, K: int, M: int, seed, use_plan: bool) -> None:
        """First look at a task: x and o_0, then its K plans (Eq. 1), then its K·M episodes, each a job."""
        def look():
            group.instruction = session.open(group.task)
            session.settle()
            group.png = session.screenshot()
            if use_plan:
                ask = partial(self.agent.plan, group.instruction, group.png)
                asked = [ask(k, request_seed(*key, k)) for k in range(K)]
                group.plans = [read_plan(k, session.answer(f)) for k, f in enumerate(asked)]
        key, start = (seed, group.task.id, group.task.seed, group.run), time.monotonic()
        group.plans = [Plan(k) for k in range(K)]
        kinds, error, _ = self._attempt(session, look)
        told = {"error": error, "fault": kinds[-1] if error else "", "secrets": session.secrets,
                "seconds": time.monotonic() - start}
        group.episodes = [[Episode(group, plan, m, request_seed(*key, plan.k, m), **told) for m in range(M)]
                          for plan in group.plans]
        group.episodes[0][0].retried = kinds[:-1] if error else kinds
        for episode in (e for row in group.episodes for e in row):
            if error:
                self.inbox.put(episode)
            else:
                self.jobs.put((0, next(self.numbers), partial(self._episode, episode=episode)))

    def _episode(self, session: Session, episode: Episode) -> None:
        start = time.monotonic()
        self.live.add(id(episode))
        work = partial(run_episode, session, self.agent, episode)
        kinds, episode.error, episode.details = self._attempt(session, work)
        self.live.discard(id(episode))
        episode.seconds, episode.secrets = time.monotonic() - start, session.secrets
        if episode.error:
            episode.status, episode.reward, episode.fault = "infra", None, kinds.pop()
            if episode.fault != "verdict":        # no profile counts what an earlier attempt was given
                episode.rewards = {}
        episode.retried += kinds
        self.inbox.put(episode)

    def _attempt(self, session: Session, work) -> tuple[list[str], str, dict]:
        """Run `work`, again where browser or site broke it; kinds of fault, last traceback or "", details."""
        kinds, error, details = [], "", {}
        for attempt in range(1 + self.cfg.retries):
            session.deadline = time.monotonic() + self.cfg.deadline
            try:
                work()
                return kinds, "", details | self.env.leave(session)
            except web_errors() as e:
                kinds.append(session.fault(e))
                error = traceback.format_exc().split("\nBrowser logs:")[0]
            finally:
                session.deadline = float("inf")
            details = self.env.leave(session)
            session.spoiled = True
            if kinds[-1] not in SITE:
                session.stop()
            elif attempt < self.cfg.retries:
                self.closing.wait(self.cfg.retry_wait * 2 ** attempt)
            if kinds[-1] == "deadline" or self.closing.is_set():
                break
        return kinds, error, details

    def _work(self, session: Session):
        try:
            while (job := self.jobs.get()[-1]) is not None and not self.closing.is_set():
                start = time.monotonic()
                job(session)
                session.spent["busy"] += time.monotonic() - start
        except BaseException as e:                # not the web's fault: the calling thread raises it
            if not self.closing.is_set():
                self.inbox.put(e)
        finally:
            session.stop()

    def close(self) -> None:
        """End all browsers; returns within 15 s whatever the pages do."""
        self.closing.set()
        self.inbox.put(RuntimeError("the pool is closed"))
        for _ in self.threads:
            self.jobs.put((-1, next(self.numbers), None))
        for future in list(self.waiting):
            future.cancel()
        start = time.monotonic()
        for patience in (2, 5, 8, 11, 14):        # s; a page that is busy is not waited for
            for t in self.threads:
                t.join(max(0.0, start + patience - time.monotonic()))
            for session, thread in zip(self.sessions, self.threads):
                if thread.is_alive():
                    session.kill("closed")

    def __exit__(self, *_):
        self.close()


class Progress(tqdm):
    """Episodes done, live, successful, lost to infrastructure, and steps per second, where a person waits."""

    def __init__(self, total: int, name: str, live: set):
        super().__init__(total=total, desc=name, unit="episode", disable=not name, leave=False)
        self.live, self.success, self.infra, self.steps, self.begun = live, 0, 0, 0, time.monotonic()

    def count(self, episode: Episode) -> None:
        self.success += episode.status == "success"
        self.infra += episode.status == "infra"
        self.steps += len(episode.steps)
        self.update()
        self.set_postfix(live=len(self.live), success=self.success, infra=self.infra, refresh=False,
                         steps_per_s=f"{self.steps / (time.monotonic() - self.begun):.1f}")
