"""No option that names a path answers with a traceback, whatever is there: one line, and it names the path.

Every command is the shipped file run as a script, in this process (a new one would only import torch again).
"""

import json
import os
from dataclasses import asdict

import pytest
from test_mistakes import said

import evaluate
import grpo_hier
import sft

KINDS = {"missing": "none", "a file": "file.txt", "below a file": "file.txt/x", "bytes": "noise.bin",
         "an empty file": "empty", "an empty directory": "hollow", "a list": "list.json",
         "other JSON": "object.json", "lines of others": "lines.jsonl", "a loop": "loop",
         "a long name": "x" * 300,
         "locked": "locked", "a locked directory": "closed", "stage 2's run": "run2", "stage 3's run": "run3",
         "an adapter": "run3/checkpoints/000003/actor", "stage 4's run": "run4"}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, tiny_model):
    """A directory with one of each kind, and what the commands need beside the wrong path."""
    d = tmp_path_factory.mktemp("wrong")
    for name, data in (("file.txt", b"some words\n"), ("noise.bin", bytes(range(256))), ("empty", b""),
                       ("list.json", b"[1, 2]\n"), ("object.json", b'{"a": 1}\n'), ("locked", b"{}"),
                       ("lines.jsonl", b'{"a": 1}\n{"b": 2}\n'), ("records.jsonl", b"")):
        (d / name).write_bytes(data)
    for name in ("hollow", "closed", "run2", "run3/checkpoints/000003/actor", "run4"):
        (d / name).mkdir(parents=True)
    (d / "loop").symlink_to(d / "loop")
    for run, settings in (("run2", sft.Config("actor")), ("run3", grpo_hier.Config(run_dir="x")),
                          ("run4", evaluate.Config(run_dir="x"))):
        (d / run / "config.json").write_text(json.dumps(asdict(settings)))
    (d / "run3/checkpoints/000003/actor/adapter_config.json").write_text("{}")
    data = {"root": str(d), "annotation": str(d / "records.jsonl")}
    (d / "meta.json").write_text(json.dumps({"web": data}))
    (d / "sites.json").write_text("{}")
    (d / "tasks.json").write_text(json.dumps([{"task_id": 1, "intent": "x", "eval": {}, "sites": [],
                                               "start_url": "http://127.0.0.1:9/"}]))
    episode = {"task": "a", "reward": 1.0, "steps": [], "subtasks": []}
    (d / "episodes.jsonl").write_text(json.dumps(episode) + "\n")
    for name, mode in (("locked", 0), ("closed", 0)):
        (d / name).chmod(mode)
    yield d
    (d / "closed").chmod(0o700)


ANNOTATE = "annotate.py --meta {d}/meta.json --out {t}/new.jsonl --base_url http://127.0.0.1:9/v1 --limit 1"
SFT = "sft.py --role actor --model {m} --meta {d}/meta.json --run_dir {t}"
SFT += " --decompositions {d}/records.jsonl"
PAGES = "--env miniwob --tasks click-tab --split eval --use_plan false --dtype float32 --actor {m}"
GRPO = f"grpo_hier.py --run_dir {{d}}/run3 {PAGES}"
EVAL = f"evaluate.py --run_dir {{d}}/run4 --device cpu {PAGES}"
WEB = "evaluate.py --run_dir {d}/run4 --device cpu --use_plan false --actor {m} --sites {d}/sites.json"
WEB += " --tasks {d}/tasks.json"
RUNS = {"stage 2's run", "stage 3's run", "stage 4's run", "an adapter"}
DIRECTORIES = RUNS | {"missing", "an empty directory"}
LATER = DIRECTORIES | {"a long name"}              # that a directory cannot be made is said when it is
WRITABLE = {"missing", "a file", "bytes", "an empty file", "a list", "other JSON", "lines of others",
            "locked", "a loop"}                       # a loop of links is replaced, as a file is
TEXTS = {"a file", "stage 2's run", "stage 3's run", "stage 4's run", "locked"}
OPTIONS = [  # command, option, kinds that are right for it, or that are found to be wrong elsewhere
    (ANNOTATE, "meta", set()), (ANNOTATE, "prompts", set()),
    (ANNOTATE, "out", {"missing", "an empty file", "locked", "a loop"}),
    (ANNOTATE, "prompt_file", set()), (ANNOTATE, "preset", set()),
    ("annotate.py stats", "out", {"an empty file", "locked"}), (f"{ANNOTATE} --dry_run", "meta", set()),
    (SFT, "model", set()), (SFT, "meta", set()), (SFT, "decompositions", {"an empty file"}),
    (SFT, "prompts", set()), (SFT, "run_dir", {"missing", "an empty directory", "an adapter"}),
    (f"{SFT} --dry_run", "model", set()), ("sft.py export", "run_dir", set()),
    ("sft.py export --run_dir {d}/run2", "out", LATER - RUNS | {"a loop"}),
    (GRPO, "actor", set()), (f"{GRPO} --use_plan true", "decomposer", set()), (GRPO, "prompts", set()),
    (GRPO, "adapters_dir", LATER), (GRPO, "run_dir", {"missing", "an empty directory", "an adapter"}),
    (f"{GRPO} --dry_run", "actor", set()), (GRPO, "preset", set()),
    (EVAL, "actor", set()), (f"{EVAL} --use_plan true", "decomposer", set()),
    (EVAL, "adapters", {"stage 3's run"}), (EVAL, "prompts", set()),
    (f"{EVAL} --dry_run", "adapters", {"stage 3's run"}),
    (EVAL, "run_dir", {"missing", "an empty directory", "an adapter"}), (EVAL, "preset", set()),
    (WEB, "sites", set()), (WEB, "tasks", set()), (WEB, "patch", set()), (WEB, "auth", LATER),
    (WEB, "leases", DIRECTORIES), (WEB, "judge_cache", LATER),
    *((f"analysis.py {name}", "runs", set()) for name in (
        "curve", "table1", "table3", "subgoals", "diagnostics", "view")),
    ("analysis.py compare --b {d}", "a", set()), ("analysis.py compare --a {d}", "b", set()),
    ("analysis.py demo --a {d}", "b", set()), ("analysis.py compare {d} {d}", "out", WRITABLE),
    ("analysis.py table1 {d}", "out", WRITABLE), ("analysis.py view {d}", "out", WRITABLE),
    ("analysis.py subgoals --runs {d} --model m --base_url http://127.0.0.1:9/v1", "prompt_file", set()),
    ("sites/webarena/__main__.py --sites {d}/sites.json", "tasks", set()),
    ("sites/webarena/__main__.py --tasks {d}/tasks.json", "sites", set()),
    ("sites/webarena/__main__.py --tasks {d}/tasks.json --sites {d}/sites.json", "patch", set()),
    ("demo/teacher.py", "demonstrations", set()),
    ("demo/tiny_model.py --texts {d}/none", "out", LATER - RUNS | {"a loop"}),
    ("demo/tiny_model.py --out {t}/new", "texts", TEXTS), ("demo/demonstrate.py --n 1", "out", DIRECTORIES),
    ("bench/simulate.py", "run_dir", set()), ("bench/simulate.py", "gpu", set())]


CASES = [(command, option, kind) for command, option, right in OPTIONS for kind in KINDS if kind not in right]


@pytest.mark.parametrize("command, option, kind", CASES,
                         ids=[f"{c.split(' -')[0]} {option}-{kind}" for c, option, kind in CASES])
def test_a_wrong_path_is_one_line(wrong, tiny_model, tmp_path, monkeypatch, capsys, command, option, kind):
    if "locked" in kind and os.geteuid() == 0:
        pytest.skip("nothing is locked for root")
    path = str(wrong / KINDS[kind])
    script, *args = command.format(d=wrong, m=tiny_model, t=tmp_path).split()
    line = said(script, [*args, f"--{option}", path], monkeypatch, capsys)
    assert path[:80] in line.replace("/.x", "/x"), line
