"""bench/simulate.py: its event loop against times that were worked out by hand, its fit on a made-up run."""

import dataclasses
import json
import random

import pytest

import grpo_hier
from bench.simulate import Config, Costs, drawn, lengths, main, ours, paper_design, rollout, validate

COSTS = Costs(page=lambda: 2.1, opening=lambda: 3.0, generate=lambda n: 1.0 + 0.5 * n, micro=0.38)


def play(steps, threads, max_batch, backlog=0):
    """One task without plans: its first look is 3 s of opening."""
    seconds, generation, left = rollout([steps], 0, threads, COSTS, max_batch, backlog)
    return seconds - 3, generation, left


def test_one_episode_is_its_parts_one_after_another():
    assert play([3], 1, 64) == pytest.approx((3 + 3 * (1.5 + 2.1), 3 * 1.5, 0))
    assert play([1, 1], 1, 64) == pytest.approx((2 * (3 + 1.5 + 2.1), 2 * 1.5, 0))


def test_episodes_wait_for_the_first_look_and_its_plans():
    look, step = 3 + 2.5, 1.5 + 2.1                                  # three plans in one batch, and no page
    assert rollout([[1, 2]], 3, 1, COSTS, 64) == pytest.approx((look + 2 * 3 + 3 * step, 2.5 + 3 * 1.5, 0))
    assert rollout([[1, 2]], 3, 2, COSTS, 64)[0] == pytest.approx(look + 3 + 2.0 + 2.1 + step)
    # one browser looks at the second task when the first one's episodes are over
    assert rollout([[1], [1]], 3, 1, COSTS, 64)[0] == pytest.approx(2 * (look + 3 + step))


def test_requests_that_wait_are_answered_together_and_others_wait_for_the_gpu():
    assert play([2, 2], 2, 64) == pytest.approx((3 + 2 * (2.0 + 2.1), 2 * 2.0, 0))
    # one at a time: answers end at 4.5 and 6.0, asked again at 6.6 and 8.1: no more waiting
    assert play([2, 2], 2, 1) == pytest.approx((6.0 + 2.1 + 1.5 + 2.1, 4 * 1.5, 0))


def test_an_update_runs_where_the_gpu_has_nothing_else_to_do():
    # 16 micro-batches until 6.08 (the request of 6 waits for the last), 6 while the page loads from 7.58 on
    assert play([1], 1, 64, backlog=30) == pytest.approx((3.08 + 1.5 + 2.1, 1.5, 30 - 16 - 6))
    assert play([1], 1, 64, backlog=3) == pytest.approx((3 + 1.5 + 2.1, 1.5, 0))


@pytest.mark.parametrize("mean", [3.0, 9.0, 14.0, 15.0])
def test_lengths_have_the_mean_that_was_asked_for(mean):
    drawn = lengths(20000, Config(steps=mean), random.Random(1))
    assert max(drawn) <= 15 and min(drawn) >= 1
    assert sum(drawn) / len(drawn) == pytest.approx(mean, abs=0.12)


def test_the_whole_run_is_bounded_by_what_must_be_done():
    cfg = Config(tasks=64)
    mine, ahead, paper = ours(cfg), ours(Config(tasks=64, pipeline=1)), paper_design(cfg, True)
    assert paper_design(cfg, False)["gpu_hours"] > paper["gpu_hours"] > 3 * mine["gpu_hours"]
    for result in (mine, ahead):
        assert sum(result["shares"].values()) == pytest.approx(1, abs=0.01)
        assert min(result["shares"].values()) >= 0
    assert ahead["wall_hours"] <= mine["wall_hours"]
    slow = ours(Config(tasks=64, page_s=30.0))
    assert slow["shares"]["no work"] > 3 * mine["shares"]["no work"]
    assert slow["wall_hours"] > 2 * mine["wall_hours"]


def test_a_run_that_follows_the_model_is_foretold(tmp_path):
    """A log made of the model's own times: costs are found in one half of it, the other half is foretold."""
    dice = random.Random(0)
    truth = Costs(lambda: drawn(0.2, 0.5, dice), lambda: drawn(0.5, 0.5, dice),
                  lambda n: 0.05 + 0.01 * n, 0.0)
    cfg = {"threads": 3, "K": 2, "M": 3, "use_plan": True, "max_batch": 64}
    log, episodes = [], []
    for batch in range(12):
        tasks = dice.randint(1, 4)
        steps = [[dice.randint(1, 5) for _ in range(6)] for _ in range(tasks)]
        n = sum(map(sum, steps))
        batches = []
        counting = Costs(truth.page, truth.opening, lambda n: batches.append(n) or truth.generate(n), 0.0)
        seconds, generation, _ = rollout(steps, 2, 3, counting, 64)
        trained = dice.randint(0, 30)
        browser = (0.5 * 7 * tasks + 0.2 * n) / 3
        log.append({"batch": batch, "episodes": 6 * tasks, "generations": len(batches), "trained_A": trained,
                    "seconds_rollout": seconds, "seconds": seconds + 1.0 + 0.1 * trained,
                    "phases": {"browser": browser, "generation": generation}})
        episodes += [{"batch": batch, "task": f"task{i}", "steps": [0] * length}
                     for i, task in enumerate(steps) for length in task]
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    assert validate(tmp_path, 0.5)["error"] < 0.05


def test_the_settings_that_the_numbers_belong_to_are_printed_and_exist(capsys):
    main(Config(paper=True, tasks=16))
    assumed = json.loads(capsys.readouterr().out.splitlines()[-1])["assumed"]
    flags = [line.partition(":")[0].split()[1:] for line in assumed if line.startswith("grpo_hier.py --")]
    assert ["--threads", "42"] in flags and ["--tasks_per_rank", "2"] in flags
    assert {name[2:] for name, _ in flags} <= {f.name for f in dataclasses.fields(grpo_hier.Config)}
