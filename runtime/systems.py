"""Systems, found by name: grpo_hier.py, or systems/NAME.py."""

import importlib

from runtime.errors import ROOT, UserError

# what each one defines
SYSTEM = ("Config", "roles", "Agent", "rewards", "credit", "loss", "draw", "trains")


def load_system(name: str):
    """The module of a system: grpo_hier, or systems/NAME.py. UserError for one that is not there, or that
    lacks a name which the loop needs."""
    there = sorted(p.stem for p in (ROOT / "systems").glob("*.py") if p.stem != "__init__")
    if name not in ("grpo_hier", *there):
        raise UserError(f"--system {name}: there is no systems/{name}.py; there are "
                        f"{', '.join(['grpo_hier', *there])}")
    system = importlib.import_module(name if name == "grpo_hier" else f"systems.{name}")
    need_names(system)
    return system


def need_names(system) -> None:
    """UserError for a system that lacks a name which the loop needs."""
    if lacking := [name for name in SYSTEM if not hasattr(system, name)]:
        raise UserError(f"the system {system.__file__} lacks {', '.join(lacking)}: define it there, or "
                        f"import it from grpo_hier")
