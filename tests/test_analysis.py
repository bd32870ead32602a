"""The commands of analysis.py on fabricated files, and its judge."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from fabricated import clicks, episode, printed, write
from model_server import serving
from PIL import Image

import analysis
from analysis import Config
from records import results
from runtime import UserError

ROOT = Path(__file__).resolve().parents[1]


# -------------------------------------------------------------------------------------- curves and comparison
def test_curve_draws_the_log_and_says_both_ends(tmp_path, capsys):
    lines = [{"batch": b, "reward_mean": b / 10, "S_std": None, "note": "x"} for b in range(9)]
    lines.append({"batch": 8, "reward_mean": 0.5})  # it was run again
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"batch": 9, "rew')
    analysis.curve(Config(runs=str(tmp_path)))
    out = printed(capsys)
    assert out[tmp_path.name] == {"batches": 9, "first_third": 0.1, "last_third": 0.6}
    assert Image.open(tmp_path / "curve.png").width > 300
    analysis.curves(Config(runs=str(tmp_path), out=str(tmp_path / "more.png")))
    assert (tmp_path / "more.png").stat().st_size > 1000
    (tmp_path / "log.jsonl").write_text('{"batch": 1, "other": 2}\n')
    with pytest.raises(UserError, match="none of the keys"):
        analysis.curve(Config(runs=str(tmp_path)))


def test_the_demos_last_line(tmp_path, capsys):
    for name, rewards in (("sft", [0, 0, 1, 0]), ("rl", [1, 0, 1, None])):
        write(tmp_path / name, [episode(f"t{i}", r) for i, r in enumerate(rewards)])
    cfg = Config(a=str(tmp_path / "sft"), b=str(tmp_path / "rl"))
    analysis.demo(cfg)
    out = printed(capsys)
    assert list(out) == ["sft_success", "rl_success", "gain", "gain_ci95", "n", "minutes"]
    assert (out["gain"], out["n"], out["minutes"]) == (pytest.approx(1 / 3, abs=1e-4), 3, None)
    analysis.compare(cfg)
    full = printed(capsys)
    assert full["gain_ci95"] == out["gain_ci95"] and full["unpaired"] == 1 and full["b_n_infra"] == 1


def test_users_mistakes_are_one_line_and_exit_code_2(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, ROOT / "analysis.py", *args], capture_output=True, text=True)
    for args, word in (("compare --a nowhere --b x", "no result file"), ("", "name what to make"),
                       ("curve", "give NAME=DIR"), ("table1 --runs a=x,a=y", "no name twice")):
        done = run(*args.split())
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1


def test_bench_of_the_coverage_runs_small():
    few = ["--experiments", "30", "--resamples", "300"]
    done = subprocess.run([sys.executable, ROOT / "bench/coverage.py", *few], capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["interval_coverage"] >= 0.75 and abs(line["mean_gain"] - line["true_gain"]) < 0.03


# --------------------------------------------------------------------------------------------------- subgoals
def test_subgoals_asks_once_keeps_answers_and_draws(tmp_path, capsys):
    verdicts = {"t0": "1: done\n2: done", "t1": "1: done\n2: not done", "t2": "1: not done\n2: not done",
                "t3": "1: not done\n2: not done", "t4": "1: done\n2: perhaps", "t5": "1: done\n2: done"}
    es = [episode(t, float(t in ("t0", "t1")), subtasks=[["open", ""], ["save", ""]]) for t in verdicts]
    es += [episode("malformed", 0.0, subtasks=[]), episode("broken", None)]
    run = write(tmp_path / "r", es)

    def judge(path, body, headers):
        content = body["messages"][-1]["content"]
        assert [p["type"] for p in content] == ["image_url", "image_url", "text"]  # first, last, question
        return verdicts[re.search(r"do (t\d)", content[-1]["text"])[1]]

    with serving(judge) as server:
        cfg = Config(runs=f"joint={run}", base_url=server.url, model="judge", resamples=200)
        analysis.subgoals(cfg)
        q = printed(capsys)["joint"]
        assert len(server.requests) == 6 and (q["n"], q["unjudged"], q["without_plan"]) == (5, 1, 1)
        # successes 1, .5 against failures 0, 0, 1: (2 + .5) + (2 + 0) of 6 pairs
        assert q["auroc"] == pytest.approx(4.5 / 6)
        assert q["by_share"][0] == {"from": 0, "n": 2, "share": 0, "success": 0}
        verdicts["t4"] = "1: done\n2: done"
        analysis.subgoals(cfg)
        assert len(server.requests) == 7  # only what was unclear
        assert printed(capsys)["joint"]["unjudged"] == 0
    analysis.subgoals(Config(runs=f"joint={run}", resamples=200))  # without a judge: from the kept answers
    assert printed(capsys)["joint"]["n"] == 6
    assert Image.open(run / "figure2.png").width > 300
    assert xml.etree.ElementTree.parse(run / "figure2.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("said, word", [("I cannot say.", "without a clear answer"),
                                        ((401, {"error": {}}, {}), "401")])
def test_a_judge_that_fails_is_no_low_score(tmp_path, said, word):
    run = write(tmp_path / "r", [episode(f"t{i}", float(i % 2)) for i in range(4)])
    with serving(lambda *_: said) as server, pytest.raises(UserError, match=word):
        analysis.subgoals(Config(runs=str(run), base_url=server.url, model="judge"))
    with pytest.raises(UserError, match="0 of 4 episodes are judged"):
        analysis.subgoals(Config(runs=str(run)))


# --------------------------------------------------------------------------------------------------- episodes
def test_failures_counts_only_failures(tmp_path, capsys):
    here = (10, 10)
    there = (80, 80)
    es = [episode("a", 1.0), episode("b", None), episode("c", 0.0, clicks(here, there)),
          episode("d", 0.0, clicks(here, there)),
          episode("e", 0.0, clicks(here, here, here), status="max_steps")]
    analysis.failures(Config(runs=str(write(tmp_path / "r", es))))
    r = printed(capsys)["r"]
    assert (r["failed"], r["n"], r["n_infra"]) == (3, 4, 1) and r["modes"]["stuck midway"]["share"] == 0.3333
    assert r["modes"]["stopped at the wrong place"]["rules"] == {"the page ended the episode": 2}
    assert dict(zip(results.KEY, r["modes"]["stuck midway"]["example"]))["task"] == "e"


def test_diagnostics_reads_a_training_run(tmp_path, capsys):
    es = [episode("t", float(r), k=k, m=m, plan=f"plan {k}", adv_D=0.25 - k / 2)
          for k, row in enumerate([(1, 1), (1, 0)]) for m, r in enumerate(row)]
    analysis.diagnostics(Config(runs=str(write(tmp_path / "r", es))))
    r = printed(capsys)["r"]
    assert (r["mean_S"], r["adv_D_std"], r["zero_adv_A"], r["distinct_plans"]) == (0.75, 0.25, 0.5, 1)
