"""A run directory belongs to one process and one set of settings; what settings are checked for."""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import ROOT, UserError, remedy
from runtime.files import need_directory, read_json, write_atomic
from runtime.process import World, gather_objects

DTYPES = ("bfloat16", "float32", "float16")


def check(cfg, *counts: str, **choices: tuple) -> None:
    """Raises UserError for a field of `counts` that is below 1, and one of `choices` with another value."""
    for name in counts:
        if getattr(cfg, name) < 1:
            raise UserError(f"--{name} {getattr(cfg, name)}: give 1 or more")
    for name, allowed in choices.items():
        if getattr(cfg, name) not in allowed:
            raise UserError(f"--{name} {getattr(cfg, name)}: choose one of {', '.join(map(str, allowed))}")


def need_directories(cfg, *names: str) -> None:
    """UserError for a field of `names` that names something else than a directory or a place for one."""
    for name in names:
        need_directory(getattr(cfg, name), f"--{name} {getattr(cfg, name)}")


@contextlib.contextmanager
def open_run(directory: str, cfg, world: World = World(), free: tuple = ()) -> Iterator[Path]:
    """Create or re-enter a run directory, and hold it: no other process may. Its config.json must agree with
    `cfg` except in the `free` fields.

    Rank 0 looks and writes, and all ranks raise the UserError where another run holds the directory, or has
    other settings: a run is one experiment, and resuming it with other settings is not.
    """
    path, refused = Path(directory), ""
    with contextlib.ExitStack() as held:
        try:
            if world.main:
                need_directory(path, f"--run_dir {path}")
                path.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_process(path))
                settle_config(path / "config.json", cfg, free)
        except (UserError, OSError) as e:         # the other ranks must hear of it
            if not (refused := remedy(e)):
                raise
        if refused := gather_objects(refused, world)[0]:
            raise UserError(refused)
        yield path


def settle_config(file: Path, cfg, free: tuple) -> None:
    """Write the settings, or compare them with those that are there."""
    mine = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in free}
    if not file.exists():
        write_atomic(file, json.dumps(dataclasses.asdict(cfg), indent=1) + "\n")
        return
    theirs = {k: v for k, v in read_settings(file.parent).items() if k not in free}
    differ = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
    if differ:
        raise UserError(f"{file.parent} is a run with other settings ({', '.join(differ)}); choose another "
                        f"directory, or remove it to start again")


def read_settings(run: Path) -> dict:
    """A run's config.json. UserError where there is none, or no JSON object in it."""
    file = Path(run) / "config.json"
    if not file.is_file():
        raise UserError(f"{run} is no run directory: no config.json there; give a run's --run_dir")
    return read_json(file, "a run's --run_dir, with the config.json that it wrote")


@contextlib.contextmanager
def only_process(path: Path):
    """Hold a lock on a directory (a file in it) or a file (a file beside it), so that two processes never
    write there; the kernel frees it when this process ends, however that is. UserError with who holds it."""
    path = Path(path)
    with open(path / ".lock" if path.is_dir() else f"{path}.lock", "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(f"{path} is held by another run, {lock.read().strip()}; wait for its end or end "
                            f"it, or give another place") from None
        os.register_at_fork(after_in_child=lock.close)    # else a worker that outlives us would hold it
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield


def code_version() -> str:
    """The commit of this source, with "-dirty" where files differ from it; "" outside of a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
