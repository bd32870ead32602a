"""Records -> trajectories, and the decompositions that stage 1 wrote for them.

`TrajectoryFiles` rebuilds trajectories with an index of 32 bytes per step instead of the data;
`load_decompositions` reads what stage 1 wrote. PAPER-GAPs, the paper does not say how trajectories are
rebuilt:
- a trajectory = the records of one task text in one image directory, in the order of their history's length;
  a record joins the run whose operations are its history, so two runs of a task in one directory stay apart;
- a missing or unreadable step is a gap: its words are taken from a later step's history, its screenshot is
  missing; without the first step there is no trajectory; what follows the first `terminate` is dropped.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

import runtime
from language import actions
from records.recordings import (
    Quarantine,
    Record,
    directory,
    fields,
    parse_record,
    question,
    read_meta,
    trajectory_id,
)


@dataclass(frozen=True)
class Trajectory:
    """`steps`: the records that are there, in order; record k has k lines of history, and a k may be
    missing."""
    id: str
    instruction: str
    platform: str
    steps: list[Record]

    def described(self) -> list[tuple[str, Path | None]]:
        """Every step as (words and calls, screenshot before it); gaps are filled from the last step's
        history."""
        known = {len(r.history): r for r in self.steps}
        last = self.steps[-1]
        out: list[tuple[str, Path | None]] = []
        for k in range(len(last.history) + 1):
            if k in known:
                calls = "; ".join(map(actions.format_call, known[k].calls))
                out.append((f"{known[k].operation} [{calls}]".strip(), known[k].image))
            else:
                out.append((last.history[k], None))
        return out


def build_trajectories(records: Iterable[Record], quarantine: Quarantine | None = None) -> list[Trajectory]:
    """Records in any order -> trajectories (those kinds that have a history), in the order of their first
    record."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "step":
            groups.setdefault(record.trajectory, []).append(record)
    return [t for group in groups.values() for t in _assemble(group, quarantine or Quarantine())]


class TrajectoryFiles:
    """All trajectories of the meta files, read as they are asked for: `len()` runs at most, in a fixed order.

    Opening reads every line once and keeps (group, file, offset, line number) in an array; iterating
    reads the lines of one trajectory at a time, wherever they are in the files.
    """

    def __init__(self, meta_paths, quarantine: Quarantine):
        self.entries = [e for e in read_meta(meta_paths) if e.repeat]
        self.quarantine = quarantine
        ids: dict[bytes, int] = {}                # a hash of the trajectory's name -> its group
        index = array("q")
        for file in range(len(self.entries)):
            for name, offset, number in self._scan(file):
                key = blake2b(name.encode(), digest_size=16).digest()
                index.extend((ids.setdefault(key, len(ids)), file, offset, number))
        self._n = len(ids)
        table = np.array(index, dtype=np.int64).reshape(-1, 4)
        self._index = table[np.argsort(table[:, 0], kind="stable")]

    def _scan(self, file: int) -> Iterator[tuple[str, int, int]]:
        """(trajectory, offset, line number) of every line that says what came before it."""
        entry = self.entries[file]
        offset = 0
        with open(entry.annotation, "rb") as f:
            for number, line in enumerate(f, 1):
                here = offset
                offset += len(line)
                if not line.strip():
                    continue
                try:
                    image, human, *_ = fields(line)
                except ValueError as e:
                    self.quarantine.leave_out(f"{entry.annotation}:{number}", str(e))
                    continue
                task, history = question(human)
                if history is None:
                    self.quarantine.note("records without a history")
                else:
                    yield trajectory_id(task, entry.root / image), here, number

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Trajectory]:
        starts = np.flatnonzero(np.diff(self._index[:, 0], prepend=-1, append=len(self)))
        files = [open(e.annotation, "rb") for e in self.entries]
        try:
            for begin, end in zip(starts, starts[1:]):
                yield from _assemble(list(self._read(self._index[begin:end], files)), self.quarantine)
        finally:
            for f in files:
                f.close()

    def _read(self, rows, files) -> Iterator[Record]:
        for _, file, offset, number in rows.tolist():
            files[file].seek(offset)
            where = f"{self.entries[file].annotation}:{number}"
            try:
                record = parse_record(files[file].readline(), self.entries[file], where, self.quarantine)
            except ValueError as e:
                self.quarantine.leave_out(where, str(e))
                continue
            yield record


def _assemble(records: list[Record], quarantine: Quarantine) -> list[Trajectory]:
    """The records of one task in one directory -> its runs. See the module's docstring for the rules."""
    runs: list[dict[int, Record]] = []            # step -> record
    for record in sorted(records, key=lambda r: len(r.history)):
        _join(record, runs, quarantine)
    found = []
    for n, run in enumerate(runs, 1):
        if steps := _until_the_end(run, quarantine):
            quarantine.note("another run in the same directory", n > 1)
            first = steps[0]
            name = first.trajectory + (f"~{n}" if n > 1 else "")
            found.append(Trajectory(name, first.instruction, first.platform, steps))
    return found


def _join(record: Record, runs: list[dict[int, Record]], quarantine: Quarantine) -> None:
    """Put a record into the run that it belongs to; a first step without one begins a new run."""
    k = len(record.history)
    # another directory may end in the same two names: the id is the same, the trajectory is not
    here = [run for run in runs if directory(run[0].image) == directory(record.image)]
    fitting = [run for run in here if all(run[i].line == record.history[i] for i in range(k) if i in run)]
    fitting = fitting or here
    free = [run for run in fitting if k not in run]
    taken = [run[k] for run in fitting if k in run]
    if any((r.image, r.calls) == (record.image, record.calls) for r in taken):
        quarantine.note("the same step twice")
    elif k == 0:
        runs.append({0: record})
    elif free:
        free[0][k] = record
    elif fitting:
        quarantine.note("another action at the same step")
    else:
        quarantine.leave_out(record.where, "its trajectory has no first step")


def _until_the_end(run: dict[int, Record], quarantine: Quarantine) -> list[Record]:
    """A run's records up to the first `terminate`; [] where they make no trajectory. `response` does not end
    a recording: 314 published trajectories go on after it."""
    steps = [run[k] for k in sorted(run)]
    ends = [i for i, r in enumerate(steps) if any(c.name == "terminate" for c in r.calls)]
    if not ends and len(steps) == 1:
        quarantine.leave_out(steps[0].where, "a single step that does not end its task: no trajectory")
        return []
    kept = steps[:ends[0] + 1] if ends else steps
    quarantine.note("trajectories without an end", not ends)
    quarantine.note("steps after the end", len(steps) - len(kept))
    quarantine.note("missing steps", len(kept[-1].history) + 1 - len(kept))
    return kept


def need_decompositions(path) -> None:
    if not Path(path).is_file():
        raise runtime.UserError(f"no decompositions at {path}; write them with annotate.py")


def load_decompositions(path) -> dict[str, list[tuple[str, str]]]:
    """decompositions.jsonl -> {trajectory id: [(title, goal), ...]}. Raises UserError where there is no such
    file."""
    need_decompositions(path)
    try:
        return {o["id"]: [(s["title"], s["goal"]) for s in o["subtasks"]]
                for o in runtime.each_jsonl(path, keys=("id", "subtasks"))}
    except (KeyError, TypeError) as e:
        raise runtime.UserError(f"{path} holds no subtasks ({e!r}); give what annotate.py wrote") from None
