"""Stage 4: what is averaged and what is not, what stands beside a score, killed and restarted evaluations,
and the order in which tasks run that find each other's traces."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from model_server import serving
from test_docs import logged

import analysis
import evaluate
import runtime
from demo.teacher import request_text
from language.prompts import load_prompts
from model.inputs import Sample
from records.results import read_episodes
from runtime import UserError, run
from sites.miniwob import MiniWob
from web.environment import Task, Verdict

ROOT = Path(__file__).resolve().parent.parent


def line(task, reward, run=0, site="gitlab", **more):
    status = "infra" if reward is None else "success" if reward else "failure"
    return {"batch": 0, "task": task, "site": site, "instance": 0, "run": run, "k": 0, "m": 0,
            "status": status, "reward": reward, "rewards": {}, "fault": "crash" if reward is None else "",
            "commit": "c1"} | more


UNKNOWN = {"fault": "verdict", "rewards": {"fixed": None, "vab": 0.0}}


# -------------------------------------------------------------------------------------------------- the score
def test_a_score_is_the_mean_over_tasks_and_what_has_no_verdict_is_counted_only():
    lines = [line("a", 1.0), line("a", 0.0, 1), line("a", 0.0, 2), line("a", 0.0, 3),   # 1/4
             line("b", 1.0), line("b", None, 1), line("b", None, 2, **UNKNOWN),         # 1
             line("c", 0.0, site="map", status="unparsable")]                           # 0
    got = evaluate.summarise(lines)
    deviations = [x - 1.25 / 3 for x in (0.25, 1.0, 0.0)]
    assert got["success"] == pytest.approx(1.25 / 3)
    assert got["se"] == pytest.approx(math.sqrt(sum(d * d for d in deviations) / 2 / 3))
    assert [got[k] for k in ("n", "n_infra", "n_unknown", "n_unparsable")] == [6, 1, 1, 1]
    gitlab, maps = got["sites"]["gitlab"], got["sites"]["map"]
    assert gitlab["success"] == pytest.approx(0.625) and gitlab["n"] == 5
    assert (maps["success"], maps["se"], maps["n"]) == (0.0, None, 1)
    assert evaluate.summarise([line("a", None)])["success"] is None


def test_every_profile_is_scored_from_the_same_episodes_and_the_provenance_is_complete(tmp_path):
    lines = [line("a", 1.0, rewards={"fixed": 1.0, "vab": 0.0}),
             line("b", 0.0, rewards={"fixed": 0.0, "vab": 0.0}),
             line("c", 1.0, rewards={"fixed": 1.0, "vab": None}, commit="c2"), line("d", None, **UNKNOWN)]
    cfg = evaluate.Config(actor="A", decomposer="D", adapters="R", judge_model="a-judge", also="vab")
    got = evaluate.make_result(cfg, lines, load_prompts())
    assert set(got) == set(logged("result"))              # docs/metrics.md defines each key
    fixed, vab = got["profiles"]["fixed"], got["profiles"]["vab"]
    assert (got["profile"], got["success"], got["n_unknown"]) == ("fixed", pytest.approx(2 / 3), 1)
    assert {k: got[k] for k in fixed} == fixed
    assert (vab["success"], vab["n"], vab["n_unknown"]) == (0.0, 3, 1)
    assert got["system"] == "actor A + adapters R, decomposer D + adapters R"
    assert (got["judge"], got["commit"]) == ("a-judge", "c1, c2")
    assert got["prompts_hash"] == load_prompts().digest() != load_prompts(actor_system="x").digest()
    assert got["config"]["max_steps"] == 15 and got["faults"] == {"verdict": 1}

    (tmp_path / "result.json").write_text(json.dumps(got))
    told = analysis.provenance(tmp_path)
    for fact in ("profile fixed", "judge a-judge", "commit c1, c2", f"prompts_hash {got['prompts_hash']}"):
        assert fact in told


def test_evaluate_and_analysis_agree_on_every_profile(tmp_path, capsys):
    """Two computations of one number: result.json's, and table 1's from episodes.jsonl."""
    lines = [line(f"t{i}", float(i % 3 > 0), r, ["gitlab", "map"][i % 2],
                  rewards={"fixed": float(i % 3 > 0), "vab": float(i % 5 > r)})
             for i in range(11) for r in (0, 1)]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    got = evaluate.make_result(evaluate.Config(actor="A", use_plan=False), lines, load_prompts())
    for profile in ("fixed", "vab"):
        analysis.table1(analysis.Config(runs=f"mine={tmp_path}", profile=profile))
        row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("| mine (ours)"))
        mine = got["profiles"][profile]
        assert f"{100 * mine['success']:.1f} ± {100 * mine['se']:.1f} | 22 | 0 | 0 | 0" in row
        assert f"{100 * mine['sites']['map']['success']:.1f} ± " in row


def test_the_code_version_is_a_commit_or_nothing(tmp_path, monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{12,40}(-dirty)?|", runtime.code_version())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert runtime.code_version() == ""
    (tmp_path / "x").write_text("1")
    for command in (["init", "-q"], ["add", "x"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert runtime.code_version() == head[:12]
    (tmp_path / "x").write_text("2")
    assert runtime.code_version() == f"{head[:12]}-dirty"


# ------------------------------------------------------------------------------------------------- the system
@pytest.mark.parametrize("settings, said", [
    ({}, "--actor is missing"), ({"actor_model": "m", "actor_url": "http://h/v1"}, "--decomposer is missing"),
    ({"planner_model": "m", "planner_url": "http://h/v1"}, "--grounder_model is missing"),
    ({"grounder_model": "m", "grounder_url": "http://h/v1"}, "--planner_model is missing"),
    ({"actor": "d", "use_plan": False, "temperature_A": -1.0}, "below 0"),
    ({"planner_model": "m", "dialect": "uitars"}, "--dialect uitars"),
    ({"actor_model": "m", "use_plan": False}, "OPENAI_API_KEY"),
])
def test_what_is_missing_is_named(settings, said, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match=re.escape(said)):
        evaluate.need(evaluate.Config(**settings))


def adapters(run, *names):
    """Adapters as far as they are looked for before they are read."""
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "adapter_config.json").write_text("{}")


def test_the_checkpoint_that_is_evaluated_is_written_down(tmp_path):
    adapters(tmp_path, "000002/actor", "000010/actor")
    newest = str(tmp_path / "checkpoints/000010")
    for given in (str(tmp_path), str(tmp_path / "checkpoints"), newest):
        cfg = evaluate.with_checkpoints(evaluate.Config(adapters=given, use_plan=False))
        assert cfg.adapters == newest and f"adapters {newest}" in evaluate.describe_system(cfg)
    assert evaluate.with_checkpoints(evaluate.Config()).adapters == ""
    older = evaluate.Config(adapters=str(tmp_path / "checkpoints/000002"), use_plan=False)
    assert evaluate.with_checkpoints(older) == older
    with pytest.raises(UserError, match="--adapters no/such: no checkpoint of the actor"):
        evaluate.with_checkpoints(evaluate.Config(adapters="no/such"))


def test_adapters_that_are_not_there_are_not_written_down_as_tested(tmp_path):
    """A run without a plan has none for a decomposer."""
    adapters(tmp_path, "000002/actor")
    with pytest.raises(UserError, match="no checkpoint of the actor and the decomposer .* --use_plan false"):
        evaluate.with_checkpoints(evaluate.Config(adapters=str(tmp_path)))
    on_server = evaluate.Config(adapters=str(tmp_path), decomposer_model="m")
    assert "decomposer m" in evaluate.describe_system(evaluate.with_checkpoints(on_server))


# -------------------------------------------------------------------------------------------------- the order
def tasks(text):
    """`a1 A2 b3`: site, capital where the task leaves traces, number."""
    return [Task(name, name[0].lower(), leaves_traces=name[0].isupper()) for name in text.split()]


@pytest.mark.parametrize("text, wanted", [
    ("a1 b2 a3", ["a1 b2 a3"]), ("a1 A2 a3 a4", ["a1", "A2", "a3 a4"]), ("A1 A2", ["A1", "A2"]),
    ("a1 b2 A3 b4 a5 B6 b7", ["a1 b2 b4", "A3 B6", "a5 b7"]), ("", []),
])
def test_waves(text, wanted):
    assert [" ".join(t.id for t in wave) for wave in evaluate.waves(tasks(text))] == wanted


class Diary(MiniWob):
    """Notes which tasks were under way at one time, and in what order they ended."""

    def __init__(self, names):
        super().__init__("click-tab")
        self.names, self.now, self.met, self.ended, self.lock = names, {}, set(), [], threading.Lock()

    def tasks(self, split):
        return [replace(task, seed=i, data={"page": "click-tab"}) for i, task in enumerate(tasks(self.names))]

    def open(self, task, session):
        with self.lock:
            self.now[id(session)] = task
            self.met |= {frozenset((task.id, t.id)) for t in self.now.values() if t != task}
        return super().open(task, session)

    def judge(self, task, session, answer):
        session.page.wait_for_timeout(300)
        with self.lock:
            self.ended.append(task.id)
        return Verdict(1.0)

    def leave(self, session):
        with self.lock:
            self.now.pop(id(session), None)
        return {}


def test_a_task_that_leaves_traces_runs_alone_on_its_site_and_in_the_files_order(tmp_path, monkeypatch):
    diary = Diary("a1 a2 A3 a4 b5 B6 b7")
    monkeypatch.setattr(evaluate, "load_environment", lambda cfg: diary)
    def act(requests):
        return [Sample([1], r.png, (160, 120), [2], [0.0], "terminate()") for r in requests]
    monkeypatch.setattr(evaluate, "need", lambda cfg: None)
    monkeypatch.setattr(evaluate, "load_models", lambda cfg, texts: {"actor": act})
    evaluate.main(evaluate.Config(run_dir=str(tmp_path), use_plan=False, runs=1, threads=3))
    for writer, others in (("A3", ("a1", "a2", "a4")), ("B6", ("b5", "b7"))):
        assert not {frozenset((writer, other)) for other in others} & diary.met
    assert diary.met, "nothing ran at once, so this test would show nothing"
    order = {name: i for i, name in enumerate(diary.ended)}
    assert max(order["a1"], order["a2"]) < order["A3"] < order["a4"]
    assert order["b5"] < order["B6"] < order["b7"] and len(diary.ended) == 7


# ----------------------------------------------------------------------------------------- killed, restarted
def test_an_evaluation_killed_half_way_and_restarted_ends_with_the_same_table(tmp_path, tabs, capsys):
    wrong = []                        # the first tab that is ever asked for, so that the score is not 0 or 1

    def answer(path, body, headers):
        number = int(re.search(r"#(\d)", request_text(body))[1])
        wrong[:] = wrong or [number]
        x, y = tabs[number % 3 + 1 if number in wrong else number]
        return f"<action>click(x={x}, y={y})</action>"
    file = tmp_path / "parts/episodes.jsonl"
    with serving(answer) as server:
        settings = {"env": "miniwob", "tasks": "click-tab", "split": "eval", "instances": 4, "runs": 2,
                    "threads": 1, "max_steps": 2, "coordinates": "page", "actor_model": "m",
                    "actor_url": server.url}
        evaluate.main(evaluate.Config(**settings, use_plan=False, run_dir=str(tmp_path / "whole")))
        whole = capsys.readouterr().out
        flags = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
        process = subprocess.Popen([sys.executable, "evaluate.py", *flags, "--use_plan", "false",
                                    "--run_dir", str(tmp_path / "parts")], cwd=ROOT)
        deadline = time.monotonic() + 120
        while not file.exists() or file.read_text().count("\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        finished = [json.loads(x) for x in file.read_text().splitlines(True) if x.endswith("\n")]
        assert len(finished) < 8, "it had ended, so this test would show nothing"
        # a browser that crashed and a judge that was away leave no verdict, and the kill half a line
        spoilt = [finished[0] | {"reward": None, "status": "infra", "fault": "crash"},
                  finished[1] | {"reward": None, "status": "infra", "fault": "verdict"}]
        file.write_text("".join(json.dumps(x) + "\n" for x in [*spoilt, *finished[2:]]) + '{"batch": 0, "ta')
        evaluate.main(evaluate.Config(**settings, use_plan=False, run_dir=str(tmp_path / "parts")))
    assert capsys.readouterr().out == whole and "n 8, infra 0, unknown 0" in whole
    a, b = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts"))
    assert {k: v for k, v in a.items() if k != "config"} == {k: v for k, v in b.items() if k != "config"}
    assert 0 < a["success"] < 1 and a["n"] == 8
    keys = [(e["task"], e["run"]) for e in map(json.loads, file.read_text().splitlines())]
    assert len(keys) == len(set(keys)) == 8
    kept = {(e["task"], e["run"]): e for e in read_episodes(file)}
    assert all(kept[e["task"], e["run"]] == e for e in finished[2:]), "a finished episode was run again"
