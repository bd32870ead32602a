"""What a stage needs around its mathematics: command line, process group, run directory, logs, atomic files.

A stage ends with `launch(main)`: the dataclass that annotates `main`'s argument becomes the command line.
A preset is a TOML file of values by stage, `--preset demo` reads `demo/demo.toml`; flags win over it.
"""

import argparse
import ast
import contextlib
import dataclasses
import datetime
import difflib
import errno
import fcntl
import inspect
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


NO_SUCH_KIND = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)  # of a path


class UserError(Exception):
    """Something the user can mend: printed as one line that names the thing and the remedy; exit code 2."""


# ----------------------------------------------------------------------------------------------- command line
def launch(main, *commands, dry_run=None, words: dict | None = None, config=None) -> NoReturn:
    """Run a stage: `main`, or one of `commands` when the first word names it, or, with the flag `--dry_run`,
    the function that only says what `main` would do. `words`: by a command's name, the settings that words
    without an option fill. `config(argv)`: the dataclass of `main`'s settings, where the command line decides
    about it. Never returns."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is a "?" and ends no run
            stream.reconfigure(errors="replace")
    by_name = {f.__name__: f for f in commands}
    argv = sys.argv[1:]
    function = by_name[argv.pop(0)] if argv and argv[0] in by_name else main
    program = Path(sys.argv[0]).name + ("" if function is main else f" {function.__name__}")
    note = f"subcommands: {', '.join(sorted(by_name))}" if by_name and function is main else ""
    only_say = Parser(add_help=False, allow_abbrev=False)
    if dry_run and function is main:
        only_say.add_argument("--dry_run", type=_boolean, nargs="?", const=True, metavar="BOOL", help=(
            "say what would be done and what it takes; no file stays, no model is asked (default False)"))
    try:
        if by_name and function is main and argv and not argv[0].startswith("-"):
            known = did_you_mean(argv[0], list(by_name)) or f"there are {', '.join(sorted(by_name))}"
            raise UserError(f"{argv[0]} is no subcommand: {known}")
        Config = config(argv) if config and function is main else config_class(function)
        cfg = parse_args(Config, argv, program, Path(inspect.getfile(Config)).stem, note, only_say,
                         words=(words or {}).get(getattr(function, "__name__", "main"), ()))
        (dry_run if getattr(only_say.parse_known_args(argv)[0], "dry_run", False) else function)(cfg)
    except Exception as e:
        if not (said := remedy(e)):
            raise                                 # a bug: the traceback is what helps
        print(f"{program}: {' '.join(said.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from where it stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def remedy(error: Exception) -> str:
    """What to tell a user about an error, in one line with the way out; "" for one that is a bug."""
    if isinstance(error, UserError):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return (f"the GPU's memory is full ({str(error).splitlines()[0][:120]}): lower --max_batch (answers "
                f"at once), --micro_batch (stage 3) or --row_tokens (stage 2, or use more GPUs); the same "
                f"command goes on where it stopped")
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or re.search("No space left|file write failed|unexpected pos", str(error)):  # torch's, too
        where = getattr(error, "filename", None) or "the run directory"
        return (f"no space left on the disk for {where}: make room (old runs/), then the same command goes "
                f"on where it stopped")
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: run ./setup.sh, then `source .venv/bin/activate`"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {error.filename or 'a file'}: give a place of your own (--run_dir, --out)"
    if isinstance(error, OSError) and error.errno in NO_SUCH_KIND and error.filename:
        return f"{error.filename2 or error.filename}: {error.strerror}; give another path"
    return ""


def config_class(function):
    """The dataclass that annotates the first argument of `function`."""
    return next(iter(inspect.signature(function).parameters.values())).annotation


class Parser(argparse.ArgumentParser):
    """A wrong command line is one line about what is wrong, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows all options)")


def parse_args(Config, argv=None, program=None, stage=None, note="", *parents, words: tuple = ()):
    """Command line -> Config. Types come from the defaults, help from the trailing comments; flags of the
    parsers `parents` are known and shown, and left to the caller. Words without an option fill the fields
    `words`.

    Unknown flags are errors. Precedence: field default < presets in the order given < flags. A string value
    may name other fields (`runs/sft_{role}`). Raises UserError for a wrong command line, and for a preset
    that does not exist, is no TOML or names an unknown field.
    """
    parser = Parser(
        program, description=(sys.modules[Config.__module__].__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, parents=parents,
        epilog=note)
    parser.add_argument("--preset", action="append", default=[], metavar="NAME|FILE",
                        help="values from demo/NAME.toml or a TOML file; may be repeated, later ones win")
    comments = field_comments(Config)
    for f in dataclasses.fields(Config):
        required = f.default is dataclasses.MISSING
        shown = "required" if required else f"default {f.default!r}"
        alone = {"nargs": "?", "const": True} if f.type is bool else {}     # --flag is --flag true
        parser.add_argument(f"--{f.name}", type=_boolean if f.type is bool else f.type,
                            metavar=f.type.__name__.upper(), **alone,
                            help=f"{comments.get(f.name, '')} ({shown})".strip().replace("%", "%%"))
    args, rest = parser.parse_known_args(argv)
    args = vars(args)
    args |= left_over(rest, words, args)
    values, known = {}, {f.name for f in dataclasses.fields(Config)}
    for preset in args.pop("preset"):
        values |= read_preset(preset, stage or Path(inspect.getfile(Config)).stem, args)
    values |= {k: v for k, v in args.items() if k in known and v is not None}
    if unknown := sorted(set(values) - known):
        raise UserError(f"the preset sets {', '.join(unknown)}, which {Config.__name__} does not have")
    missing = [f.name for f in dataclasses.fields(Config)
               if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        parser.error("required: " + ", ".join(f"--{name}" for name in missing))
    cfg = Config(**values)
    return dataclasses.replace(cfg, **{k: v.format_map(vars(cfg)) for k, v in vars(cfg).items()
                                       if isinstance(v, str) and "{" in v})


def left_over(rest: list[str], words: tuple, args: dict) -> dict[str, str]:
    """What argparse made nothing of -> values of the fields `words`: each takes one word, an only one takes
    all, by commas. UserError for an unknown option, and for words that have no place."""
    if flags := [r.partition("=")[0] for r in rest if r.startswith("-")]:
        options = [f"--{name}" for name in args]
        raise UserError("; ".join(f"{flag} is no option: {did_you_mean(flag, options) or '--help shows all'}"
                                  for flag in flags))
    values = rest if len(words) != 1 or not rest else [",".join(rest)]
    if values and len(values) != len(words):
        raise UserError(f"{' '.join(rest)}: {len(words) or 'no'} words without an option are taken here "
                        f"(--help shows all options)")
    if given := [name for name, _ in zip(words, values) if args[name] is not None]:
        raise UserError(f"{' '.join(rest)}: --{given[0]} is given already; give one of them")
    return dict(zip(words, values))


def did_you_mean(word: str, names: list[str]) -> str:
    """`did you mean NAME?` with the nearest of `names`, whatever the case and the kind of dash; "" for none.
    """
    plain = {name.lower().lstrip("-"): name for name in names}
    near = difflib.get_close_matches(word.lower().lstrip("-").replace("-", "_"), plain, 1)
    return f"did you mean {plain[near[0]]}?" if near else ""


def read_preset(name: str, stage: str, flags: dict) -> dict:
    """The table `[stage]` of a preset file, with `[stage.FIELD.VALUE]` where the flag FIELD is VALUE."""
    path = Path(name) if name.endswith(".toml") else ROOT / "demo" / f"{name}.toml"
    if not path.is_file():
        raise UserError(f"preset {name}: no file {path}; name a TOML file or one of "
                        f"{', '.join(sorted(p.stem for p in (ROOT / 'demo').glob('*.toml')))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(stage, {})
    except (OSError, ValueError) as e:
        raise UserError(f"preset {path}: no TOML: {e}; mend that line") from None
    special = {k: table.pop(k) for k in [k for k, v in table.items() if isinstance(v, dict)]}
    for field, by_value in special.items():
        table |= by_value.get(flags.get(field), {})
    return table


def field_comments(Config) -> dict[str, str]:
    """Trailing comment of every field, also of inherited ones, read from the source: what `--help` shows is
    what the code says."""
    comments = {}
    for cls in reversed(Config.__mro__[:-1]):     # without `object`; the nearest class has the last word
        lines = inspect.getsource(cls).splitlines()
        body = ast.parse(inspect.cleandoc("\n".join(lines))).body[0].body
        comments |= {node.target.id: lines[node.end_lineno - 1].partition("#")[2].strip()
                     for node in body if isinstance(node, ast.AnnAssign)}
    return comments


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


# ---------------------------------------------------------------------------------------------- process group
@dataclass(frozen=True)
class World:
    """This process among all of them; `device` is a torch device string."""
    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def process_group():
    """torchrun's environment -> World, with an initialised process group; without torchrun a world of one."""
    import torch
    import torch.distributed as dist
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda:
        if local >= (n := torch.cuda.device_count()):
            raise UserError(f"process {local} has no GPU: torch sees {n} here; give --nproc_per_node={n}")
        torch.cuda.set_device(local)
    device = f"cuda:{local}" if cuda else "cpu"
    if "RANK" not in os.environ:
        yield World(device=device)
        return
    # after a restart by torchrun, its store still has the addresses of the processes before: one prefix each
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    # ranks wait for the slowest one's browsers in a gloo collective: minutes, on a bad day hours
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
                            timeout=datetime.timedelta(days=1))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def all_reduce_flat_(tensors: list) -> None:
    """Sum a list of same-dtype tensors over all ranks in place, in one collective:
    exact also where ranks have uneven work, which averaging per rank is not."""
    import torch
    import torch.distributed as dist
    if not dist.is_initialized() or dist.get_world_size() == 1 or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


def gather_objects(obj, world: World) -> list:
    """Every rank's `obj`, in rank order, on every rank."""
    import torch.distributed as dist
    if world.size == 1:
        return [obj]
    out = [None] * world.size
    dist.all_gather_object(out, obj)
    return out


# ---------------------------------------------------------------------------------------------- run directory
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


def need_directory(path, what: str) -> None:
    """UserError about `what` unless `path` is a directory or can become one."""
    there = next(p for p in (Path(path), *Path(path).parents) if os.path.lexists(p))
    if not there.is_dir():
        raise UserError(f"{what}: {there} is no directory; give one, or a place where it can be made")


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


# ------------------------------------------------------------------------------------------------------ files
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


def code_version() -> str:
    """The commit of this source, with "-dirty" where files differ from it; "" outside of a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def describe(error: BaseException) -> str:
    """A traceback as text, for artefacts."""
    return "".join(traceback.format_exception(error)).strip()
