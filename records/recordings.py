"""GUI recordings in ScaleCUA's files -> records, one step each, for stages 1 and 2.

A meta file names annotation files (JSONL, one line = one step) with their image roots; it may also be a list
of meta files. `read_records` streams the records. What cannot be used goes to a quarantine file, one line
{"where", "reason"}; every irregularity that is handled is counted in `Quarantine.counts`.

A step's coordinates are kept as fractions of the image (0-1), whatever the file had; `Record.action(w, h)`
writes them in pixels. PAPER-GAP: a data set with `repeat_time` 0 is skipped; a fraction or multiple concerns
single records (stage 2), not trajectories.
"""

import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

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


class Quarantine:
    """What was left out, with the reason, in a file (none: only counted). One line per place, over all
    runs."""

    def __init__(self, path: str | Path = ""):
        self.path = path
        self.counts: Counter[str] = Counter()
        self.seen = {o["where"] for o in runtime.rewrite_jsonl(path, lambda o: True)} if path else set()

    def note(self, what: str, n: int = 1) -> None:
        """Count an irregularity that was dealt with."""
        self.counts[what] += n

    def leave_out(self, where: str, reason: str, **more) -> None:
        """Count what cannot be used, and write down where it was and why."""
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
        if isinstance(meta, list) and all(isinstance(p, str) for p in meta):
            entries += read_meta([_there(p, path) for p in meta])
        elif isinstance(meta, dict):
            entries += [_entry(name, value, path) for name, value in meta.items()]
        else:
            _entry("", None, path)                # which says what is wrong with it
    return entries


def _there(given, meta: Path) -> Path:
    """A path that stands in a meta file."""
    path = Path(given)
    return path if path.exists() or path.is_absolute() else meta.parent / path


def _entry(name: str, value, meta: Path) -> Entry:
    """One data set of a meta file."""
    if not isinstance(value, dict) or not value.keys() >= {"root", "annotation"}:
        raise runtime.UserError(f"meta file {meta}: {name!r} is no object with root and annotation")
    root = _there(value["root"], meta)
    annotation = _there(value["annotation"], meta)
    if not annotation.is_file():
        raise runtime.UserError(f"meta file {meta}: {name} has no annotation file {annotation}")
    repeat = _repeat(value.get("repeat_time", 1), meta)
    platform = _platform(value.get("conv_style", ""), annotation.name, str(root), name)
    return Entry(name, root, annotation, repeat, platform)


def _repeat(value, path) -> float:
    """A number, or ScaleCUA's spellings `random:20%` and `repeat:2`."""
    number = re.fullmatch(r"(?:random:|repeat:)?\s*(\d*\.?\d+)\s*(%?)", str(value).strip())
    if not number:
        raise runtime.UserError(f"meta file {path}: repeat_time {value!r} is no number")
    return float(number[1]) / (100 if number[2] else 1)


def _platform(*texts) -> str:
    """Table 3's platform, from the first text that names one. PAPER-GAP: `mobile` counts as Android."""
    for text in texts:
        for word in re.findall(r"[a-z]+[0-9]?[a-z]+", str(text).lower()):
            if word in PLATFORMS:
                return PLATFORMS[word]
    return "Other"


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
        if not entry.repeat:
            continue
        for where, offset, line in _lines(entry):
            copies = 1
            if repeat:
                copies = int(entry.repeat) + (dice.random() < entry.repeat % 1)
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
    """(FILE:NUMBER, offset, line) of the lines that hold something."""
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
    image, human, assistant, width, height = fields(line)
    instruction, history = question(human)
    box = _box(assistant)
    act = actions.Action((), "", "", "") if box else actions.parse(assistant)
    if act.error:
        raise ValueError(f"the action cannot be read ({act.error})")
    if not instruction:
        raise ValueError("no task text")
    if len(act.calls) > 1:
        quarantine.note("several actions in one step")
    calls = tuple(fractions(c, width, height, quarantine) for c in act.calls)
    path = entry.root / image
    kind = _kind(human, history, box)
    return Record(trajectory_id(instruction, path), instruction, path, history or [], act.operation, calls,
                  act.think, width, height, kind, entry.platform, where, box)


def _kind(human: str, history: list[str] | None, box: tuple[float, ...]) -> str:
    """See Record."""
    if box:
        return "box" if len(box) == 4 else "point"
    if history is not None:
        return "step"
    return "step_no_history" if "Task:" in human else "grounding"


def fields(line: str | bytes) -> tuple[str, str, str, int, int]:
    """(image, human text, assistant text, width, height) of a line. Raises ValueError as parse_record does.
    """
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
    if not isinstance(turns, list):
        turns = []
    turns = [t for t in turns if isinstance(t, dict) and t.get("from") != "system"]
    texts = [t.get("value") for t in turns]
    if [t.get("from") for t in turns] != ["human", "gpt"] or not all(isinstance(t, str) for t in texts):
        raise ValueError("the conversation is not one question and one answer")
    try:
        width = int(float(o["width"]))
        height = int(float(o["height"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError("no width and height") from None
    "".join([image, *texts]).encode()  # half a surrogate pair is a ValueError too
    if min(width, height) < MIN_SIDE:
        raise ValueError(f"an image of {width}x{height}; {MIN_SIDE} pixels a side are needed")
    return image, *texts, width, height


def question(human: str) -> tuple[str, list[str] | None]:
    """The user's text -> (task, one string per earlier step); None where the text has no place for a
    history."""
    text = human.replace("<image>", "").strip()
    task, marker, rest = text.partition("Previous operations:")
    if "Task:" in task:
        task = task.partition("Task:")[2]
    elif marker:
        task = ""
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


# --------------------------------------------------------------------------------- a record's trajectory
def trajectory_id(instruction: str, image: Path) -> str:
    """Name of a trajectory, from any one of its records: the image directory and a hash of the task text."""
    names = directory(image).parts[-2:]
    return "/".join(names) + "#" + blake2b(instruction.encode(), digest_size=4).hexdigest()


def directory(image: Path) -> Path:
    """Where the screenshots of a recording lie, or the directory around its `images`."""
    return image.parent.parent if image.parent.name == "images" else image.parent
