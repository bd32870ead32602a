"""The house rules that a reader relies on, held true by reading the source: the README's map of equations,
sizes, who imports whom, imports that do nothing, no swallowed errors, no sleeping for pages, no data run as
code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("runtime", "language", "web", "model", "sites", "records", "systems")
TOP = sorted(ROOT.glob("*.py"))
CODE = [*TOP, *sorted(f for room in ROOMS for f in (ROOT / room).rglob("*.py"))]
PROGRAMS = sorted([*ROOT.glob("demo/*.py"), *ROOT.glob("bench/*.py")])
FILES = [*CODE, *PROGRAMS, *sorted((ROOT / "tests").rglob("*.py"))]
SHIPPED = [*CODE, *PROGRAMS]
STAGES = {"annotate", "sft", "grpo_hier", "evaluate", "analysis"}
by_name = pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
by_shipped_name = pytest.mark.parametrize("file", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))


def tree(file):
    return ast.parse(file.read_text())


def functions(node, prefix=""):
    """(qualified name, node) of every function, methods and nested ones too."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef):
                yield prefix + child.name, child
        yield from functions(child, inner)


def length(node):
    return node.end_lineno - node.lineno + 1


# ------------------------------------------------------------------------------------------ paper -> code map
def equation_map():
    """README's table between its markers: {equation: (function, test prefix, gap numbers)}."""
    block = (ROOT / "README.md").read_text().split("<!-- equations -->")[1].split("<!-- /equations -->")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in block.strip().splitlines()]
    assert rows[0] == ["equation", "function", "test", "gap"], rows[0]
    return {eq.split(" ")[0]: (function.strip("`"), test.strip("`"), set(re.findall(r"\d+", gap)))
            for eq, function, test, gap in rows[2:]}


def citing():
    """{equation: [(room.function, docstring)]} for each function whose docstring begins with an equation."""
    found = {}
    for file in CODE:
        for name, node in functions(tree(file)):
            doc = ast.get_docstring(node) or ""
            if cited := re.match(r"Eqs?\. ([\d', ]+):", doc):
                for equation in cited[1].split(", "):
                    found.setdefault(equation, []).append((f"{file.stem}.{name}", doc))
    return found


def test_every_equation_has_one_function_and_the_map_names_it():
    numbered = {eq: row for eq, row in equation_map().items() if eq[0].isdigit()}
    assert list(numbered) == ["1", "2", "3", "4", "5", "6", "7", "7'", "8", "9", "10", "10'", "11"]
    found = citing()
    assert set(found) == set(numbered)
    for equation, (function, _, gaps) in numbered.items():
        assert [name for name, _ in found[equation]] == [function], f"Eq. {equation}"
        cited = set(re.findall(r"PAPER-GAPs? (\d+)", found[equation][0][1]))
        assert cited <= gaps, f"Eq. {equation}: {function} cites PAPER-GAP {cited}, the map {gaps}"


def test_every_function_of_the_map_exists():
    there = {f"{file.stem}.{name}" for file in CODE for name, _ in functions(tree(file))}
    for function, _, _ in equation_map().values():
        assert set(function.split("`, `")) <= there, function


def test_every_equation_has_a_test_named_after_it():
    tests = {name for file in (ROOT / "tests").rglob("test_*.py") for name, _ in functions(tree(file))}
    names = {"ℓ": "test_clip_*", "KL": "test_kl_*", "appendix": "test_appendix_B_*"}
    for equation, (_, test, _) in equation_map().items():
        assert test == names.get(equation, f"test_eq_{equation.replace(chr(39), 'p')}_*"), equation
        assert any(t.startswith(test.rstrip("*")) for t in tests), f"no test is named {test}"


def test_every_paper_gap_that_is_cited_is_explained():
    known = set(re.findall(r"(?m)^\| (\d+) ", (ROOT / "docs/gaps.md").read_text()))
    texts = [*SHIPPED, ROOT / "README.md", *ROOT.glob("docs/*.md")]
    cited = {n for file in texts for m in re.findall(r"PAPER-GAPs? (\d+(?:, \d+)*)", file.read_text())
             for n in m.split(", ")}
    assert cited | {n for _, _, gaps in equation_map().values() for n in gaps} <= known


# ------------------------------------------------------------------------------------------------------ sizes
@by_name
def test_sizes(file):
    text = file.read_text()
    wide = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 110]
    assert not wide, f"wider than 110 columns: lines {wide}"
    assert len(text.splitlines()) <= 400
    doc = ast.get_docstring(tree(file))
    assert doc and len(doc.splitlines()) <= 25, "a module docstring of at most 25 lines"
    for name, node in functions(tree(file)):
        doc = ast.get_docstring(node) or ""
        limit = 100 if node.name in ("main", "train") else 15 if re.match(r"Eqs?\. ", doc) else 50
        assert length(node) <= limit, f"{name} has {length(node)} lines, its limit is {limit}"


# ---------------------------------------------------------------------------------------------------- imports
# Floors, from the ground up: a file imports from its own room and from those named here, never upwards.
GROUND = {"runtime"}
MAY_IMPORT = {
    "runtime": set(),
    "language": GROUND,
    "web": GROUND | {"language"},
    "model": GROUND | {"language"},
    "records": GROUND | {"language", "web", "model"},
    "rollout": GROUND | {"language", "web", "model", "records"},
    "sites": GROUND | {"language", "web", "model"},
}
BELOW_STAGES = set(MAY_IMPORT) - {"sites"}        # environments are found by name, and so are systems


def room_of(file):
    """The room of a file, or its own name where it stands at the top."""
    inside = file.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_by(file):
    """(the first part, the whole name) of every module that a file imports, wherever it does."""
    for node in ast.walk(tree(file)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
            [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        yield from ((name.partition(".")[0], name) for name in names)


def allowed(room):
    if room in STAGES:
        return BELOW_STAGES
    if room == "systems":
        return BELOW_STAGES | {"grpo_hier"}
    assert room in MAY_IMPORT, f"{room} has no rule: say in tests/test_house.py what it may import"
    return MAY_IMPORT[room]


@pytest.mark.parametrize("file", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_who_may_import_whom(file):
    """Stages import rooms, never another stage; systems also grpo_hier, never each other; rooms only those on
    lower floors."""
    ours = {*ROOMS, *(f.stem for f in TOP), "tests", "bench", "demo"}
    room = room_of(file)
    own = set() if room == "systems" else {room}
    imported = {first for first, _ in imported_by(file)} & ours
    assert imported <= allowed(room) | own, f"{file.name} imports {imported - allowed(room) - own}"


def test_docs_house_says_the_same():
    table = (ROOT / "docs/house.md").read_text().split("<!-- imports -->")[1].split("<!-- /imports -->")[0]
    rows = [line.strip("| ").split("|") for line in table.strip().splitlines()[2:]]
    assert {room.strip(" `"): set(re.findall(r"`(\w+)`", may)) for room, may in rows} == MAY_IMPORT


def module_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_two_files_import_each_other_whichever_way_round():
    """Also not over others, and not within a room. Imports inside of functions count."""
    names = {module_of(f): f for f in CODE}
    arrows = {}
    for name, file in names.items():
        froms = {f"{n.module}.{a.name}" for n in ast.walk(tree(file)) if isinstance(n, ast.ImportFrom)
                 and n.module for a in n.names}
        arrows[name] = ({whole for _, whole in imported_by(file)} | froms) & set(names) - {name}
    done = set()

    def walk(name, path):
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name):], name])}"
        if name not in done:
            for other in sorted(arrows[name]):
                walk(other, [*path, name])
            done.add(name)
    for name in names:
        walk(name, [])


NO_ROLE = [f for f in CODE if room_of(f) in ("runtime", "web", "model", "rollout")
           or f.stem in ("episode", "episode_log", "training_log")]


@pytest.mark.parametrize("file", NO_ROLE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_role_is_named_outside_of_its_system(file):
    """Loop, pool, engine, log and checkpoints know roles by the list only. Comments and docstrings may speak
    of the paper's; in model/remote.py planner and grounder play the actor."""
    nodes = list(ast.walk(tree(file)))
    docs = {id(n.body[0].value) for n in nodes
            if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(n)}
    said = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
            and id(n) not in docs]
    said += [getattr(n, name) for n in nodes for name in ("id", "attr", "arg", "name")
             if isinstance(getattr(n, name, None), str)]
    named = {word for word in said if re.search(r"(?<![A-Za-z])(actor|decomposer)(?![a-z])", word)}
    assert named <= ({"actor"} if file.stem == "remote" else set()), named


def test_every_room_says_what_is_inside():
    for room in ROOMS:
        if (ROOT / room).is_dir():
            doc = ast.get_docstring(tree(ROOT / room / "__init__.py"))
            assert doc, f"{room}/__init__.py has no docstring"
            for file in (ROOT / room).glob("*.py"):
                assert file.stem == "__init__" or file.name in doc, f"{room}: {file.name} is not named"


IMPORT_ALL = """
import importlib, sys, threading
sys.dont_write_bytecode = True
sys.path[:0] = [ROOT, ROOT + "/tests"]
for name in THIRD: importlib.import_module(name)
class Argv(list):
    def refuse(self, *_): raise AssertionError("sys.argv was read")
    __getitem__ = __iter__ = __len__ = refuse
sys.argv = Argv()
threads = threading.active_count()
def watch(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen",
                           "os.exec", "os.system", "os.mkdir", "os.rename", "os.remove"):
        raise AssertionError(f"{event} {args}")
sys.addaudithook(watch)
for name in NAMES: importlib.import_module(name)
assert threading.active_count() == threads, "a thread was started"
if "torch" in sys.modules: assert not sys.modules["torch"].cuda.is_initialized()
print("imported", file=sys.stderr)
"""


def test_importing_any_file_does_nothing():
    """No command line read, no file written, no socket, process or thread opened, nothing printed."""
    own = {f.stem for f in FILES} | set(ROOMS) | {"bench", "demo"}
    files = [*SHIPPED, ROOT / "tests" / "mutants.py"]
    third = {name for f in files for n in tree(f).body if isinstance(n, ast.Import | ast.ImportFrom)
             for name in ([a.name for a in n.names] if isinstance(n, ast.Import) else [n.module])}
    third = sorted(n for n in third if n.split(".")[0] not in own | {"__future__"})
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts).removeprefix("tests.") for f in files]
    code = f"ROOT, THIRD, NAMES = {str(ROOT)!r}, {third!r}, {names!r}\n{IMPORT_ALL}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.stderr.endswith("imported\n"), process.stderr[-2000:]
    assert not process.stdout


# --------------------------------------------------------------------------------------- errors, sleeps, data
def called(node):
    """The dotted name of a call, as written."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


@by_shipped_name
def test_no_error_is_swallowed(file):
    lines = file.read_text().splitlines()
    for node in ast.walk(tree(file)):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where}: bare except"
            assert not all(isinstance(s, ast.Pass) for s in node.body), f"{where}: except ...: pass"
            if {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type))):
                body = ast.Module(node.body, [])
                used = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
                assert node.name in used or any(isinstance(n, ast.Raise) for n in ast.walk(body)), \
                    f"{where}: catches everything and forgets it"
        if called(node).endswith("suppress") and "Exception" in ast.unparse(node):
            assert "#" in lines[node.lineno - 1], f"{where}: suppresses everything and does not say why"


PAGES = [f for f in SHIPPED if room_of(f) in ("web", "sites", "rollout", "evaluate", "demo")
         and f.stem != "teacher"]


@pytest.mark.parametrize("file", PAGES, ids=lambda p: p.name)
def test_nothing_sleeps_where_pages_are_touched(file):
    for node in ast.walk(tree(file)):
        assert called(node).split(".")[-1] != "sleep", f"{file.name}:{node.lineno}"


@by_shipped_name
def test_data_is_never_run(file):
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "pickle.load",
                 "pickle.loads", "marshal.loads"}
    for node in ast.walk(tree(file)):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}: {called(node)}"
        assert called(node) not in forbidden, where
        given = {k.arg: ast.unparse(k.value) for k in node.keywords} if isinstance(node, ast.Call) else {}
        assert called(node) != "torch.load" or given.get("weights_only") == "True", where
        assert given.get("shell") != "True", where


def test_nothing_names_this_machine_or_a_package_registry():
    folders = (ROOT / name for name in (".ci", "demo", "bench", "tests", "docs", *ROOMS))
    files = [*ROOT.glob("*"), *(f for folder in folders for f in folder.rglob("*"))]
    texts = [f for f in files if f.is_file() and f.name != ".git"     # a file in a worktree
             and f.suffix in (".py", ".md", ".sh", ".toml", ".txt", ".html", ".json", "")]
    machine = re.compile(r"(?<![\w.}])/(home|root|work|tmp|opt|Users|mnt|srv)/\w")
    registry = re.compile("|".join(("py" "pi" r"\.org", "python" "hosted", "npm" "js", "deb" r"\.debian")))
    later = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    for file in texts:
        for i, line in enumerate(file.read_text().splitlines(), 1):
            for rule in (machine, registry, later):
                assert not rule.search(line), f"{file.relative_to(ROOT)}:{i}: {line.strip()[:100]}"


@by_shipped_name
def test_text_is_utf_8_whatever_the_locale(file):
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.Call):
            continue
        where, given = f"{file.name}:{node.lineno}: {called(node)}", {k.arg for k in node.keywords}
        binary = re.search(r"'[rwax+]*b[rwax+]*'", ast.unparse(node))
        text = called(node).endswith((".read_text", ".write_text"))
        if text or called(node) in ("open", "io.open", "os.fdopen") and not binary:
            assert "encoding" in given, f"{where} without encoding="
        if called(node).startswith("subprocess."):
            assert not given & {"text", "universal_newlines"}, f"{where}: say encoding= and not text="


@by_shipped_name
def test_every_setting_has_a_default_and_a_comment_that_becomes_its_help(file):
    lines = file.read_text().splitlines()
    for cls in tree(file).body:
        if isinstance(cls, ast.ClassDef) and cls.name.endswith("Config"):
            for field in (n for n in cls.body if isinstance(n, ast.AnnAssign)):
                where = f"{file.name}:{field.lineno}: {field.target.id}"
                assert ast.unparse(field.annotation) in ("str", "int", "float", "bool"), where
                assert lines[field.end_lineno - 1].partition("#")[2].strip(), f"{where} has no comment"


# ---------------------------------------------------------------------------------------------------- mutants
def test_every_mutant_still_applies():
    """tests/mutants.py breaks the source on purpose; a change to a line it names must be made there too."""
    assert len(mutants.MUTANTS) >= 20 and len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS)
    for m in mutants.MUTANTS:
        assert (ROOT / m.file).read_text().count(m.old) == 1, f"{m.name}: not one {m.old!r} in {m.file}"
        assert m.old != m.new
