"""What a run prints: nothing of libraries that is not for its reader, nothing twice, and no traceback where a
terminal cannot show a letter or another run holds the directory."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from recorded import corpus, settings  # noqa: F401  (a fixture)
from test_mistakes import said

from runtime import only_process

ASCII = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))} | {
    "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_WAIT_POLICY": "passive"}


def run(*words, env=ASCII):
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=env, capture_output=True,
                          encoding="ascii", errors="strict", timeout=300)


# ------------------------------------------------------------------------------------------------- the driver
KILLED = """
import sys, threading, time
sys.path.insert(0, {root!r})
from web.session import Session
from sites.miniwob import MiniWob
from web.environment import RolloutConfig
env = MiniWob("click-tab", instances=1)
session = Session(env, RolloutConfig())
for _ in range(2):
    session.open(env.tasks("eval")[0])
    threading.Timer({after}, session.driver.kill).start()
    try:
        {call}
    except Exception as e:
        print(session.fault(e))
        session.stop()
session.stop()
"""


@pytest.mark.parametrize("call, after", [
    ("session.page.wait_for_timeout(20_000)", 0.3),
    ("session.page.evaluate('new Promise(done => setTimeout(done, 20_000))')", 0.3),
    ("time.sleep(1); session.page.title()", 0.0)])
def test_a_killed_driver_is_told_by_the_call_that_raises_and_nowhere_else(call, after):
    done = run("-c", KILLED.format(root=str(ROOT), call=call, after=after))
    assert (done.stdout.split(), done.stderr) == (["driver_gone"] * 2, "")


# ------------------------------------------------------------------------------------------------- the locale
HELP = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        assert e.code == 0, (script, e.code)
    print("shown:", script)
"""


def test_every_help_is_shown_where_only_ascii_can_be():
    files = [*ROOT.glob("*.py"), *ROOT.glob("demo/*.py"), *ROOT.glob("bench/*.py")]
    scripts = sorted(str(f.relative_to(ROOT)) for f in files if "__main__" in f.read_text(encoding="utf-8"))
    assert {"annotate.py", "sft.py", "grpo_hier.py", "evaluate.py", "analysis.py"} <= set(scripts)
    done = run("-c", HELP, *scripts)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [line for line in done.stdout.splitlines() if line.startswith("shown: ")]
    assert shown == [f"shown: {script}" for script in scripts]
    assert "--lora_alpha INT" in done.stdout and "?, sec. 4.3" in done.stdout and not done.stderr


WORDS = "Größe – 日本"


def test_stages_run_where_only_ascii_can_be_shown(corpus, tiny_model, tmp_path):  # noqa: F811
    """Their files are UTF-8 all the same."""
    plans = tmp_path / "plans.jsonl"
    lines = [json.loads(line) for line in (corpus / "decompositions.jsonl").read_text().splitlines()]
    more = {"platform": WORDS, "unnecessary": "", "prompt_hash": "", "usage": {"input": 1, "output": 1}}
    plans.write_text("".join(json.dumps(o | more | {"subtasks": [{"title": WORDS, "goal": WORDS}]},
                                        ensure_ascii=False) + "\n" for o in lines), encoding="utf-8")
    episode = {"task": "t", "site": WORDS, "status": "failure", "instruction": WORDS, "subtasks": [],
               "steps": [], "plan": WORDS}
    (tmp_path / "episodes.jsonl").write_text("".join(
        json.dumps(episode | {"task": str(n), "reward": float(n % 2)}, ensure_ascii=False) + "\n"
        for n in range(4)), encoding="utf-8")
    prompts = json.loads((ROOT / "demo/prompts.json").read_text(encoding="utf-8"))
    (tmp_path / "prompts.json").write_text(
        json.dumps({k: f"{v} {WORDS}" for k, v in prompts.items()}, ensure_ascii=False), encoding="utf-8")
    flags = settings(corpus, tiny_model, tmp_path / "run", max_steps=1) + [
        f"--decompositions={plans}", f"--prompts={tmp_path / 'prompts.json'}"]
    for words, shown in ((("analysis.py", "table1", tmp_path), "?"), (("sft.py", *flags), "after SFT"),
                         (("analysis.py", "view", tmp_path), "episodes"),
                         (("annotate.py", "stats", plans), "?"),
                         (("analysis.py", "table3", plans), "?")):
        done = run(*words)
        assert done.returncode == 0 and shown in done.stdout, (words, done.stderr[-2000:])
        assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    for file in ("table1.md", "episodes.html"):
        assert WORDS in (tmp_path / file).read_text(encoding="utf-8")


def test_an_error_with_a_word_that_cannot_be_shown_is_still_one_line(tmp_path):
    done = run("analysis.py", "curve", tmp_path / "nowhere", "--runz", env=ASCII)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    (tmp_path / "prompts.json").write_text(json.dumps({WORDS: ""}), encoding="utf-8")
    done = run("sft.py", "--role", "actor", "--model", ROOT, "--prompts", tmp_path / "prompts.json")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    done = run("annotate.py", "--meta", tmp_path / "prompts.json")
    assert done.returncode == 2 and "Gr?" in done.stderr and done.stderr.count("\n") == 1, done.stderr


# ---------------------------------------------------------------------------------------------- one at a time
PAGES = "--env miniwob --tasks click-tab --use_plan false --dtype float32 --actor {m} --run_dir {t}"
STAGES = {"sft.py": "--role actor --model {m} --meta {c}/meta.json --decompositions {c}/decompositions.jsonl "
                    "--run_dir {t}",
          "grpo_hier.py": f"--split train {PAGES}", "evaluate.py": f"--split eval --device cpu {PAGES}",
          "annotate.py": "--meta {c}/meta.json --out {t}/out.jsonl --base_url http://127.0.0.1:9/v1"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_directory_that_another_run_holds_is_left_alone(
        corpus, tiny_model, tmp_path, monkeypatch, capsys, stage):  # noqa: F811
    place = tmp_path / "out.jsonl" if stage == "annotate.py" else tmp_path
    with only_process(place):
        there = {p: p.read_bytes() for p in tmp_path.iterdir()}
        flags = STAGES[stage].format(m=tiny_model, c=corpus, t=tmp_path).split()
        line = said(stage, flags, monkeypatch, capsys)
        assert line.startswith(f"{stage}: {place} is held by another run, process {os.getpid()} on ")
        assert {p: p.read_bytes() for p in tmp_path.iterdir()} == there
