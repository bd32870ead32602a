"""Stage 1: GUI trajectories -> a strong teacher -> decompositions (section 3.2, appendix A, table 3).

    python annotate.py --preset demo                                      # the demo's local teacher, seconds
    python annotate.py --meta META.json --out OUT.jsonl --max_dollars 50  # OPENAI_API_KEY is set
    python annotate.py --meta META.json --out OUT.jsonl --batch true      # at half the price, within a day
    python annotate.py stats --meta META.json --out OUT.jsonl             # table 3, cost so far, what is left

76,396 answers of 20 s each, 100 under way, take 4.3 hours; memory does not grow with the trajectories.
In: ScaleCUA's meta files (records/recordings.py). Out: a line per trajectory, written when it is answered:
{"id", "task", "platform", "analysis", "subtasks": [{"title", "goal"}], "unnecessary": text or "", "teacher",
"prompt_hash", "usage": tokens {"input", "cached", "output"} of all its calls (a batch's: "batch_input", ...),
"n_steps"}, "metadata" where the server sent some; OUT.jsonl.quarantine.jsonl and OUT.jsonl.again.jsonl beside
it: what gets no usable answer, and what is to be asked again (records/ledger.py). The same command goes on
from where it stopped: no id of the first two files is asked for again.

PAPER-GAPs: STEP_i is the operation's text and, in brackets, the call with coordinates in 0-1; an answer that
is cut off or not in the form is asked again once, in the same conversation, with what was wrong; a refusal is
not; one unreadable screenshot quarantines its trajectory; screenshots are scaled to `max_side` pixels.
"""

import itertools
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import runtime
from language.plans import parse_teacher
from language.prompts import Prompts, load_prompts
from model import llm
from model.batches_api import Batches, pending
from records.ledger import KEYS, Ledger, LeftOpen, Stop, Unusable, beside, handle, unsettled
from records.recordings import Quarantine, load_image, read_image, read_meta
from records.tables import TABLE_3, paper_rows
from records.trajectories import Trajectory, TrajectoryFiles
from runtime import UserError, each_jsonl


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
    name = question.about["id"]
    asked = [("user", question.parts)]
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
        e.usage = spent  # it has been paid for
        e.first = answer
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
    finished: queue.SimpleQueue = queue.SimpleQueue()
    under_way = 0
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
    failed: deque = deque()  # (id, error) of those that could not be encoded
    try:
        for about, result in batches.run(batch_questions(todo, cfg, client, prompts, failed)):
            yield about["id"], batch_result(about, result, prompts)
            while failed:
                yield failed.popleft()
    except llm.LLMError as e:
        raise UserError(f"{e}; the same command goes on from here") from None
    yield from failed


def batch_questions(todo: Iterator[Trajectory], cfg: Config, client: llm.Client, prompts: Prompts,
                    failed: deque) -> Iterator[tuple[dict, dict]]:
    """(about, body) of each trajectory in order, a few of them encoded ahead."""
    with ThreadPoolExecutor(cfg.encoders) as encoders:
        window: deque = deque()
        while True:
            window.extend((t.id, encoders.submit(encode, t, prompts, cfg.max_side))
                          for t in itertools.islice(todo, 2 * cfg.encoders - len(window)))
            if not window:
                return
            name, future = window.popleft()
            if error := future.exception():
                failed.append((name, error))
            else:
                question = future.result()
                yield question.about, client.body("", [("user", question.parts)])


def batch_result(about: dict, result: llm.Answer | llm.LLMError, prompts: Prompts):
    """What a batch brought, as `handle` takes it: a line, an answer to be asked about again, or an error."""
    if isinstance(result, llm.LLMError):
        return LeftOpen(str(result)) if result.transient else result
    try:
        return output_line(about, result, result.usage, prompts)
    except ValueError:
        return result
    except Unusable as e:
        return e


# ------------------------------------------------------------------------------------------------ the command
def main(cfg: Config) -> None:
    read_meta(need_meta(cfg))                  # what is missing is said before anything is written
    prompts = load_teacher_prompt(cfg)
    client = new_client(cfg)
    with runtime.only_process(runtime.new_file(cfg.out)):
        # 1. What is there already, and what is to be done.
        ledger = Ledger(cfg, prompts.digest("teacher"))
        ledger.under_way = {about["id"] for about in pending(f"{cfg.out}.batches")}
        if ledger.under_way and not cfg.batch:
            raise UserError(f"{len(ledger.under_way)} questions are under way in batches: go on with --batch "
                            f"(or remove {cfg.out}.batches and pay for them once more)")
        if cfg.max_dollars:
            print(f"counted for {cfg.model}: {cfg.prices} dollars a million tokens (see --price_input, ...)")
        trajectories = TrajectoryFiles(need_meta(cfg), ledger.quarantine)
        stop = Stop(client)

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
    trajectories = TrajectoryFiles(need_meta(cfg), Quarantine())
    files = (Path(cfg.out), beside(cfg.out, "quarantine"))
    done = sum("usage" in o for file in files for o in each_jsonl(file))
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
    rows: dict[str, Counter] = {"Total": Counter()}
    spent = llm.Spent(cfg.prices)
    ids: set[str] = set()
    for line in each_jsonl(Path(cfg.out), keys=KEYS):
        ids.add(line["id"])
        spent.add(line["usage"])
        for name in (line["platform"], "Total"):
            rows.setdefault(name, Counter()).update(n=1, subtasks=len(line["subtasks"]),
                                                    unnecessary=bool(line["unnecessary"]))
    print_table_3(rows)
    left_out, again = unsettled(cfg.out, ids)
    spent.add(*left_out.values(), *(line["usage"] for line in again.values()))
    print(f"cost so far {spent}; {len(left_out)} in quarantine")
    if cfg.meta:
        done = rows["Total"]["n"] + len(left_out)
        left = max(0, len(TrajectoryFiles(cfg.meta, Quarantine())) - done)
        print(f"left about {left:,} trajectories, ${left * spent.dollars / max(1, done):.2f} at this rate")


def print_table_3(rows: dict[str, Counter]) -> None:
    """`rows`: by platform and in total, the sums of n, subtasks, unnecessary."""
    paper = dict(paper_rows(TABLE_3).values())
    print(f"{'':10}{'ours':>10}{'':24}{'the paper':>10}")
    print(f"{'platform':10}" + "    ".join(2 * [f"{'examples':>10}{'subtasks':>10}{'unneeded':>10}"]))
    *known, total = paper
    for name in [*known, *(name for name in rows if name not in paper), total]:
        sums = rows.get(name, Counter())
        ours = f"{sums['n']:>10,}"
        if sums["n"]:
            ours += f"{sums['subtasks'] / sums['n']:>10.2f}{sums['unnecessary'] / sums['n']:>10.1%}"
        theirs = ""
        if name in paper:
            n, subtasks, share = paper[name]
            theirs = f"{n:>10}{subtasks:>10}{share:>9}%"
        print(f"{name:10}{ours:30}    {theirs}".rstrip())


if __name__ == "__main__":
    runtime.launch(main, stats, dry_run=dry_run, words={"stats": ("out",)})
