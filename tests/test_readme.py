"""The README against the code: commands, flags, files, metric keys and settings that it names are there."""

import dataclasses
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
STAGES = ("annotate", "sft", "grpo_hier", "evaluate", "analysis")


def commands() -> list[list[str]]:
    """Every command of a bash block, joined over continued lines and without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def inline_commands() -> list[list[str]]:
    """Commands in running text: `python FILE.py ...`."""
    return [shlex.split(c) for c in re.findall(r"`((?:python|torchrun) [^`]+)`", README.replace("\n", " "))]


def config_of(program: str, word: str):
    """The dataclass behind a program's command line, of its subcommand where `word` is one."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    from runtime import config_class
    command = getattr(module, word, None) if re.fullmatch(r"[a-z]\w+", word) else None
    return config_class(command or module.main)


def flags(words: list[str]) -> list[str]:
    return [w[2:].partition("=")[0] for w in words if w.startswith("--") and len(w) > 2]


@pytest.mark.parametrize("words", commands() + inline_commands(), ids=" ".join)
def test_every_command_exists_and_takes_its_flags(words):
    if words[0].startswith("./"):
        assert (ROOT / words[0]).is_file() and all(w in (ROOT / words[0]).read_text() for w in words[1:])
        return
    if words[0] not in ("python", "torchrun"):
        assert words[0] in ("pip", "git", "cd", "export", "pytest", "source"), f"{words[0]} is not explained"
        return
    at = next(i for i, w in enumerate(words) if w.endswith(".py"))
    assert (ROOT / words[at]).is_file(), words[at]
    if words[at].startswith("tests/"):
        assert all(f"--{f}" in (ROOT / words[at]).read_text() for f in flags(words))
        return
    fields = {f.name for f in dataclasses.fields(config_of(words[at], (words + ["-"])[at + 1]))}
    assert set(flags(words[at + 1:])) <= fields | {"preset"}


def test_every_flag_that_is_named_exists():
    """Any `--flag` in the text is a setting of some stage, room or script."""
    named = set(re.findall(r"`--(\w+)", README))
    sources = [f.read_text() for p in ("*.py", "*.sh", "bench/*.py", "tests/*.py") for f in ROOT.glob(p)]
    known = {m for s in sources for m in re.findall(r"(?m)^    (\w+): (?:str|int|float|bool)\b", s)}
    known |= {m for s in sources for m in re.findall(r"--(\w+)", s)}
    assert named and named <= known | {"preset"}, sorted(named - known)


def test_every_file_is_in_the_tree_and_every_file_of_the_tree_is_there():
    tree = README[README.index("## Files"):].split("```")[1]
    named = set(re.findall(r"\b[\w/]+\.(?:py|html|sh|toml)\b", tree))
    missing = {n for n in named if not (ROOT / n).exists()}
    rooms = {f.name for f in ROOT.glob("*.py")}
    assert not missing and rooms <= named, (missing, rooms - named)
    assert all(f"{d}/" in tree for d in ("demo", "bench", "tests"))


def test_other_files_that_are_named_exist():
    for name in re.findall(r"`((?:demo|bench|tests|\.ci)/[\w.]+)`", README):
        assert (ROOT / name).exists(), name


def glossary() -> tuple[set, set]:
    """The keys of the metric glossary: those of every run, and those of a run with servers."""
    table = README[README.index("## Metric glossary"):].split("\n\n")[1]
    always, servers = set(), set()
    for line in table.splitlines()[2:]:
        keys, meaning = line.strip("|").split("|")
        found = set(re.findall(r"`([A-Za-z]\w+)`", keys))
        if "(`_D`)" in keys:
            found |= {k[:-1] + "D" for k in found}
        (servers if "--engine vllm" in meaning else always).update(found)
    return always, servers


def test_the_glossary_names_each_key_once():
    """Those of every run are compared with a run's log in test_stages.py, servers' in test_engine.py."""
    always, servers = glossary()
    assert len(always) > 25 and not always & servers and servers


def test_settings_that_the_readme_gives_as_the_papers_are_the_defaults():
    import evaluate
    import grpo_hier
    import sft
    g, s, e = grpo_hier.Config(), sft.Config(role="actor"), evaluate.Config()
    assert (g.K, g.M, g.max_steps, g.eps, g.beta, g.lr, g.lora_r, g.lora_alpha, g.passes, g.epochs) == \
           (3, 7, 15, 0.2, 0.0, 1e-5, 32, 64, 2, 1)
    assert (g.temperature_D, g.temperature_A, e.temperature_D, e.temperature_A, e.runs) == (.8, .8, 0, 0, 4)
    assert (s.lr, s.warmup_ratio, s.max_norm, s.max_length, s.epochs) == (1e-5, 0.03, 1.0, 30720, 1)
    assert (g.norm, g.std, g.std_eps, g.adam_eps) == ("drgrpo", False, 1e-4, 1e-12)
    assert (g.max_tokens_D, g.max_tokens_A, g.split, e.split) == (512, 512, "train647", "lite_v2")
