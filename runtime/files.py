"""Files that a kill cannot spoil: written whole and renamed, lines appended at once; numbered checkpoints."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import UserError
from runtime.process import World, gather_objects


def write_atomic(path, data: str | bytes) -> None:
    """Write a temporary file, sync, rename: readers see the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def need_directory(path, what: str) -> None:
    """UserError about `what` unless `path` is a directory or can become one."""
    there = next(p for p in (Path(path), *Path(path).parents) if os.path.lexists(p))
    if not there.is_dir():
        raise UserError(f"{what}: {there} is no directory; give one, or a place where it can be made")


def new_file(path, option: str = "--out") -> Path:
    """A file that will be written, in a directory that is there now. UserError where it is a directory."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give the name of a file")
    need_directory(path.parent, f"{option} {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read_json(path, wanted: str) -> dict:
    """The JSON object in a file; UserError, with what is wanted there, for anything else."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: {e}; give {wanted}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: no JSON object; give {wanted}")
    return found


def append_jsonl(path, objects: list[dict]) -> None:
    """Append whole lines in one write, so that no kill or second rank leaves a half line in the middle. A
    full disk that takes only a part raises at the next write; `read_jsonl` leaves that half line out."""
    data = "".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects).encode(errors="replace")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while data:
            data = data[os.write(fd, data):]
    finally:
        os.close(fd)


def each_jsonl(path, repair: bool = False, keys: tuple = ()) -> Iterator[dict]:
    """The objects of a JSONL file (none where there is no file), one at a time. A last line cut by a kill is
    left out, and with `repair` cut off; any other broken line, and one without `keys`, raises UserError with
    its number."""
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb+" if repair else "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith(b"\n") and line.startswith((b"{", b"\0")):     # ours; nobody else's is cut
                if repair:
                    f.truncate(f.tell() - len(line))
                return
            try:
                found = json.loads(line)
            except ValueError as e:
                raise UserError(f"{path}:{number}: not a JSON line ({e}); remove or repair it") from None
            if not isinstance(found, dict) or not found.keys() >= set(keys):
                raise UserError(f"{path}:{number}: no JSON object with {', '.join(keys) or 'names'}; this is "
                                f"not the file that is wanted here, or the line must be removed")
            yield found


def read_jsonl(path, keys: tuple = ()) -> list[dict]:
    """All of `each_jsonl`."""
    return list(each_jsonl(path, keys=keys))


def rewrite_jsonl(path, keep) -> list[dict]:
    """Keep lines where `keep(object)` holds, drop the rest and a half-written tail; returns what was kept."""
    if not Path(path).exists():
        return []
    kept = [o for o in read_jsonl(path) if keep(o)]
    write_atomic(path, "".join(json.dumps(o, ensure_ascii=False) + "\n" for o in kept))
    return kept


@contextlib.contextmanager
def atomic_directory(path: Path, world: World = World()):
    """Yield a temporary directory, the same on all ranks, that becomes `path` when the block ends well."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    if world.main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    gather_objects(None, world)
    yield temporary
    gather_objects(None, world)
    if world.main:
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    gather_objects(None, world)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint: a numbered directory (an unfinished one has another name)."""
    found = sorted((p for p in Path(directory).glob("*") if p.name.isdigit()), key=lambda p: int(p.name))
    return found[-1] if found else None


def drop_old_checkpoints(directory: Path, keep: int) -> None:
    """Delete all numbered directories but the newest `keep`."""
    found = sorted((p for p in Path(directory).glob("*") if p.name.isdigit()), key=lambda p: int(p.name))
    for p in found[:-keep]:
        shutil.rmtree(p)
