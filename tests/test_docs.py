"""README.md and docs/ against the code: commands with their flags and values, paths, links with their
anchors, names of functions and settings, metric keys and equations that they name are there."""

import ast
import json
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from test_house import CODE, SHIPPED, equation_map, module_of, tree

from runtime import command
from runtime.command import parse_args

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
README = DOCUMENTS["README.md"]
OTHERS_PROGRAMS = {"pip", "git", "cd", "export", "source", "hf", "docker", "playwright", "cat"}
OTHERS_FLAGS = {"no-deps", "target", "local-dir", "shm-size", "unsafe",
                "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "max_restarts"}
OTHERS_PATHS = ("VAB-WebArena-Lite/", "evaluation/WebArenaLiteV2/", "WebAgent-R1/", "config_files/")
NAME_OF_FILE = r"[\w.-]+\.(?:py|sh|md|toml|html|txt|jsonl?|png|npy)"
OURS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|pytest|\./\w+\.sh)(?: .*)?")
by_document = pytest.mark.parametrize("name", DOCUMENTS)


# -------------------------------------------------------------------------------------------- parts of a text
def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENTS[name], re.S)


def prose(name):
    """A document without its comments and its blocks of code."""
    return re.sub(r"```.*?```|<!--.*?-->", "", DOCUMENTS[name], flags=re.S)


def codes(name):
    """Everything between backticks in running text."""
    return re.findall(r"`([^`]+)`", prose(name).replace("\n", " "))


def words(name):
    """The single words of that, without the punctuation around them."""
    return {word.strip(",.;:()[]{}\"") for code in codes(name) for word in code.split()}


def every_command():
    """(document, words) of each line of a bash block, joined over continued lines and without its comment,
    and of each command in running text."""
    for name in DOCUMENTS:
        lines = "\n".join(blocks(name, "bash")).replace("\\\n", " ").splitlines()
        lines += [code for code in codes(name) if OURS.fullmatch(code)]
        yield from ((name, shlex.split(line, comments=True)) for line in lines if line.strip())


def rows(marker, name="docs/metrics.md"):
    """The cells of a table between its two markers."""
    table = DOCUMENTS[name].split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()[2:]]


@cache
def source():
    files = [*SHIPPED, *ROOT.glob("*.sh"), *ROOT.glob("demo/*.toml"), *ROOT.glob("tests/**/*.py")]
    return "\n".join(f.read_text() for f in files if f != Path(__file__))


@cache
def settings():
    """Every field of every Config, and the flags that have none."""
    fields = {field.target.id for file in SHIPPED for cls in tree(file).body
              if isinstance(cls, ast.ClassDef) and cls.name.endswith("Config")
              for field in cls.body if isinstance(field, ast.AnnAssign)}
    scripts = {flag for script in ROOT.glob("*.sh") for flag in re.findall(r"--(\w+)\)", script.read_text())}
    return fields | scripts | {"preset", "dry_run", "help"}


# --------------------------------------------------------------------------------------------------- commands
class Taken(BaseException):
    """A program has read its command line and would begin."""


def takes(file, argv):
    """Run a program up to the point where it has read its command line; SystemExit where it refuses it.
    NAME, as a system, stands for any of them."""
    def read(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Taken
    argv = [str(file), *("grpo_hier" if word == "NAME" else word for word in argv)]
    with patch.object(sys, "argv", argv), patch.object(command, "parse_args", read), pytest.raises(Taken):
        runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize("name, line", every_command(),
                         ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_every_command_exists_and_takes_its_flags(name, line):
    while re.match(r"[A-Z_]+=", line[0]):
        assert line[0].partition("=")[0] in source()
        line = line[1:]
    first, given = line[0], [word for word in line[1:] if word != "…"]
    if first in OTHERS_PROGRAMS:
        return
    if first not in ("python", "torchrun"):
        text = (ROOT / first).read_text() if first.startswith("./") else ""
        assert text or first == "pytest", f"{first} is not explained"
        assert all((ROOT / w).is_file() if w.endswith(".py") else f"{w})" in text for w in given)
        return
    at = next(i for i, word in enumerate(given) if word.endswith(".py") or word == "-m")
    file = ROOT / given[at].replace("systems/NAME.py", "grpo_hier.py")
    if given[at] == "-m":
        at += 1
        file = ROOT / given[at].replace(".", "/") / "__main__.py"
    assert file.is_file(), file
    assert {w.partition("=")[0].removeprefix("--") for w in given[:at] if w.startswith("--")} <= OTHERS_FLAGS
    takes(file, given[at + 1:])


def test_a_wrong_command_would_be_noticed():
    for file, *argv in (["analysis.py", "nosuch", "--runs", "x"], ["analysis.py", "--runz", "x"],
                        ["analysis.py", "curve", "--window", "many"], ["evaluate.py", "--system", "nosuch"],
                        ["grpo_hier.py", "--norm", "other"], ["sites/webarena/__main__.py", "chek"]):
        with pytest.raises(SystemExit):
            takes(ROOT / file, argv)


@by_document
def test_every_flag_that_is_named_exists(name):
    code = "\n".join(codes(name))
    named = set(re.findall(r"(?<![\w-])--(\w[\w-]*)", code))
    assert named <= settings() | OTHERS_FLAGS, sorted(named - settings() - OTHERS_FLAGS)
    plain = re.sub(r"`[^`]+`", "", prose(name))
    assert not re.findall(r"(?<![\w-])--\w+", plain), "a flag stands between backticks"


def test_the_demos_last_line_has_the_keys_that_it_prints():
    (line,) = blocks("README.md", "json")
    text = (ROOT / "analysis.py").read_text()
    assert all(f'"{key}"' in text or f"{key}=" in text for key in json.loads(line))


@by_document
def test_json_is_json(name):
    for block in blocks(name, "json"):
        json.loads(block)


# ---------------------------------------------------------------------------------------- paths, links, names
@by_document
def test_every_path_that_is_named_exists(name):
    """Files of ours are there; files that a run or a user makes are known to the code by their names. A path
    with a word in capitals stands for others."""
    for word in words(name):
        file = re.fullmatch(NAME_OF_FILE, word)
        inside = re.fullmatch(r"(?:\./)?[\w-][\w.-]*/[\w./-]*", word)
        made = word.startswith(("runs/", *OTHERS_PATHS)) or re.search(r"[A-Z]{3}|^\d+/\d+$", word)
        if not (file or inside) or made or (ROOT / word).exists() or "//" in word:
            continue
        assert file and word.endswith((".json", ".jsonl", ".png", ".html")) and word in source(), word


def slugs(name):
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"```.*?```", "", DOCUMENTS[name], flags=re.S))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@by_document
def test_every_link_leads_somewhere(name):
    assert len(set(slugs(name))) == len(slugs(name)), "two headings with one anchor"
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert target.is_file() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in slugs(str(target.relative_to(ROOT))), link


def test_the_readme_leads_to_every_document_and_picture():
    linked = set(re.findall(r"\]\((docs/[^)#]+)\)", prose("README.md")))
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*") if p.is_file()}
    assert linked == there


@by_document
def test_every_name_of_the_code_that_is_named_exists(name):
    """`module.name` is defined there, with the module's folder or without it; a word with an underscore is
    one of the code."""
    homes = {}
    for file in CODE:
        for module in {module_of(file), module_of(file).split(".")[-1]}:
            homes.setdefault(module, []).append(file)
    for word in words(name):
        if re.fullmatch(NAME_OF_FILE, word):
            continue
        ends = [dot.start() for dot in re.finditer(r"\.|$", word)]
        at = max((end for end in ends if word[:end] in homes), default=len(word))
        if re.fullmatch(r"\w+(\.\w+)?", inside := word[at + 1:]):
            assert any(inside in defined(file) for file in homes[word[:at]]), word
        if re.fullmatch(r"[A-Za-z]\w*_\w+", word):
            assert re.search(rf"(?<!\w){word}(?!\w)", source()) or word.endswith("_API_KEY"), word


def defined(file):
    """Names of a module, and those of its classes after their class's name."""
    found = set()
    for node in tree(file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            found |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return found


def test_the_readme_is_short_and_shows_every_room():
    assert len(README.splitlines()) <= 200
    shown = README[README.index("## Rooms"):].split("```")[1]
    named = set(re.findall(r"(?<![\w/])\w+(?:\.py|\.sh|/)", shown))
    folders = {f"{p.parent.name}/" for p in ROOT.glob("*/__init__.py")} | {"docs/", "tests/"}
    assert {n for n in named if not (ROOT / n).exists()} == set()
    assert folders | {p.name for p in ROOT.glob("*.py")} <= named


# ------------------------------------------------------------------------------- metrics, equations, settings
def logged(marker):
    """The keys of a table of docs/metrics.md, in its order."""
    return [key for row in rows(marker) for key in re.findall(r"`([A-Za-z]\w*)`", row[0])]


def glossary() -> tuple[set, set]:
    """The keys of stage 3's log: those of every run, and those of a run with servers."""
    always, servers = set(), set()
    for keys, meaning in rows("grpo_hier log"):
        found = set(re.findall(r"`([A-Za-z]\w+)`", keys))
        if "(`_D`)" in keys:
            found |= {k[:-1] + "D" for k in found}
        (servers if "--engine vllm" in meaning else always).update(found)
    return always, servers


def test_the_glossary_names_each_key_once():
    """Stage 3's are compared with a run's log in test_stages.py (servers': test_engine.py), stage 2's in
    test_sft.py, those of a result in test_evaluate.py."""
    for marker in ("grpo_hier log", "sft log", "sft eval", "result"):
        keys = logged(marker)
        assert keys and len(set(keys)) == len(keys), marker
    always, servers = glossary()
    assert len(always) > 25 and not always & servers and servers


def test_what_to_look_at_in_the_first_hour_is_logged():
    for stage, keys, *_ in rows("first hour", "docs/reproduce.md"):
        known = logged(f"{stage.strip('`').removesuffix('.py')} log")
        named = re.findall(r"`(\w+)`", keys)
        assert named and set(named) <= set(known), (stage, keys)


@by_document
def test_every_equation_that_is_named_is_in_the_map(name):
    text = re.sub(r"\s+", " ", DOCUMENTS[name])
    cited = {n for several in re.findall(r"Eqs?\. (\d+'?(?:(?:, | and | or )\d+'?)*)", text)
             for n in re.findall(r"\d+'?", several)}
    assert cited <= set(equation_map()), sorted(cited - set(equation_map()))


def test_settings_that_are_given_as_the_papers_are_the_defaults():
    import evaluate
    import grpo_hier
    import sft
    g, s, e = grpo_hier.Config(), sft.Config(role="actor"), evaluate.Config()
    assert (g.K, g.M, g.max_steps, g.eps, g.beta, g.lr, g.lora_r, g.lora_alpha, g.passes, g.epochs) == \
           (3, 7, 15, 0.2, 0.0, 1e-5, 32, 64, 2, 1)
    assert (g.temperature_D, g.temperature_A, e.temperature_D, e.temperature_A, e.runs) == (.8, .8, 0, 0, 4)
    assert (s.lr, s.warmup_ratio, s.max_norm, s.max_length, s.epochs) == (1e-5, 0.03, 1.0, 30720, 1)
    assert (g.norm, g.std, g.std_eps, g.adam_eps, g.max_norm) == ("drgrpo", False, 1e-4, 1e-12, 1.0)
    assert (g.max_tokens_D, g.max_tokens_A, g.split, e.split) == (512, 512, "train647", "lite_v2")
