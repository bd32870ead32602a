"""Break the mathematics on purpose, one fault at a time, and see which test notices.

    python tests/mutants.py                # all faults, two at a time: about ten minutes on 2 cores
    python tests/mutants.py --only clip    # those with "clip" in their name

Each fault is one piece of source, replaced in a copy of the project. The copy's tests of the equations run,
then those of the update, of the policy, of the adapters and of the critic, until one fails; a line per fault
says which. A fault that no test notices is a gap in the tests. The last line is JSON: {"mutants": how many,
"caught": how many were noticed}.

faults.txt holds the faults, an empty line between two of them. Each is the file with the fault's name, then
the lines of source that it replaces, after "- ", which occur there once (test_house.py looks), then what
stands in their place, after "+ ".
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime

TESTS = ("test_equations", "test_losses", "test_grpo_hier", "model/test_update", "model/test_policy",
         "model/test_backbone", "model/test_critic")
FIRST = {"policy": "model/test_policy", "inputs": "model/test_policy", "backbone": "model/test_policy",
         "critic": "model/test_critic", "update": "model/test_update"}       # whose tests notice soonest


@dataclass
class Config:
    only: str = ""                       # run the faults whose name contains this
    jobs: int = 2                        # copies under test at the same time


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


def read_faults(text: str) -> list[Mutant]:
    out = []
    for block in text.strip().split("\n\n"):
        title, *lines = block.splitlines()
        file, _, name = title.partition(": ")
        old = "\n".join(line[2:] for line in lines if line[0] == "-")
        new = "\n".join(line[2:] for line in lines if line[0] == "+")
        out.append(Mutant(name, file, old, new))
    return out


MUTANTS = read_faults((ROOT / "tests/faults.txt").read_text(encoding="utf-8"))


def copy(directory: Path) -> None:
    """The sources and the tests that are run; no data, no environment."""
    for pattern in ("*.py", "pyproject.toml", "demo/*", "bench/*.py", "tests/**/*.py", "*/**/*.py"):
        for file in ROOT.glob(pattern):
            if file.is_file() and not file.relative_to(ROOT).parts[0].startswith(".venv"):
                target = directory / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


def first_failure(directory: Path, about: str = "") -> str:
    """The first test that fails in a copy, "" when all pass; those of the room `about` run first."""
    for name in sorted(TESTS, key=lambda name: name != FIRST.get(about)):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}.py"]
        process = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if process.returncode:
            found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", process.stdout, re.MULTILINE)
            return found[1] if found else f"{name} ended with {process.returncode}: {process.stdout[-200:]}"
    return ""


def check(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        file = Path(name) / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise runtime.UserError(f"{mutant.name}: not one {mutant.old!r} in {mutant.file}; mend the list")
        file.write_text(text.replace(mutant.old, mutant.new))
        return first_failure(Path(name), file.stem)


def main(cfg: Config) -> None:
    mutants = [m for m in MUTANTS if cfg.only in m.name]
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        if failed := first_failure(Path(name)):
            raise runtime.UserError(f"{failed} fails without any fault; mend that first")
    caught = 0
    with ThreadPoolExecutor(cfg.jobs) as pool:
        for mutant, test in zip(mutants, pool.map(check, mutants)):
            caught += bool(test)
            print(f"{mutant.name:55} {test or 'NOT NOTICED'}", flush=True)
    print(json.dumps({"mutants": len(mutants), "caught": caught}))


if __name__ == "__main__":
    runtime.launch(main)
