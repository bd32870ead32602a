"""Stage 1's books: what is annotated, left out or to be asked again, what it cost, and when to stop asking.

Three files, which grow a line at a time: OUT.jsonl, the annotations (fields: annotate.py);
OUT.jsonl.quarantine.jsonl: {"where", "reason", "usage"} for what gets no usable answer, without "usage" for
what is wrong in the data; OUT.jsonl.again.jsonl: {"id", "usage", "answer"} for what is paid for and to be
asked again, "answer" where there is one that could not be read. A line of the last counts until its id stands
in one of the other two, so that a kill between two writes neither forgets what is paid for nor counts it
twice.
"""

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import runtime
from model import llm
from records.trajectories import Quarantine
from runtime import UserError, each_jsonl

KEYS = "id", "platform", "subtasks", "unnecessary", "prompt_hash", "usage"  # of a line, what is read again


class Unusable(Exception):
    """No annotation will come of this trajectory; `usage` has been paid all the same."""

    def __init__(self, reason: str, usage: dict):
        super().__init__(reason)
        self.usage = usage


class LeftOpen(Exception):
    """By its batch, which expired, or met a server's bad minute: the next run asks it."""


class Ledger:
    """What is done, under way and to be asked again, what it cost, and the only place that writes. `cfg`:
    annotate.Config."""

    def __init__(self, cfg, prompt_hash: str):
        self.cfg = cfg
        self.out = Path(cfg.out)
        self.done: set[str] = set()
        self.under_way: set[str] = set()
        self.new: Counter = Counter()
        self.spent = llm.Spent(cfg.prices)
        for line in each_jsonl(self.out, repair=True, keys=KEYS):
            if line["prompt_hash"] != prompt_hash:
                raise UserError(f"{self.out} was written with another prompt ({line['prompt_hash']} and not "
                                f"{prompt_hash}); give another --out")
            self.done.add(line["id"])
            self.spent.add(line["usage"])
        left_out, self.again = unsettled(cfg.out, self.done, repair=True)
        self.spent.add(*left_out.values(), *(line["usage"] for line in self.again.values()))
        if not cfg.retry_quarantined:
            self.done |= left_out.keys()
        elif left_out:
            self._take_back(left_out)
        self.quarantine = Quarantine(beside(cfg.out, "quarantine"))

    def _take_back(self, left_out: dict[str, dict]) -> None:
        """From quarantine among what is to be asked again, first there and then no longer here."""
        lines: dict[str, dict] = {name: {"id": name, "usage": usage} for name, usage in left_out.items()}
        self.again |= lines
        runtime.append_jsonl(beside(self.out, "again"), list(lines.values()))
        runtime.rewrite_jsonl(beside(self.out, "quarantine"), lambda o: "usage" not in o)

    def first(self, name: str) -> llm.Answer | None:
        """An answer that is there, and could not be read."""
        answer = self.again.get(name, {}).get("answer")
        return llm.Answer(**answer) if answer else None

    def _total(self, name: str, usage: dict) -> dict:
        """All that this trajectory has cost; `usage` is new."""
        self.spent.add(usage)
        total: Counter = Counter(self.again.pop(name, {}).get("usage"))
        total.update(usage)
        return dict(total)

    def write(self, line: dict) -> None:
        """An annotation."""
        runtime.append_jsonl(self.out, [line | {"usage": self._total(line["id"], line["usage"])}])
        self.done.add(line["id"])
        self.new["annotated"] += 1

    def leave_out(self, name: str, error: Exception) -> None:
        """Into quarantine."""
        self.quarantine.leave_out(name, str(error) or type(error).__name__,
                                  usage=self._total(name, getattr(error, "usage", {})))
        self.done.add(name)
        self.new["quarantined"] += 1

    def ask_again(self, name: str, answer: llm.Answer) -> None:
        """Keep an answer that could not be read: it is paid for, and what was wrong has to be said."""
        if self.first(name):
            return  # a batch is collected again whose collector was killed
        kept = asdict(replace(answer, usage={}))
        self.again[name] = {"id": name, "usage": self._total(name, answer.usage), "answer": kept}
        runtime.append_jsonl(beside(self.out, "again"), [self.again[name]])

    def price_unknown(self) -> bool:
        """Whether a cap is set, and no answer yet says what one costs."""
        return bool(self.cfg.max_dollars or self.cfg.max_tokens) and not self.spent.counted

    def over(self) -> str:
        """Why no further question may be asked: with those under way, a cap would be passed."""
        cfg = self.cfg
        spent = self.spent
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


def unsettled(out, annotated: set, repair: bool = False) -> tuple[dict[str, dict], dict[str, dict]]:
    """What has been paid for without an annotation: ({id: usage} in quarantine, {id: line} to ask again)."""
    left_out = {o["where"]: o["usage"] for o in each_jsonl(beside(out, "quarantine")) if "usage" in o}
    again = each_jsonl(beside(out, "again"), repair)
    return left_out, {o["id"]: o for o in again if o["id"] not in annotated and o["id"] not in left_out}


def beside(out, name: str) -> Path:
    """The file of that name beside the output."""
    return Path(f"{out}.{name}.jsonl")


# ---------------------------------------------------------------------------------------------- when it stops
class Stop:
    """Why no further question is asked; "" while there is no reason. Ctrl-C is one: what is under way is
    still awaited, and written, unless it is pressed again. `left_open`: what to say at the end."""

    def __init__(self, client: llm.Client):
        self.client = client
        self.why = ""
        self.left_open = ""

    def __call__(self, why: str) -> None:
        self.why = self.why or why
        self.client.stop()

    @contextlib.contextmanager
    def on_interrupt(self):
        """Within the block the first Ctrl-C stops, the second one ends the process as ever."""
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


def handle(results: Iterable, ledger: Ledger, stop: Stop, patience: int, bar) -> None:
    """Write every result, (id, output line or answer or error). `bar`: tqdm.

    A question that the server never answered is put into quarantine once a later one succeeds: then it is
    that question's fault. After `patience` of them in a row it is the server's: the run stops, and they stay
    to be asked. It also stops after many in a row that the server rejects, or answers to no use.
    """
    unanswered: list[tuple[str, llm.LLMError]] = []
    rejected = 0
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
    settle(unanswered, ledger, stop)


def settle(unanswered: list[tuple[str, llm.LLMError]], ledger: Ledger, stop: Stop) -> None:
    """What becomes, at the end, of questions that got no answer: the fault was theirs, or the server's."""
    if unanswered and not ledger.new["annotated"]:
        stop(f"the teacher does not answer: {unanswered[-1][1]}")
    for name, error in unanswered:
        if not stop.why:
            ledger.leave_out(name, error)
        elif first := getattr(error, "first", None):
            ledger.ask_again(name, first)
