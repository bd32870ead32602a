"""Task + plan + policy -> episode: what an environment is, a browser session, the episode loop, the threaded pool.

Every thread of the pool owns one Playwright driver, browser and page, made, used and stopped in that thread. The threads
put their generation requests into one queue; the calling thread, which owns the models, answers whatever has gathered
there in dynamic batches. No episode waits for another one, plans and steps of several tasks are in flight at once.
An episode depends on (task, plan, k, m, seed) only.

A broken browser or site is data: the episode is run again, and if it still fails its status is `infra`, its reward None
(PAPER-GAP 7). Three unparsable answers in a row end an episode (12); `response` ends it like `terminate` does (13).

episodes.jsonl, one line per episode, written by `EpisodeLog`: batch, task, site, instance (seed of the task), run, k, m,
seed, instruction, plan, subtasks [[title, goal]], malformed, status (success | failure | max_steps | unparsable | infra),
reward (null for infra), reason, answer, seconds, error (traceback), S_i, adv_A, adv_D (stage 3 only), first_shot,
final_shot, steps [{shot, text (raw output), history (line), calls, point (page pixels), error, n_tokens}].
"""

import contextlib
import hashlib
import importlib.util
import queue
import threading
import time
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import actions
from browser import Session
from prompts import format_plan, parse_plan
from runtime import UserError, append_jsonl, write_atomic


# ---------------------------------------------------------------------------------------------------- what things are
@dataclass(frozen=True)
class Task:
    id: str                                       # unique within its environment
    site: str                                     # the column of a table that it counts in
    instruction: str = ""                         # x; "" where the page makes it up, then `Environment.open` returns it
    seed: int = 0                                 # instance of a generated task
    data: dict = field(default_factory=dict, compare=False)
    changes_state: bool = False                   # episodes of it must not share a site replica (PAPER-GAP 18)


@dataclass
class Verdict:
    reward: float | None                          # R in {0, 1}; None: it cannot be known (a judge's outage, say)
    reason: str = ""


class Environment:
    """What the pool needs to know about an environment. Methods with a session run in that session's thread."""
    name = ""
    width, height, scale = 1280, 720, 1.0         # viewport in CSS pixels; screenshot pixels per CSS pixel
    fresh_context = True                          # False only where pages keep no state of their own

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
        """The terminal reward; called once, after the last step."""
        raise NotImplementedError

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


@dataclass
class Plan:
    k: int
    text: str = ""                                # what the actor reads: the numbered list, or a malformed text clipped
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
    task: Task
    plan: Plan
    m: int
    seed: int
    run: int = 0
    instruction: str = ""
    steps: list[Step] = field(default_factory=list)
    status: str = "infra"
    reward: float | None = None
    reason: str = ""
    answer: str = ""
    seconds: float = 0.0
    error: str = ""
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
    env: str = "webarena"                         # environment: env_NAME.py
    split: str = "train647"                       # which of its tasks
    tasks: str = ""                               # miniwob: page names; webarena: task file
    instances: int = 100                          # miniwob: instances per page and split
    scale: float = 1.0                            # miniwob: screenshot pixels per CSS pixel
    sites: str = "sites.json"                     # webarena: addresses, accounts, replicas and reset of each site
    threads: int = 8                              # browsers
    max_steps: int = 15                           # T, actions per episode, sec. 4.3
    temperature_D: float = 0.8                    # sampling temperature of the decomposer
    temperature_A: float = 0.8                    # sampling temperature of the actor
    max_tokens_D: int = 512                       # new tokens of a plan
    max_tokens_A: int = 512                       # new tokens of an action
    retries: int = 2                              # further attempts at an episode that the browser or site broke
    call_timeout: float = 15.0                    # s, any single browser call
    settle: float = 3.0                           # s, longest wait for a page to become quiet after an action
    quiet: float = 0.0                            # s without a change of the page that count as quiet
    max_batch: int = 64                           # requests answered by one forward pass
    coordinates: str = "image"                    # the actor's coordinates: pixels of the resized image, or "page"


def load_environment(cfg: RolloutConfig) -> Environment:
    """`make(cfg)` of env_NAME.py: a new environment needs such a file and nothing else."""
    if importlib.util.find_spec(f"env_{cfg.env}") is None:
        raise UserError(f"--env {cfg.env}: there is no env_{cfg.env}.py; the environments are miniwob and webarena")
    return importlib.import_module(f"env_{cfg.env}").make(cfg)


# ------------------------------------------------------------------------------------------------------------ episodes
def request_seed(*parts) -> int:
    """A 63-bit seed from what a draw depends on, equal on every rank and in every order."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class Agent:
    """The two roles as an episode sees them: prompts in, samples out, through `ask(Request) -> Sample`."""

    def __init__(self, prompts, cfg: RolloutConfig, ask):
        self.prompts, self.cfg, self.ask = prompts, cfg, ask

    def plan(self, instruction: str, png: bytes, k: int, seed: int):
        """Eq. 1: d ~ π_D(· | x, o_0). Returns a Future of the sample."""
        system, user = self.prompts.decomposer(instruction)
        return self.ask(Request("decomposer", system, user, png, seed, self.cfg.temperature_D, self.cfg.max_tokens_D))

    def act(self, instruction: str, png: bytes, history: list[str], plan: str, seed: int):
        """Eq. 2: a_t ~ π_A(· | x, o_t, h_t, d)."""
        system, user = self.prompts.actor(instruction, history, plan)
        return self.ask(Request("actor", system, user, png, seed, self.cfg.temperature_A, self.cfg.max_tokens_A)).result()


def read_plan(k: int, sample) -> Plan:
    """A sampled plan as the actor will read it; a malformed one is passed on as it is, clipped (PAPER-GAP 10)."""
    subtasks = parse_plan(sample.text)
    text = format_plan(subtasks) if subtasks else sample.text.strip()[:1000]
    return Plan(k, text, subtasks, not subtasks, sample)


def run_episode(session: Session, agent: Agent, episode: Episode) -> None:
    """One complete episode τ_ij, from the start page to its terminal reward; fills in `episode`."""
    from playwright.sync_api import Error
    cfg, history, unparsable = agent.cfg, [], 0
    episode.steps, episode.status = [], "max_steps"
    episode.instruction = session.open(episode.task)
    for t in range(cfg.max_steps):
        session.settle()
        png = session.screenshot()
        sample = agent.act(episode.instruction, png, history, episode.plan.text, request_seed(episode.seed, t))
        action = actions.parse(sample.text)
        step = Step(png, sample, error=action.error)
        episode.steps.append(step)
        if not action.error:
            size = sample.image_size if cfg.coordinates == "image" else (session.env.width, session.env.height)
            step.calls = tuple(actions.rescale(c, size, (session.env.width, session.env.height)) for c in action.calls)
            for call in step.calls:
                if actions.is_final(call):
                    break
                try:
                    actions.perform(call, session.page, actions.ActionSettings(timeout=cfg.call_timeout))
                except (actions.ActionError, PermissionError) as e:
                    step.error = str(e)
        step.line = history_line(action, step.error, session.notes)
        session.notes.clear()
        history.append(step.line)
        unparsable = unparsable + 1 if action.error else 0
        if unparsable == 3:
            episode.status = "unparsable"
            break
        if any(map(actions.is_final, step.calls)) or session.env.done(session):
            episode.status = "failure"
            break
    with contextlib.suppress(Error):              # for the eye only: never worth an episode
        episode.final_png = session.screenshot()
    episode.answer = actions.answer([c for s in episode.steps for c in s.calls])
    verdict = session.env.judge(episode.task, session, episode.answer)
    episode.reward, episode.reason = verdict.reward, verdict.reason
    if verdict.reward is None:
        episode.status = "infra"
    elif verdict.reward == 1:
        episode.status = "success"


def history_line(action, error: str, notes: list[str]) -> str:
    """One step as later prompts tell it: the operation text, else the calls; then what went wrong (PAPER-GAPs 11, 12)."""
    said = action.operation or "; ".join(map(actions.format_call, action.calls)) or "(unreadable answer)"
    return " ".join(" | ".join([said, *([f"failed: {error}"] if error else []), *notes]).split())[:500]


# ------------------------------------------------------------------------------------------------------------ the pool
class Pool:
    """`threads` browsers that run episodes; `run` answers their requests with the given models until all are done."""

    def __init__(self, env: Environment, prompts, cfg: RolloutConfig):
        self.env, self.cfg = env, cfg
        self.inbox = queue.SimpleQueue()          # Requests with their Future, finished Episodes, exceptions
        self.jobs = queue.SimpleQueue()
        self.agent = Agent(prompts, cfg, self._ask)
        self.threads = [threading.Thread(target=self._work, daemon=True, name=f"browser-{i}") for i in range(cfg.threads)]
        for t in self.threads:
            t.start()

    def run(self, tasks: list[Task], K: int, M: int, seed, models: dict, use_plan=True, runs=(0,), progress=None):
        """K plans for every task, M episodes for every plan; returns one Group per (task, run), in order.

        `models` maps a role to a function from a list of Requests to the list of their Samples. Requests' seeds come
        from (seed, task, run, k, m, step) alone. Without `use_plan` there is one empty plan and no decomposer.
        """
        groups = [Group(task, run) for task in tasks for run in runs]
        for group in groups:
            self.jobs.put(lambda session, g=group: self._open(session, g, K if use_plan else 1, M, seed, use_plan))
        waiting = len(groups) * (K if use_plan else 1) * M
        while waiting:
            requests = self._gather()
            finished = [e for e in requests if isinstance(e, Episode)]
            waiting -= len(finished)
            for episode in finished if progress else ():
                progress(episode)
            asked = [r for r in requests if not isinstance(r, Episode)]
            for role in ("decomposer", "actor"):
                mine = [(q, f) for q, f in asked if q.role == role]
                for i in range(0, len(mine), self.cfg.max_batch):
                    part = mine[i:i + self.cfg.max_batch]
                    for (_, future), sample in zip(part, models[role]([q for q, _ in part])):
                        future.set_result(sample)
        return groups

    def _gather(self) -> list:
        """Block for one message, then take all that have arrived. An exception from a thread ends the run here."""
        got = [self.inbox.get()]
        while not self.inbox.empty():
            got.append(self.inbox.get())
        if error := next((g for g in got if isinstance(g, BaseException)), None):
            raise error
        return got

    def _ask(self, request: Request) -> Future:
        future = Future()
        self.inbox.put((request, future))
        return future

    def _open(self, session: Session, group: Group, K: int, M: int, seed, use_plan: bool) -> None:
        """First look at a task: x and o_0, then its K plans (Eq. 1), then its K·M episodes as jobs of their own."""
        def look():
            group.instruction = session.open(group.task)
            session.settle()
            group.png = session.screenshot()
        key = (seed, group.task.id, group.task.seed, group.run)
        error = self._attempt(session, look)
        group.plans = [Plan(0)] if not use_plan else [Plan(k) for k in range(K)]
        if use_plan and not error:
            asked = [self.agent.plan(group.instruction, group.png, k, request_seed(*key, k)) for k in range(K)]
            group.plans = [read_plan(k, f.result()) for k, f in enumerate(asked)]
        group.episodes = [[Episode(group.task, plan, m, request_seed(*key, plan.k, m), group.run, group.instruction,
                                   error=error) for m in range(M)] for plan in group.plans]
        for episode in (e for row in group.episodes for e in row):
            if error:
                self.inbox.put(episode)
            else:
                self.jobs.put(lambda session, e=episode: self._episode(session, e))

    def _episode(self, session: Session, episode: Episode) -> None:
        start = time.monotonic()
        error = self._attempt(session, lambda: run_episode(session, self.agent, episode))
        episode.seconds, episode.error = time.monotonic() - start, error
        if error:
            episode.status, episode.reward = "infra", None
        self.inbox.put(episode)

    def _attempt(self, session: Session, work) -> str:
        """Run `work`, again in a new browser when the browser or the site broke it; the last traceback, or ""."""
        from playwright.sync_api import Error
        error = ""
        for _ in range(1 + self.cfg.retries):
            try:
                work()
                return ""
            except (Error, OSError):              # Playwright's own errors, and the loopback's
                error = traceback.format_exc()
                session.stop()
        return error

    def _work(self):
        session = Session(self.env, self.cfg)
        try:
            while (job := self.jobs.get()) is not None:
                job(session)
        except BaseException as e:                # not the web's fault: the calling thread raises it
            self.inbox.put(e)
        finally:
            session.stop()

    def close(self) -> None:
        """End all browsers; returns within 15 s."""
        for _ in self.threads:
            self.jobs.put(None)
        deadline = time.monotonic() + 15
        for t in self.threads:
            t.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ------------------------------------------------------------------------------------------------------------ the log
class EpisodeLog:
    """episodes.jsonl and its screenshots, one directory. Equal screenshots are stored once."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        (self.directory / "shots").mkdir(parents=True, exist_ok=True)

    def append(self, groups: list[Group], batch: int = 0, credit=None) -> None:
        """Write the groups' episodes; `credit(group index, k, m)` adds S_i, adv_A and adv_D."""
        append_jsonl(self.directory / "episodes.jsonl", [
            self.line(e, batch) | (credit(g, e.plan.k, e.m) if credit else {})
            for g, group in enumerate(groups) for row in group.episodes for e in row])

    def line(self, e: Episode, batch: int) -> dict:
        return {"batch": batch, "task": e.task.id, "site": e.task.site, "instance": e.task.seed, "run": e.run, "k": e.plan.k,
                "m": e.m, "seed": e.seed, "instruction": e.instruction, "plan": e.plan.text,
                "subtasks": [[g.title, g.goal] for g in e.plan.subtasks], "malformed": e.plan.malformed, "status": e.status,
                "reward": e.reward, "reason": e.reason, "answer": e.answer, "seconds": round(e.seconds, 3), "error": e.error,
                "first_shot": self.shot(e.steps[0].png) if e.steps else None, "final_shot": self.shot(e.final_png),
                "steps": [{"shot": self.shot(s.png), "text": s.sample.text, "history": s.line, "error": s.error,
                           "calls": [actions.format_call(c) for c in s.calls], "point": point(s.calls),
                           "n_tokens": len(s.sample.response_ids)} for s in e.steps]}

    def shot(self, png: bytes | None) -> str | None:
        """Store a screenshot under its hash; the name relative to the directory."""
        if not png:
            return None
        name = f"shots/{hashlib.sha256(png).hexdigest()[:20]}.png"
        if not (self.directory / name).exists():
            write_atomic(self.directory / name, png)
        return name


def point(calls) -> list | None:
    """Where the first call with coordinates landed, in page pixels."""
    return next(([c.args["x"], c.args["y"]] for c in calls if c.args.get("x") is not None and c.args.get("y") is not None), None)
