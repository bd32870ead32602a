"""Stage 1: GUI trajectories -> a strong teacher -> decompositions (section 3.2, appendix A, table 3).

    python annotate.py --preset demo                                      # the demo's local teacher, seconds
    python annotate.py --meta META.json --out OUT.jsonl --max_dollars 50  # OPENAI_API_KEY is set
    python annotate.py --meta META.json --out OUT.jsonl --batch true      # at half the price, within a day
    python annotate.py stats --meta META.json --out OUT.jsonl             # table 3, cost so far, what is left

76,396 answers of 20 s each, 100 under way, take 4.3 hours; memory does not grow with the trajectories.
In: ScaleCUA's meta files (records/trajectories.py). Out: a line per trajectory, written when it is answered:
{"id", "task", "platform", "analysis", "subtasks": [{"title", "goal"}], "unnecessary": text or "", "teacher",
"prompt_hash", "usage": tokens {"input", "cached", "output"} of all its calls (a batch's: "batch_input", ...),
"n_steps"}, "metadata" where the server sent some; OUT.jsonl.quarantine.jsonl: {"where", "reason", "usage"}
for what gets no usable answer; OUT.jsonl.again.jsonl: {"id", "usage", "answer"}, paid for and to be asked
again. The same command goes on from where it stopped: no id of the first two files is asked for again.

PAPER-GAPs: STEP_i is the operation's text and, in brackets, the call with coordinates in 0-1; an answer that
is cut off or not in the form is asked again once, in the same conversation, with what was wrong; a refusal is
not; one unreadable screenshot quarantines its trajectory; screenshots are scaled to `max_side` pixels.
"""

import contextlib
import itertools
import queue
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm

import runtime
from language.plans import parse_teacher
from language.prompts import Prompts, load_prompts
from model import llm
from model.batches_api import Batches, pending
from records.trajectories import Quarantine, Trajectory, TrajectoryFiles, load_image, read_image, read_meta
from runtime import UserError, each_jsonl

KEYS = "id", "platform", "subtasks", "unnecessary", "prompt_hash", "usage"          # what is read again
TABLE_3 = {"Windows": (5873, 2.68, 1.2), "macOS": (3845, 2.43, 1.1), "Linux": (25122, 2.20, 1.8),
           "Android": (17245, 2.84, 1.6), "Web": (24311, 2.73, 1.5), "Total": (76396, 2.56, 1.6)}  # paper


@dataclass
class Config:
    meta: str = ""                       # meta file(s) of the trajectories, comma-separated
    out: str = "runs/decompositions.jsonl"  # output; OUT.quarantine.jsonl, OUT.batches/, ... are beside it
    model: str = "gpt-5.2-codex"         # the teacher, sec. 3.2
    base_url: str = ""                   # any OpenAI-compatible server; "" = OpenAI's
    api: str = "responses"               # responses | chat; codex models know only the first
    prompt_file: str = ""                # another text for the teacher, with {TASK}, {STEP_i}, ...
    prompts: str = ""                    # JSON file that replaces texts of language/texts.py by name
    concurrency: int = 32                # requests under way
    encoders: int = 2                    # threads that scale and encode screenshots
    max_side: int = 1280                 # px, larger screenshots are scaled down to this; 0 = as they are
    detail: str = ""                     # image detail asked for: low | high | auto; "" = its default
    max_output_tokens: int = 8192        # reasoning included
    reasoning: str = ""                  # reasoning effort: low | medium | high | "" = the model's default
    timeout: float = 300.0               # s per request
    retries: int = 8                     # of a request that met 5xx, a timeout or a closed connection
    first_pause: float = 0.5             # s before the first of them; doubles up to 60
    max_dollars: float = 0.0             # spending cap over all runs on this output; 0 = none
    max_tokens: int = 0                  # the same in tokens
    price_input: float = 1.75            # dollars per million tokens (GPT-5.2-Codex; give your model's)
    price_cached: float = 0.175          # ... of cached input
    price_output: float = 14.0           # ... of output
    limit: int = 0                       # stop after this many trajectories of the input; 0 = all
    retry_quarantined: bool = False      # ask again for the trajectories that are in quarantine
    batch: bool = False                  # by the Batch API
    batch_poll: float = 60.0             # s between two looks at the batches
    batch_mb: float = 190.0              # size of a batch file; OpenAI takes 200
    batch_requests: int = 50000          # requests of a batch file; OpenAI takes 50,000
    batch_open: int = 4                  # batches under way

    def __post_init__(self):
        runtime.check(self, "concurrency", "encoders", "batch_requests", "batch_open",
                      api=("responses", "chat"))
        for name in ("retries", "max_side", "max_dollars", "max_tokens", "limit"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} {getattr(self, name)}: give 0 or more")

    @property
    def prices(self) -> tuple[float, float, float]:
        return self.price_input, self.price_cached, self.price_output


# ----------------------------------------------------------------------------------------------- one question
@dataclass(frozen=True)
class Question:
    """A trajectory as the teacher gets it. `about`: the line's own facts; `parts`: texts and data URLs."""
    about: dict
    parts: list[str]


class Unusable(Exception):
    """No annotation will come of this trajectory; `usage` has been paid all the same."""

    def __init__(self, reason: str, usage: dict):
        super().__init__(reason)
        self.usage = usage


def encode(trajectory: Trajectory, prompts: Prompts, max_side: int) -> Question:
    """Screenshots are read, scaled and encoded here, once, off the request threads. ValueError: one is
    unreadable."""
    steps = trajectory.described()
    shots = {i: path for i, (_, path) in enumerate(steps) if path}
    parts = prompts.teacher(trajectory.instruction, [words for words, _ in steps], shots)
    about = {"id": trajectory.id, "task": trajectory.instruction, "platform": trajectory.platform,
             "n_steps": len(steps)}
    return Question(about, [p if isinstance(p, str) else picture(shots[p], max_side) for p in parts])


def picture(path: Path, max_side: int) -> str:
    """A screenshot as data URL: the file as it is, or scaled down. Raises ValueError for a broken one."""
    data, size = read_image(path)
    if max_side and max(size) > max_side or not data.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        return llm.image_url(load_image(path), max_side)
    return llm.image_url(data)


def ask(question: Question, client: llm.Client, prompts: Prompts, first: llm.Answer | None = None) -> dict:
    """The output line of one trajectory. `first`: an answer that is there already, and could not be read.

    Raises Unusable for a refusal or two answers that cannot be read, llm.LLMError where there is no answer.
    """
    asked, name = [("user", question.parts)], question.about["id"]
    answer = first or client.ask("", asked, name)
    spent = Counter(answer.usage)
    try:
        return output_line(question.about, answer, spent, prompts)
    except ValueError as e:
        said = [("assistant", answer.text)] if answer.text else []
        again = asked + said + [("user", prompts.retry(str(e)))]
    try:
        answer = client.ask("", again, name)
        spent.update(answer.usage)
        return output_line(question.about, answer, spent, prompts)
    except ValueError as e:
        raise Unusable(f"malformed twice: {e}", spent) from None
    except llm.LLMError as e:
        e.usage, e.first = spent, answer  # it has been paid for
        raise


def output_line(about: dict, answer: llm.Answer, spent: dict, prompts: Prompts) -> dict:
    """Raises ValueError with what is wrong with the answer, Unusable for a refusal."""
    if answer.status == "refused":
        raise Unusable(f"refused: {answer.reason[:300]}", spent)
    if answer.status == "truncated":
        raise ValueError(f"it was cut off ({answer.reason}), be more concise")
    annotation = parse_teacher(answer.text)
    line = {"id": about["id"], "task": about["task"], "platform": about["platform"],
            "analysis": annotation.analysis,
            "subtasks": [{"title": s.title, "goal": s.goal} for s in annotation.subtasks],
            "unnecessary": annotation.unnecessary, "teacher": answer.model,
            "prompt_hash": prompts.digest("teacher"), "usage": dict(spent), "n_steps": about["n_steps"]}
    return line | ({"metadata": answer.metadata} if answer.metadata else {})


# ------------------------------------------------------------------------------------------------ all of them
def answers(todo: Iterator[Trajectory | None], cfg: Config, client: llm.Client, prompts: Prompts,
            first: Callable[[str], llm.Answer | None]) -> Iterator[tuple]:
    """Yield (id, output line or exception) as they come. Twice as many trajectories as there are requests
    under way are in memory: some are being encoded, and some wait out a pause that the server asked for.
    `todo` has a None where the next one is to wait for an answer. `first`: see `ask`."""
    finished, under_way = queue.SimpleQueue(), 0
    with ThreadPoolExecutor(cfg.encoders) as encoders, ThreadPoolExecutor(2 * cfg.concurrency) as askers:
        def submit(pool, function, name, *args):
            pool.submit(function, *args).add_done_callback(lambda future: finished.put((name, future)))
        while True:
            while under_way < 2 * cfg.concurrency + cfg.encoders and (trajectory := next(todo, None)):
                submit(encoders, encode, trajectory.id, trajectory, prompts, cfg.max_side)
                under_way += 1
            if not under_way:
                return
            name, future = finished.get()
            result = future.exception() or future.result()
            if isinstance(result, Question):
                submit(askers, ask, name, result, client, prompts, first(name))
            else:
                under_way -= 1
                yield name, result


def batch_answers(todo: Iterator[Trajectory], cfg: Config, client: llm.Client,
                  prompts: Prompts) -> Iterator[tuple]:
    """The same by the Batch API; an answer that cannot be read comes as it is, to be asked again."""
    batches = Batches(client, f"{cfg.out}.batches", int(cfg.batch_mb * 1e6), cfg.batch_requests,
                      cfg.batch_open, cfg.batch_poll)
    failed: deque = deque()

    def questions():
        with ThreadPoolExecutor(cfg.encoders) as encoders:
            window = deque()
            while True:
                window.extend((t.id, encoders.submit(encode, t, prompts, cfg.max_side))
                              for t in itertools.islice(todo, 2 * cfg.encoders - len(window)))
                if not window:
                    return
                name, future = window.popleft()
                if error := future.exception():
                    failed.append((name, error))
                else:
                    yield future.result().about, client.body("", [("user", future.result().parts)])
    try:
        for about, result in batches.run(questions()):
            if isinstance(result, llm.Answer):
                try:
                    with contextlib.suppress(ValueError):  # then it is the answer, to be asked about again
                        result = output_line(about, result, result.usage, prompts)
                except Unusable as e:
                    result = e
            elif result.transient:
                result = LeftOpen(str(result))
            yield about["id"], result
            while failed:
                yield failed.popleft()
    except llm.LLMError as e:
        raise UserError(f"{e}; the same command goes on from here") from None
    yield from failed


class LeftOpen(Exception):
    """By its batch, which expired, or met a server's bad minute: the next run asks it."""


class Ledger:
    """What is done, under way and to be asked again, what it cost, and the only place that writes."""

    def __init__(self, cfg: Config, prompt_hash: str):
        self.out, self.cfg, self.done, self.under_way = Path(cfg.out), cfg, set(), set()
        self.new, self.spent = Counter(), llm.Spent(cfg.prices)
        for line in each_jsonl(self.out, repair=True, keys=KEYS):
            if line["prompt_hash"] != prompt_hash:
                raise UserError(f"{self.out} was written with another prompt ({line['prompt_hash']} and not "
                                f"{prompt_hash}); give another --out")
            self.done.add(line["id"])
            self.spent.add(line["usage"])
        left_out, self.again = unsettled(cfg, self.done, repair=True)
        self.spent.add(*left_out.values(), *(line["usage"] for line in self.again.values()))
        if not cfg.retry_quarantined:
            self.done |= left_out.keys()
        elif left_out:
            self.again |= {name: {"id": name, "usage": usage} for name, usage in left_out.items()}
            runtime.append_jsonl(beside(cfg, "again"), [self.again[name] for name in left_out])
            runtime.rewrite_jsonl(beside(cfg, "quarantine"), lambda o: "usage" not in o)
        self.quarantine = Quarantine(beside(cfg, "quarantine"))

    def first(self, name: str) -> llm.Answer | None:
        """An answer that is there, and could not be read."""
        return (answer := self.again.get(name, {}).get("answer")) and llm.Answer(**answer)

    def _total(self, name: str, usage: dict) -> dict:
        """All that this trajectory has cost; `usage` is new."""
        self.spent.add(usage)
        total = Counter(self.again.pop(name, {}).get("usage"))
        total.update(usage)
        return dict(total)

    def write(self, line: dict) -> None:
        runtime.append_jsonl(self.out, [line | {"usage": self._total(line["id"], line["usage"])}])
        self.done.add(line["id"])
        self.new["annotated"] += 1

    def leave_out(self, name: str, error: Exception) -> None:
        self.quarantine.leave_out(name, str(error) or type(error).__name__,
                                  usage=self._total(name, getattr(error, "usage", {})))
        self.done.add(name)
        self.new["quarantined"] += 1

    def ask_again(self, name: str, answer: llm.Answer) -> None:
        """Keep an answer that could not be read: it is paid for, and what was wrong has to be said."""
        if not self.first(name):  # else a batch is collected again whose collector was killed
            kept = asdict(replace(answer, usage={}))
            self.again[name] = {"id": name, "usage": self._total(name, answer.usage), "answer": kept}
            runtime.append_jsonl(beside(self.cfg, "again"), [self.again[name]])

    def price_unknown(self) -> bool:
        return bool(self.cfg.max_dollars or self.cfg.max_tokens) and not self.spent.counted

    def over(self) -> str:
        """Why no further question may be asked: with those under way, a cap would be passed."""
        cfg, spent = self.cfg, self.spent
        expected = 1 + (len(self.under_way) + 1) / max(1, spent.counted)
        if cfg.max_dollars and spent.dollars * expected > cfg.max_dollars:
            return f"{spent} spent, --max_dollars is {cfg.max_dollars:g}"
        if cfg.max_tokens and spent.tokens * expected > cfg.max_tokens:
            return f"{spent} spent, --max_tokens is {cfg.max_tokens:,}"
        if spent.uncounted and (cfg.max_dollars or cfg.max_tokens):
            return "the server counts no tokens, so no cap can hold: leave --max_dollars, --max_tokens out"
        if cfg.batch and self.price_unknown():
            return "the price of a question is not known: run --limit 20 first, without --batch"
        return ""


def unsettled(cfg: Config, annotated: set, repair: bool = False) -> tuple[dict, dict]:
    """What has been paid for without an annotation: ({id: usage} in quarantine, {id: line} to ask again)."""
    left_out = {o["where"]: o["usage"] for o in each_jsonl(beside(cfg, "quarantine")) if "usage" in o}
    again = each_jsonl(beside(cfg, "again"), repair)
    return left_out, {o["id"]: o for o in again if o["id"] not in annotated and o["id"] not in left_out}


def beside(cfg: Config, name: str) -> Path:
    return Path(f"{cfg.out}.{name}.jsonl")


class Stop:
    """Why no further question is asked; "" while there is no reason. Ctrl-C is one: what is under way is
    still awaited, and written, unless it is pressed again. `left_open`: what to say at the end."""

    def __init__(self, client: llm.Client):
        self.why, self.left_open, self.client = "", "", client

    def __call__(self, why: str) -> None:
        self.why = self.why or why
        self.client.stop()

    @contextlib.contextmanager
    def on_interrupt(self):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def interrupted(*_):
            signal.signal(signal.SIGINT, before)
            self("interrupted")
        signal.signal(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def handle(results: Iterable, ledger: Ledger, stop: Stop, patience: int, bar: tqdm) -> None:
    """Write every result.

    A question that the server never answered is put into quarantine once a later one succeeds: then it is
    that question's fault. After `patience` of them in a row it is the server's: the run stops, and they stay
    to be asked. It also stops after many in a row that the server rejects, or answers to no use.
    """
    unanswered, rejected = [], 0
    for name, result in results:
        ledger.under_way.discard(name)
        if name in ledger.done:
            continue  # a batch whose answers a killed run had begun to take
        if isinstance(result, dict):
            ledger.write(result)
            rejected = 0
            while unanswered and not stop.why:
                ledger.leave_out(*unanswered.pop())
        elif isinstance(result, llm.Answer):
            ledger.ask_again(name, result)
        elif isinstance(result, LeftOpen):
            ledger.new["left open"] += 1
            stop.left_open = f"{ledger.new['left open']} questions were left open; the last: {result}"
        elif isinstance(result, llm.LLMError) and (result.fatal or result.transient or stop.why):
            unanswered.append((name, result))
            if result.fatal or len(unanswered) >= patience:
                stop(f"the teacher does not answer: {result}")
        elif isinstance(result, (ValueError, Unusable, llm.LLMError)):
            ledger.leave_out(name, result)
            rejected += not isinstance(result, ValueError)
            if rejected >= max(20, patience):
                stop(f"{rejected} in a row could not be annotated: {result}")
        else:
            raise result
        bar.update()
        bar.set_postfix_str(f"{ledger.spent}, {ledger.new['quarantined']} quarantined", refresh=False)
    if unanswered and not ledger.new["annotated"]:
        stop(f"the teacher does not answer: {unanswered[-1][1]}")
    for name, error in unanswered:
        if not stop.why:
            ledger.leave_out(name, error)
        elif first := getattr(error, "first", None):
            ledger.ask_again(name, first)


def main(cfg: Config) -> None:
    read_meta(need_meta(cfg))                  # what is missing is said before anything is written
    prompts, client = load_teacher_prompt(cfg), new_client(cfg)
    with runtime.only_process(runtime.new_file(cfg.out)):
        # 1. What is there already, and what is to be done.
        ledger = Ledger(cfg, prompts.digest("teacher"))
        ledger.under_way = {about["id"] for about in pending(f"{cfg.out}.batches")}
        if ledger.under_way and not cfg.batch:
            raise UserError(f"{len(ledger.under_way)} questions are under way in batches: go on with --batch "
                            f"(or remove {cfg.out}.batches and pay for them once more)")
        if cfg.max_dollars:
            print(f"counted for {cfg.model}: {cfg.prices} dollars a million tokens (see --price_input, ...)")
        trajectories, stop = TrajectoryFiles(need_meta(cfg), ledger.quarantine), Stop(client)

        def todo(wanted):
            for t in itertools.islice(trajectories, cfg.limit or None):
                if t.id in ledger.done or t.id in ledger.under_way or not wanted(t.id):
                    continue
                while ledger.price_unknown() and ledger.under_way and not cfg.batch:
                    yield None
                stop.why = stop.why or ledger.over()
                if stop.why:
                    return
                ledger.under_way.add(t.id)
                yield t

        # 2. Ask; what a batch could not answer is asked one by one.
        bar = tqdm(total=len(trajectories), initial=len(ledger.done), unit="traj", disable=None)
        client.on_wait = lambda s: bar.set_postfix_str(f"the server asks to wait {s:.0f} s")
        patience = max(8, cfg.concurrency)
        with stop.on_interrupt(), bar:
            if cfg.batch:
                asked = batch_answers(todo(lambda name: not ledger.first(name)), cfg, client, prompts)
                handle(asked, ledger, stop, patience, bar)
                trajectories.quarantine = Quarantine()  # the irregularities have been counted
            if ledger.again or not cfg.batch:
                left = todo(lambda name: ledger.first(name) or not cfg.batch)
                handle(answers(left, cfg, client, prompts, ledger.first), ledger, stop, patience, bar)

        # 3. Say what happened.
        print(f"{ledger.out}: {ledger.new['annotated']} annotated, {ledger.new['quarantined']} quarantined, "
              f"{ledger.spent} so far; {len(ledger.done)} of about {len(trajectories)} done")
        if irregular := {what: n for what, n in ledger.quarantine.counts.items() if n}:
            print("in the data: " + ", ".join(f"{n} {what}" for what, n in sorted(irregular.items())))
        if stop.why == "interrupted":
            raise KeyboardInterrupt
        if why := stop.why or stop.left_open:
            raise UserError(f"stopped, {why}; the same command goes on from here")


def load_teacher_prompt(cfg: Config) -> Prompts:
    prompts = load_prompts(cfg.prompts)
    if not cfg.prompt_file:
        return prompts
    try:
        return load_prompts(cfg.prompts, teacher=Path(cfg.prompt_file).read_text(encoding="utf-8"))
    except (OSError, ValueError, UserError) as e:
        raise UserError(f"--prompt_file {cfg.prompt_file}: {e}") from None


def new_client(cfg: Config) -> llm.Client:
    return llm.Client(cfg.model, cfg.base_url, cfg.api, cfg.concurrency, cfg.timeout, cfg.retries,
                      cfg.first_pause, max_output_tokens=cfg.max_output_tokens, reasoning=cfg.reasoning,
                      detail=cfg.detail)


def dry_run(cfg: Config) -> None:
    """What would be asked. What it costs depends on how the model counts pictures: twenty answers tell."""
    load_teacher_prompt(cfg)
    trajectories, out = TrajectoryFiles(need_meta(cfg), Quarantine()), Path(cfg.out)
    done = sum("usage" in o for file in (out, beside(cfg, "quarantine")) for o in each_jsonl(file))
    looked_at = list(itertools.islice(trajectories, 20))
    pictures = sum(len(t.steps) for t in looked_at) / max(1, len(looked_at))
    n = min(len(trajectories), cfg.limit or len(trajectories))
    print(f"{cfg.meta}: at most {n:,} trajectories, one question each to {cfg.model} at "
          f"{cfg.base_url or 'api.openai.com'}, {cfg.concurrency} at a time; the first {len(looked_at)} have "
          f"{pictures:.1f} screenshots on average, scaled to {cfg.max_side} pixels a side\n"
          f"{cfg.out}: {done:,} done\n"
          "dollars: ask --limit 20; then annotate.py stats, with the same flags, tells what the rest costs")


def need_meta(cfg: Config) -> str:
    if not cfg.meta:
        raise UserError("no trajectories given: --meta META.json")
    return cfg.meta


def stats(cfg: Config) -> None:
    """Table 3 of the output beside the paper's numbers, the cost so far and what is left."""
    if not Path(cfg.out).is_file():
        raise UserError(f"no annotations at {cfg.out}; write them with annotate.py --out {cfg.out}")
    rows, spent, ids = {"Total": Counter()}, llm.Spent(cfg.prices), set()
    for line in each_jsonl(Path(cfg.out), keys=KEYS):
        ids.add(line["id"])
        spent.add(line["usage"])
        for name in (line["platform"], "Total"):
            rows.setdefault(name, Counter()).update(n=1, subtasks=len(line["subtasks"]),
                                                    unnecessary=bool(line["unnecessary"]))
    print(f"{'':10}{'ours':>10}{'':24}{'the paper':>10}")
    print(f"{'platform':10}" + "    ".join(2 * [f"{'examples':>10}{'subtasks':>10}{'unneeded':>10}"]))
    for name in sorted(rows.keys() | TABLE_3.keys(), key=lambda k: (k == "Total", [*TABLE_3, k].index(k))):
        c, (n, subtasks, share) = rows.get(name, Counter()), TABLE_3.get(name, (0, 0, 0))
        ours = f"{c['n']:>10,}"
        if c["n"]:
            ours += f"{c['subtasks'] / c['n']:>10.2f}{c['unnecessary'] / c['n']:>10.1%}"
        theirs = f"{n:>10,}{subtasks:>10.2f}{share:>9.1f}%" if n else ""
        print(f"{name:10}{ours:30}    {theirs}".rstrip())
    left_out, again = unsettled(cfg, ids)
    spent.add(*left_out.values(), *(line["usage"] for line in again.values()))
    print(f"cost so far {spent}; {len(left_out)} in quarantine")
    if cfg.meta:
        done = rows["Total"]["n"] + len(left_out)
        left = max(0, len(TrajectoryFiles(cfg.meta, Quarantine())) - done)
        print(f"left about {left:,} trajectories, ${left * spent.dollars / max(1, done):.2f} at this rate")


if __name__ == "__main__":
    runtime.launch(main, stats, dry_run=dry_run, words={"stats": ("out",)})
