"""A wrong answer is no success on any MiniWoB++ page, and a right one is: every page in real Chromium, and
what the files say of it."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
import grpo_hier
from bench import miniwob_rewards as bench
from model.inputs import Sample
from records.results import read_episodes
from runtime import UserError, field_comments
from sites.miniwob import MiniWob, html_root, make
from sites.miniwob_rewards import FULL, RULES, reaches, rule_of
from web.environment import RolloutConfig
from web.session import Session

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p.stem for p in (html_root() / "miniwob").glob("*.html"))
JUDGED = [page for page in PAGES if rule_of(page).least is not None]


@pytest.fixture(scope="module")
def env():
    environment = MiniWob(",".join(JUDGED), instances=20)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def session(env):
    s = Session(env, RolloutConfig())
    yield s
    s.stop()


# -------------------------------------------------------------------------------------------------- the table
def test_the_table_names_pages_that_are_there_and_says_why():
    assert len(PAGES) == 130 and set(RULES) <= set(PAGES)
    for page, rule in RULES.items():
        assert rule.kind in ("parts", "bands", "distance", "witness", "never") and len(rule.why) > 20, page
        assert (rule.least is None) == (rule.kind == "never") and not (rule.least or 1) > 1, page
        assert rule.least == 1 or rule.kind in ("bands", "distance", "never") or page == "moving-items"
        assert page in bench.SCRIPTS or page in bench.DRIVERS or rule.kind == "never", f"{page}: no answer"
    assert rule_of("click-tab") is FULL


@pytest.mark.parametrize("raw, witness, success", [
    (1.0, True, True), (1 / 3 + 1 / 3 + 1 / 3 - 1e-12, True, True), (0.999, True, False), (0.01, True, False),
    (1.0, False, False), (1.0, None, False), (math.nan, True, False), (-1.0, True, False)])
def test_the_full_reward_is_a_success_and_nothing_else(raw, witness, success):
    assert bool(reaches(FULL, raw, witness)) is success


# ------------------------------------------------------------------------------------------------- every page
@pytest.mark.parametrize("page", JUDGED)
def test_no_wrong_answer_is_a_success_and_a_right_one_is(env, session, page):
    found = bench.tries(env, session, env.task(page, 3_000_000))
    assert not found["idle"][0]
    success, raw = found.get("submit", (False, 0))
    assert not success or raw == 1
    if page in RULES:
        assert not found["wrong"][0] and found["right"][0], found


def press_submit(env, session, page, seed):
    """Verdict and raw reward of submitting at once."""
    task = env.task(page, seed)
    session.open(task)
    assert session.page.evaluate(bench.SUBMIT)
    verdict = env.judge(task, session, "")
    return verdict, env.leave(session)["raw_reward"]


@pytest.mark.parametrize("page", ["click-checkboxes", "click-checkboxes-soft", "click-checkboxes-transfer",
                                  "use-colorwheel", "use-colorwheel-2"])
def test_to_submit_nothing_is_no_success_though_it_pays(env, session, page):
    """The issue's measurements; every paid attempt is in the record with what it was paid."""
    paid = 0
    for seed in range(3_000_000, 3_000_020):
        verdict, raw = press_submit(env, session, page, seed)
        paid += 0 < raw < 1
        assert verdict.reward == (raw == 1) and verdict.rewards == {"raw>0": float(raw > 0)}
        assert f"raw reward {raw:g}" in verdict.reason
    assert paid >= {"use-colorwheel": 20, "use-colorwheel-2": 20}.get(page, 4)


def answered(env, session, page, right, seed=3_000_000):
    task = env.task(page, seed)
    bench.begin(env, session, task)
    bench.answer(session.page, page, right)
    return env.judge(task, session, ""), env.leave(session)["raw_reward"]


@pytest.mark.parametrize("page, raw", [
    ("find-greatest", 0.1), ("phone-book", 0.4), ("ascending-numbers", 0.6), ("hot-cold", 0.5),
    ("button-delay", 0.6), ("odd-or-even", 1 / 3), ("drag-shapes-2", 0.84)])
def test_a_part_of_the_answer_is_paid_and_is_no_success(env, session, page, raw):
    verdict, paid = answered(env, session, page, right=False)
    assert paid == pytest.approx(raw) and verdict.reward == 0 and verdict.rewards == {"raw>0": 1.0}


@pytest.mark.parametrize("page", ["form-sequence-2", "daily-calendar", "use-autocomplete", "draw-circle"])
def test_a_wrong_answer_that_the_page_pays_in_full_is_no_success(env, session, page):
    verdict, paid = answered(env, session, page, right=False)
    assert paid == 1 and verdict.reward == 0 and "no success" in verdict.reason
    verdict, paid = answered(env, session, page, right=True)
    assert paid == 1 and verdict.reward == 1 and "no success" not in verdict.reason


def test_no_number_is_no_even_number(env, session):
    seed = next(seed for seed in range(3_000_000, 3_000_020)
                if "even" in session.open(env.task("generate-number", seed)))
    verdict, raw = press_submit(env, session, "generate-number", seed)
    assert raw == 1 and verdict.reward == 0


def test_a_straight_stroke_far_away_is_no_circle(env, session):
    """All its points are equally far from the dot, which is all that the page looks at."""
    task = env.task("draw-circle", 3_000_000)
    session.open(task)
    x, y = bench.spot(session.page, "#circ")
    right, down = -1 if x > 80 else 1, -1 if y > 112 else 1
    bench.stroke(session.page, [(x + right * (42 + k), y + down * (42 - k)) for k in range(-12, 13, 2)])
    verdict = env.judge(task, session, "")
    assert verdict.reward == 0 and env.leave(session)["raw_reward"] == 1


def test_what_comes_after_the_end_does_not_repair_the_answer(env, session):
    """A step may hold further calls; the page is judged as it was when it ended the episode."""
    task = env.task("form-sequence-2", 3_000_000)
    verdict, _ = answered(env, session, "form-sequence-2", right=False)
    asked = int(session.page.evaluate("$('#query').text().match(/the (\\d)/)[1]"))
    session.page.locator("input[type=radio]").nth(asked - 1).click()
    assert verdict.reward == 0 and env.judge(task, session, "").reward == 0


def test_a_reward_that_is_no_number_is_no_success(env, session):
    """bisect-angle divides by the distance to the corner, so a click on it pays NaN."""
    task = env.task("bisect-angle", 3_000_000)
    session.open(task)
    corner = session.page.evaluate("""() => { const dot = d3.select('.init-blue');
        graphClicked({pageX: Number(dot.attr('cx')), pageY: Number(dot.attr('cy')) + 50});
        document.querySelector('#subbtn').click(); return WOB_RAW_REWARD_GLOBAL; }""")
    verdict = env.judge(task, session, "")
    assert math.isnan(corner) and verdict.reward == 0 and verdict.rewards == {"raw>0": 0.0}
    assert env.leave(session) == {"raw_reward": None}


# -------------------------------------------------------------------------------- pages that cannot be judged
def test_a_page_that_cannot_be_judged_is_refused_with_reason_and_remedy():
    with pytest.raises(UserError, match="'hover-shape' cannot be judged: it never ends .*--any_reward true"):
        make(RolloutConfig(env="miniwob", tasks="click-tab,hover-shape"))
    make(RolloutConfig(env="miniwob", tasks="click-tab,hover-shape", any_reward=True)).close()


# ----------------------------------------------------------------------------------------- what the files say
@pytest.fixture(scope="module")
def submit(env, session):
    """A model that presses use-colorwheel's Submit and touches nothing else."""
    session.open(env.task("use-colorwheel", 3_000_000))
    x, y = bench.spot(session.page, "#subbtn")
    return lambda requests: [Sample([1], r.png, (160, 210), [2], [0.0], f"click(x={x:.0f}, y={y:.0f})")
                             for r in requests]


@pytest.mark.parametrize("any_reward", [False, True])
def test_result_and_record_say_what_a_success_was(tmp_path, monkeypatch, capsys, submit, any_reward):
    monkeypatch.setattr(evaluate, "need", lambda cfg: None)
    monkeypatch.setattr(evaluate, "load_models", lambda cfg, texts: {"actor": submit})
    settings = dict(run_dir=str(tmp_path), use_plan=False, runs=1, threads=1, env="miniwob",
                    split="eval", tasks="use-colorwheel", instances=2, max_steps=2, coordinates="page")
    evaluate.main(evaluate.Config(**settings, any_reward=any_reward))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["success"] == float(any_reward) and result["config"]["any_reward"] is any_reward
    assert ("--any_reward" in result["profile"]) is any_reward and result["judge"] == ""
    assert result["profiles"]["raw>0"]["success"] == 1 and result["profiles"]["raw>0"]["n"] == 2
    assert "all, by raw>0            100.0 %" in capsys.readouterr().out
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert all(0 < e["details"]["raw_reward"] < 1 and e["rewards"] == {"raw>0": 1.0} for e in episodes)
    assert {e["status"] for e in episodes} == {"success" if any_reward else "failure"}
    assert [e["reward"] for e in read_episodes(tmp_path, "raw>0")] == [1.0, 1.0]
    with pytest.raises(UserError, match="any_reward"):
        evaluate.main(evaluate.Config(**settings, any_reward=not any_reward))


@pytest.mark.parametrize("config", [evaluate.Config, grpo_hier.Config])
def test_the_help_of_a_stage_explains_the_settings_that_it_inherits(config):
    comments = field_comments(config)
    assert comments["any_reward"].startswith("miniwob: ") and comments["threads"] == "browsers"
    assert comments["split"] != field_comments(RolloutConfig)["split"] or config is not evaluate.Config
    assert {f.name for f in dataclasses.fields(config)} == {name for name, text in comments.items() if text}


def test_the_bench_ends_in_one_line_that_counts():
    few = ["--seeds", "1", "--pages", "click-checkboxes,click-test,hover-shape,generate-number"]
    command = [sys.executable, ROOT / "bench/miniwob_rewards.py", *few]
    done = subprocess.run(command, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["pages"] == 4 and line["refused"] == ["hover-shape"] and line["right_success"] == 2
    assert not line["idle_success"] + line["submit_success_unearned"] + line["parts_success_unearned"]
