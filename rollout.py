"""Task + agent -> episode: how an agent is asked, the episode loop, the threaded pool (Eqs. 1 and 2).

Every thread of the pool has a browser of its own (web/session.py). The threads put their generation requests
into one queue; the calling thread, which owns the models, answers what has gathered there in dynamic batches.
A model that lives on a server takes each request as it comes. No episode waits for another one; plans and
steps of several tasks are in flight at once. An episode depends on (task, plan, k, m, seed) only.

A broken browser or site is data: the episode is run again, and if it still fails its status is `infra`, its
reward None (PAPER-GAP 7). Three unparsable answers in a row end an episode (12); `response` ends it like
`terminate` does (13). records/episode_log.py writes down what happened.
"""

import contextlib
import hashlib
import itertools
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from tqdm import tqdm

from language import actions, dialects
from model.inputs import Sample
from model.roles import Request, Role
from records.episode import Episode, Group, Plan, Step
from web import effects
from web.chromium import SITE, Watchdog, web_errors
from web.environment import Environment, RolloutConfig, Task
from web.session import Session


# ----------------------------------------------------------------------------------------------------- agents
class Agent:
    """What the pool needs of an agent: one object writes a task's plans, one more acts in each episode and
    may remember on itself what it likes. All its methods run in the browser's own thread and may `ask` and
    wait.

    This base has no role yet: its plans are empty, and `act` is the system's to write.
    """

    def __init__(self, cfg: RolloutConfig, prompts):
        self.cfg = cfg
        self.prompts = prompts
        self.read = dialects.reader(cfg.dialect)

    def plans(self, instruction: str, png: bytes, ask: "Ask", K: int) -> list[Plan]:
        """K plans for a task, from its instruction x and first screenshot o_0."""
        return [Plan(k) for k in range(K)]

    def begin(self, instruction: str, plan: Plan) -> None:
        """An episode starts, or starts again after a fault of the web."""
        self.instruction = instruction
        self.plan = plan
        self.steps: list[Step] = []

    def act(self, png: bytes, ask: "Ask") -> tuple[Sample, actions.Action]:
        """The next action, and the answer that it was read from."""
        raise NotImplementedError

    def after(self, step: Step, ask: "Ask") -> None:
        """The action is done and the page has settled."""
        self.steps.append(step)

    @property
    def history(self) -> list[str]:
        """One line for each step so far (PAPER-GAP 11)."""
        return [step.line for step in self.steps]


class Ask:
    """`ask(role, system, user, png)` asks a role's model and waits for its Sample; `later` asks without
    waiting, `wait` takes up its answer. All samples gather in `samples`. Their seeds are those of the place
    in the run: what else is asked elsewhere changes none."""

    def __init__(self, pool: "Pool", session: Session, seeds: Iterator[int]):
        self.pool = pool
        self.session = session
        self.seeds = seeds
        self.samples: list[Sample] = []

    def __call__(self, role: str, system: str, user: str, png: bytes, earlier: Iterable = ()) -> Sample:
        return self.wait(self.later(role, system, user, png, earlier))

    def later(self, role: str, system: str, user: str, png: bytes, earlier: Iterable = ()):
        """`earlier`: the steps that a model on a server may see again."""
        settings = self.pool.roles[role]
        request = Request(role, system, user, png, next(self.seeds), settings.temperature,
                          settings.max_tokens, list(earlier))
        return role, self.pool.submit(request)

    def wait(self, asked: tuple[str, Future]) -> Sample:
        role, future = asked
        sample = self.session.answer(future)
        sample.role = role
        self.samples.append(sample)
        return sample

    def has(self, role: str) -> bool:
        return role in self.pool.roles


# --------------------------------------------------------------------------------------------------- episodes
def request_seed(*parts) -> int:
    """A 63-bit seed from what a draw depends on, equal on every rank and in every order."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def step_seeds(seed: int, t: int) -> Iterator[int]:
    """The seeds of what is asked in step t of an episode, one after the other."""
    yield request_seed(seed, t)
    for n in itertools.count(1):
        yield request_seed(seed, t, n)


def run_episode(session: Session, agent: Agent, episode: Episode, pool: "Pool") -> None:
    """One complete episode τ_ij, from the start page to its terminal reward; fills in `episode`."""
    cfg, unparsable = pool.cfg, 0
    space = dialects.space(cfg.coordinates)
    episode.steps = []
    episode.status = "max_steps"
    agent.begin(session.open(episode.group.task), episode.plan)
    session.settle()
    png = session.screenshot()
    for t in range(cfg.max_steps):
        ask = Ask(pool, session, step_seeds(episode.seed, t))
        sample, action = agent.act(png, ask)
        acted = next(i for i, s in enumerate(ask.samples) if s is sample)
        step = Step(png, ask.samples, acted, error=action.error)
        episode.steps.append(step)
        if not action.error:
            page = session.env.width, session.env.height
            seen = space(sample.image_size, page)
            step.calls = tuple(actions.rescale(c, seen, page) for c in action.calls)
            carry_out(session, step, cfg)
        png = session.screenshot()                # by now the browser has said what it has to say
        step.line = history_line(action, step.error, session.notes)
        session.notes.clear()
        agent.after(step, ask)
        unparsable = unparsable + 1 if action.error else 0
        if unparsable == 3:
            episode.status = "unparsable"
            break
        if any(map(actions.is_final, step.calls)) or session.done():
            episode.status = "failure"
            break
    episode.final_png = png
    episode.answer = actions.answer([c for s in episode.steps for c in s.calls])
    take_verdict(session, episode)


def take_verdict(session: Session, episode: Episode) -> None:
    """The environment's reward. ConnectionError where there is none."""
    verdict = session.asked(lambda session: session.env.judge(episode.group.task, session, episode.answer))
    episode.reward = verdict.reward
    episode.reason = verdict.reason
    episode.rewards = verdict.rewards
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
            session.perform(call, effects.ActionSettings(timeout=cfg.call_timeout))
        except actions.ActionError as e:
            step.error = str(e)
        session.settle()


def history_line(action, error: str, notes: list[str]) -> str:
    """One step as later prompts tell it: operation, else calls; then what went wrong (PAPER-GAPs 11, 12)."""
    said = action.operation or "; ".join(map(actions.format_call, action.calls)) or "(unreadable answer)"
    return " ".join(" | ".join([said, *([f"failed: {error}"] if error else []), *notes]).split())[:500]


# --------------------------------------------------------------------------------------------------- the pool
class Pool(contextlib.AbstractContextManager):
    """Browsers that run episodes; `run` answers their requests with the given models until all are done.

    `agent()` makes a fresh agent; `roles` are those that it may ask.
    """

    def __init__(self, env: Environment, cfg: RolloutConfig, agent: Callable[[], Agent], roles: list[Role]):
        self.env = env
        self.cfg = cfg
        self.agent = agent
        self.roles = {role.name: role for role in roles}
        self.watchdog = Watchdog(cfg.memory)
        self.inbox = queue.SimpleQueue()          # (Request, Future), finished Episodes, exceptions
        self.jobs = queue.PriorityQueue()         # (urgency, number, job): open tasks go before further ones
        self.numbers = itertools.count()
        self.closing = threading.Event()
        self.waiting: set[Future] = set()         # those without an answer
        self.live: set[int] = set()               # ids of the Episodes under way
        self.spent: Any = Counter(generation=0)   # seconds in models that answer here, and their batches
        servers = itertools.cycle([ws.strip() for ws in cfg.browser_ws.split(",")])
        self.sessions = [Session(env, cfg, self.watchdog, next(servers)) for _ in range(cfg.threads)]
        self.threads = [threading.Thread(target=self._work, args=(session,), daemon=True, name=f"browser-{i}")
                        for i, session in enumerate(self.sessions)]
        for t in self.threads:
            t.start()

    def run(self, tasks: list[Task], K: int, M: int, seed, models: dict, runs=(0,), bar=""):
        """K plans for every task, M episodes for every plan; yields the Group of each task and run.

        `models` maps a role to a function from a list of Requests to the list of their Samples, or to an
        object whose `submit(Request)` returns a Future of one; that one's ConnectionErrors are data, as the
        web's are. Requests' seeds come from (seed, task, run, k, m, step) alone. `bar` names the progress
        bar; "" for none. """
        self.models = models
        groups = [Group(task, run) for task in tasks for run in runs]
        for group in groups:
            job = partial(self._open, group=group, K=K, M=M, seed=seed)
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
            part = asked[i:i + self.cfg.max_batch]
            start = time.monotonic()
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

    def submit(self, request: Request) -> Future:
        """The answer to come of the request's role: a Future of its Sample."""
        future: Future = Future()
        model = self.models[request.role]
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

    def _open(self, session: Session, group: Group, K: int, M: int, seed) -> None:
        """First look at a task: x and o_0, then its K plans (Eq. 1), then its K·M episodes, each a job."""
        def look():
            group.instruction = session.open(group.task)
            session.settle()
            group.png = session.screenshot()
            ask = Ask(self, session, (request_seed(*key, k) for k in itertools.count()))
            group.plans = self.agent().plans(group.instruction, group.png, ask, K)
            assert len(group.plans) == K, f"the agent wrote {len(group.plans)} plans, not {K}"
        key = (seed, group.task.id, group.task.seed, group.run)
        start = time.monotonic()
        group.plans = [Plan(k) for k in range(K)]
        kinds, error, _ = self._attempt(session, look)
        told: dict[str, Any] = {"error": error, "fault": kinds[-1] if error else "",
                                "secrets": session.secrets, "seconds": time.monotonic() - start}
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
        work = partial(run_episode, session, self.agent(), episode, self)
        kinds, episode.error, episode.details = self._attempt(session, work)
        self.live.discard(id(episode))
        episode.seconds = time.monotonic() - start
        episode.secrets = session.secrets
        if episode.error:
            episode.status = "infra"
            episode.reward = None
            episode.fault = kinds.pop()
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
        self.live = live
        self.success = 0
        self.infra = 0
        self.steps = 0
        self.begun = time.monotonic()

    def count(self, episode: Episode) -> None:
        self.success += episode.status == "success"
        self.infra += episode.status == "infra"
        self.steps += len(episode.steps)
        self.update()
        self.set_postfix(live=len(self.live), success=self.success, infra=self.infra, refresh=False,
                         steps_per_s=f"{self.steps / (time.monotonic() - self.begun):.1f}")
