"""GUI demonstrations in ScaleCUA's files -> records (one step each) and trajectories, for stages 1 and 2.

A meta file names annotation files (JSONL, one line = one step) with their image roots; it may also be a list
of meta files. `read_records` streams the records, `TrajectoryFiles` rebuilds trajectories with an index of 32
bytes per step instead of the data, `load_decompositions` reads what stage 1 wrote. What cannot be used goes
to a quarantine file, one line {"where", "reason"}; every irregularity that is handled is counted in
`Quarantine.counts`.

A step's coordinates are kept as fractions of the image (0-1), whatever the file had; `Record.action(w, h)`
writes them in pixels. PAPER-GAPs, the paper does not say how trajectories are rebuilt:
- a trajectory = the records of one task text in one image directory, in the order of their history's length;
  a record joins the run whose operations are its history, so two runs of a task in one directory stay apart;
- a missing or unreadable step is a gap: its words are taken from a later step's history, its screenshot is
  missing; without the first step there is no trajectory; what follows the first `terminate` is dropped;
- a data set with `repeat_time` 0 is skipped; a fraction or multiple concerns single records (stage 2), not
  trajectories.
"""

import io
import json
import random
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

import runtime
from language import actions

PLATFORMS = {"windows": "Windows", "macos": "macOS", "mac": "macOS", "ubuntu": "Linux", "linux": "Linux",
             "android": "Android", "mobile": "Android", "iphone": "iOS", "ipad": "iOS", "web": "Web",
             "mind2web": "Web"}
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what PIL raises
MIN_SIDE = 28  # pixels; a smaller image has no visual token


# -------------------------------------------------------------------------------------------------- the parts
@dataclass(frozen=True)
class Record:
    """One step: what was seen, what had been done before, what was done. `history` is [] at the first step.

    kind: "step"; "step_no_history" (the file does not say what came before); "grounding" (an instruction and
    its call); "box" and "point" (no call; `box` holds 4 or 2 fractions). `calls` have coordinates in 0-1.
    """
    trajectory: str
    instruction: str
    image: Path
    history: list[str]
    operation: str
    calls: tuple[actions.Call, ...]
    think: str
    width: int
    height: int
    kind: str
    platform: str
    where: str
    box: tuple[float, ...] = ()

    def action(self, width: int, height: int) -> str:
        """The calls as text, one per line, with coordinates in pixels of an image of this size."""
        return "\n".join(actions.format_call(actions.rescale(c, (1, 1), (width, height))) for c in self.calls)

    @property
    def line(self) -> str:
        """What a later step's history says about this one: the operation, else the calls (PAPER-GAP 11)."""
        return self.operation or "; ".join(map(actions.format_call, self.calls))


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
        out = []
        for k in range(len(last.history) + 1):
            if k in known:
                calls = "; ".join(map(actions.format_call, known[k].calls))
                out.append((f"{known[k].operation} [{calls}]".strip(), known[k].image))
            else:
                out.append((last.history[k], None))
        return out


class Quarantine:
    """What was left out, with the reason, in a file (none: only counted). One line per place, over all
    runs."""

    def __init__(self, path: str | Path = ""):
        self.path, self.counts = path, Counter()
        self.seen = {o["where"] for o in runtime.rewrite_jsonl(path, lambda o: True)} if path else set()

    def note(self, what: str, n: int = 1) -> None:
        """Count an irregularity that was dealt with."""
        self.counts[what] += n

    def leave_out(self, where: str, reason: str, **more) -> None:
        self.counts["left out"] += 1
        if where in self.seen:
            return
        self.seen.add(where)
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            runtime.append_jsonl(self.path, [{"where": where, "reason": reason} | more])


# ------------------------------------------------------------------------------------------------- meta files
@dataclass(frozen=True)
class Entry:
    """One data set of a meta file. `repeat`: 0 skip, below 1 a random share, above 1 so many copies."""
    name: str
    root: Path
    annotation: Path
    repeat: float
    platform: str


def read_meta(paths: str | Path | Iterable) -> list[Entry]:
    """Meta files (comma-separated, or a list) -> data sets. A path inside is taken from here, else from the
    meta file. Raises UserError for a file that is missing or not of that form."""
    entries = []
    for path in str(paths).split(",") if isinstance(paths, (str, Path)) else paths:
        path = Path(str(path).strip())
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise runtime.UserError(f"meta file {path}: {e}; give a JSON object of data sets, each with root "
                                    f"and annotation") from None

        def there(p):
            return Path(p) if Path(p).exists() or Path(p).is_absolute() else path.parent / p
        if isinstance(meta, list) and all(isinstance(p, str) for p in meta):
            entries += read_meta([there(p) for p in meta])
            continue
        for name, value in meta.items() if isinstance(meta, dict) else [("", None)]:
            if not isinstance(value, dict) or not value.keys() >= {"root", "annotation"}:
                raise runtime.UserError(f"meta file {path}: {name!r} is no object with root and annotation")
            root, annotation = there(value["root"]), there(value["annotation"])
            if not annotation.is_file():
                raise runtime.UserError(f"meta file {path}: {name} has no annotation file {annotation}")
            repeat = _repeat(value.get("repeat_time", 1), path)
            platform = _platform(value.get("conv_style", ""), annotation.name, root, name)
            entries.append(Entry(name, root, annotation, repeat, platform))
    return entries


def _repeat(value, path) -> float:
    """A number, or ScaleCUA's spellings `random:20%` and `repeat:2`."""
    number = re.fullmatch(r"(?:random:|repeat:)?\s*(\d*\.?\d+)\s*(%?)", str(value).strip())
    if not number:
        raise runtime.UserError(f"meta file {path}: repeat_time {value!r} is no number")
    return float(number[1]) / (100 if number[2] else 1)


def _platform(*texts: str) -> str:
    """Table 3's platform, from the first text that names one. PAPER-GAP: `mobile` counts as Android."""
    words = (PLATFORMS.get(w) for text in texts for w in re.findall(r"[a-z]+[0-9]?[a-z]+", str(text).lower()))
    return next(filter(None, words), "Other")


# ---------------------------------------------------------------------------------------------------- records
def read_records(meta_paths, quarantine: Quarantine | None = None, repeat: bool = True) -> Iterator[Record]:
    """Every usable record of the meta files, in file order. `repeat`: as often as its data set's repeat_time
    says (a share is drawn with a fixed seed); otherwise once, where that is not 0."""
    for _, _, record in located_records(meta_paths, quarantine, repeat):
        yield record


def located_records(meta_paths, quarantine: Quarantine | None = None,
                    repeat: bool = True) -> Iterator[tuple[int, int, Record]]:
    """The same with their place: (position in `read_meta`, offset of the line, record)."""
    quarantine = quarantine or Quarantine()
    for file, entry in enumerate(read_meta(meta_paths)):
        dice = random.Random(f"42 {entry.name}")
        for where, offset, line in _lines(entry) if entry.repeat else ():
            copies = int(entry.repeat) + (dice.random() < entry.repeat % 1) if repeat else 1
            if not copies:
                continue
            try:
                record = parse_record(line, entry, where, quarantine)
            except ValueError as e:
                quarantine.leave_out(where, str(e))
                continue
            for _ in range(copies):
                yield file, offset, record


def _lines(entry: Entry) -> Iterator[tuple[str, int, bytes]]:
    offset = 0
    with open(entry.annotation, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                yield f"{entry.annotation}:{number}", offset, line
            offset += len(line)


def parse_record(line: str | bytes, entry: Entry, where: str = "",
                 quarantine: Quarantine | None = None) -> Record:
    """One line of an annotation file -> Record. Raises ValueError with the reason when it cannot be used."""
    quarantine = quarantine or Quarantine()
    image, human, assistant, width, height = _fields(line)
    instruction, history = _question(human)
    box = _box(assistant)
    act = actions.parse(assistant) if not box else actions.Action((), "", "", "")
    if act.error:
        raise ValueError(f"the action cannot be read ({act.error})")
    if not instruction:
        raise ValueError("no task text")
    if len(act.calls) > 1:
        quarantine.note("several actions in one step")
    calls = tuple(fractions(c, width, height, quarantine) for c in act.calls)
    kind = {4: "box", 2: "point"}.get(len(box)) or (
        "step" if history is not None else "step_no_history" if "Task:" in human else "grounding")
    path = entry.root / image
    return Record(trajectory_id(instruction, path), instruction, path, history or [], act.operation, calls,
                  act.think, width, height, kind, entry.platform, where, box)


def _fields(line: str | bytes) -> tuple[str, str, str, int, int]:
    """(image, human text, assistant text, width, height) of a line."""
    try:
        o = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not a JSON line ({e})") from None
    image = o.get("image") if isinstance(o, dict) else None
    if isinstance(image, list):
        if len(image) != 1:
            raise ValueError(f"{len(image)} images in one record")
        image = image[0]
    if not isinstance(image, str) or not image:
        raise ValueError("no image")
    turns = o.get("conversations")
    turns = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
    turns = [t for t in turns if t.get("from") != "system"]
    texts = [t.get("value") for t in turns]
    if [t.get("from") for t in turns] != ["human", "gpt"] or not all(isinstance(t, str) for t in texts):
        raise ValueError("the conversation is not one question and one answer")
    try:
        width, height = int(float(o["width"])), int(float(o["height"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError("no width and height") from None
    "".join([image, *texts]).encode()  # half a surrogate pair is a ValueError too
    if min(width, height) < MIN_SIDE:
        raise ValueError(f"an image of {width}x{height}; {MIN_SIDE} pixels a side are needed")
    return image, *texts, width, height


def _question(human: str) -> tuple[str, list[str] | None]:
    """The user's text -> (task, one string per earlier step); None where the text has no place for a
    history."""
    text = human.replace("<image>", "").strip()
    task, marker, rest = text.partition("Previous operations:")
    task = task.partition("Task:")[2] if "Task:" in task else task if not marker else ""
    if not marker:
        return task.strip(), None
    steps = re.split(r"^[ \t]*Step \d+:", rest, flags=re.M)[1:]
    return task.strip(), [re.sub(r'^"(.*)"$', r"\1", s.strip(), flags=re.S) for s in steps]


def _box(assistant: str) -> tuple[float, ...]:
    """<box>[[x1, y1, x2, y2]]</box> or <point>[[x, y]]</point> in thousandths -> fractions; () where there is
    none."""
    found = re.search(r"<(box|point)>\s*\[\[([\d.,\s]+)\]\]\s*</\1>", assistant)
    if not found:
        return ()
    numbers = tuple(float(n) / 1000 for n in found[2].split(","))
    if len(numbers) != (4 if found[1] == "box" else 2) or max(numbers) > 1:
        raise ValueError(f"<{found[1]}> has {found[2]!r}")
    return numbers


def fractions(call: actions.Call, width: int, height: int, quarantine: Quarantine) -> actions.Call:
    """The call with its coordinates in 0-1, four decimals. They may be given in pixels (a number above 2, as
    moveTo's are in places) or lie slightly outside, which is clamped. Raises ValueError for a point outside
    the image."""
    given = actions.coordinates(call)
    values = [(v, axis) for p, numbers in given.items() for v, axis in zip(numbers, actions.AXES[p])]
    size = (width, height) if max(values, default=(0, 0))[0] > 2 else (1, 1)
    relative = [v / size[axis] for v, axis in values]
    if not values:
        return call
    if min(relative) < -0.05 or max(relative) > 1.05:
        raise ValueError(f"{actions.format_call(call)} points outside the {width}x{height} image")
    quarantine.note("coordinates in pixels", size != (1, 1))
    quarantine.note("coordinates clamped to the image", min(relative) < 0 or max(relative) > 1)
    return actions.rescale(call, size, (1, 1))


def load_image(path: Path) -> Image.Image:
    """A screenshot as RGB. Raises ValueError with the reason when it is missing, cut short or no image."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except IMAGE_ERRORS as e:
        raise ValueError(f"image {path}: {e}") from None


def read_image(path: Path) -> tuple[bytes, tuple[int, int]]:
    """(file, (width, height)) of a screenshot that is whole, else ValueError as above. A hundred times
    cheaper than decoding it: a PNG has checksums, a JPEG its end marker."""
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
            if image.format == "PNG":
                image.verify()
            elif image.format != "JPEG" or not data.endswith(b"\xff\xd9"):
                image.load()
            return data, size
    except IMAGE_ERRORS as e:
        raise ValueError(f"image {path}: {e}") from None


# ----------------------------------------------------------------------------------------------- trajectories
def trajectory_id(instruction: str, image: Path) -> str:
    """Name of a trajectory, from any one of its records: the image directory and a hash of the task text."""
    names = directory(image).parts[-2:]
    return "/".join(names) + "#" + blake2b(instruction.encode(), digest_size=4).hexdigest()


def directory(image: Path) -> Path:
    return image.parent.parent if image.parent.name == "images" else image.parent


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
        ids: dict[bytes, int] = {}
        index = array("q")
        for file, entry in enumerate(self.entries):
            offset = 0
            with open(entry.annotation, "rb") as f:
                for number, line in enumerate(f, 1):
                    here, offset = offset, offset + len(line)
                    try:
                        image, human, *_ = _fields(line) if line.strip() else ("", "")
                    except ValueError as e:
                        quarantine.leave_out(f"{entry.annotation}:{number}", str(e))
                        continue
                    task, history = _question(human)
                    if history is not None:
                        key = blake2b(trajectory_id(task, entry.root / image).encode(), digest_size=16)
                        group = ids.setdefault(key.digest(), len(ids))
                        index.extend((group, file, here, number))
                    elif image:
                        quarantine.note("records without a history")
        self._n = len(ids)
        table = np.array(index, dtype=np.int64).reshape(-1, 4)
        self._index = table[np.argsort(table[:, 0], kind="stable")]

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
    runs: list[dict[int, Record]] = []
    for r in sorted(records, key=lambda r: len(r.history)):
        k = len(r.history)
        # another directory may end in the same two names: the id is the same, the trajectory is not
        here = [run for run in runs if directory(run[0].image) == directory(r.image)]
        fitting = [run for run in here if [run[i].line for i in range(k) if i in run]
                   == [r.history[i] for i in range(k) if i in run]] or here
        if any(k in run and (run[k].image, run[k].calls) == (r.image, r.calls) for run in fitting):
            quarantine.note("the same step twice")
        elif k == 0:
            runs.append({0: r})
        elif free := [run for run in fitting if k not in run]:
            free[0][k] = r
        elif fitting:
            quarantine.note("another action at the same step")
        else:
            quarantine.leave_out(r.where, "its trajectory has no first step")
    out = []
    for n, run in enumerate(runs, 1):
        steps = [run[k] for k in sorted(run)]
        # `response` does not end a recording: 314 published trajectories go on after it.
        end = next((i for i, r in enumerate(steps) if any(c.name == "terminate" for c in r.calls)), None)
        if end is None and len(steps) == 1:
            quarantine.leave_out(steps[0].where, "a single step that does not end its task: no trajectory")
            continue
        quarantine.note("trajectories without an end", end is None)
        quarantine.note("steps after the end", 0 if end is None else len(steps) - 1 - end)
        steps = steps[:None if end is None else end + 1]
        quarantine.note("missing steps", len(steps[-1].history) + 1 - len(steps))
        quarantine.note("another run in the same directory", n > 1)
        name = steps[0].trajectory + (f"~{n}" if n > 1 else "")
        out.append(Trajectory(name, steps[0].instruction, steps[0].platform, steps))
    return out


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
