"""A dataclass of settings becomes a command line: `launch(main)` ends every program.

Types come from the defaults, help from the trailing comments. A preset is a TOML file of values by stage,
`--preset demo` reads `demo/demo.toml`; flags win over it.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import ROOT, UserError, remedy


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
        told: dict[str, Any] = {"type": f.type, "metavar": getattr(f.type, "__name__", "").upper()}
        if f.type is bool:                        # --flag is --flag true
            told |= {"type": _boolean, "nargs": "?", "const": True}
        told["help"] = f"{comments.get(f.name, '')} ({shown})".strip().replace("%", "%%")
        parser.add_argument(f"--{f.name}", **told)
    known_args, rest = parser.parse_known_args(argv)
    args = vars(known_args)
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
        parsed: Any = ast.parse(inspect.cleandoc("\n".join(lines))).body[0]
        fields: list[Any] = [node for node in parsed.body if isinstance(node, ast.AnnAssign)]
        comments |= {node.target.id: lines[node.end_lineno - 1].partition("#")[2].strip() for node in fields}
    return comments


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
