"""Statistics on fabricated result files, each against a computation that shares no code with ours."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from scipy import stats

from records import results
from records.results import Resampling
from runtime import UserError


def episode(task, reward, run=0, **more):
    status = "infra" if reward is None else "success" if reward else "failure"
    return {"batch": 0, "task": task, "site": "s", "instance": 0, "run": run, "k": 0, "m": 0,
            "status": status, "reward": reward} | more


def write(path, episodes):
    path.mkdir(exist_ok=True)
    (path / "episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    return path


def bernoulli(seed, tasks, runs, shift=0.0):
    """Episodes of `tasks` unequal tasks; one in twenty has no verdict."""
    rng = random.Random(seed)
    p = [min(1.0, rng.random() ** 2 + shift) for _ in range(tasks)]
    rng = random.Random(seed + 1000 * shift)
    return [episode(f"t{t}", None if rng.random() < 0.05 else float(rng.random() < p[t]), r)
            for t in range(tasks) for r in range(runs)]


# ---------------------------------------------------------------------------------------------------- reading
def test_retried_episodes_count_once_and_infra_never(tmp_path):
    lines = [episode("a", None), episode("a", 1.0), episode("a", None), episode("b", 0.0), episode("b", 1.0),
             episode("c", None), episode("c", None, status="failure"), episode("d", None),
             episode("e", None, fault="verdict")]
    es = results.read_episodes(write(tmp_path / "r", lines))
    rewards = {"a": 1.0, "b": 1.0, "c": None, "d": None, "e": None}
    assert {e["task"]: e["reward"] for e in es} == rewards and len(es) == len(rewards)
    assert results.counts(es) == {"n": 2, "n_infra": 1, "n_unknown": 2, "n_unparsable": 0}
    assert results.scores_by_task(es) == {("a", 0): [1.0], ("b", 0): [1.0]}


def test_training_logs_keep_the_visits_of_each_batch(tmp_path):
    path = write(tmp_path / "r", [episode("a", 1.0), episode("a", 0.0, batch=1)])
    assert len(results.read_episodes(path)) == 1 and len(results.read_episodes(path, by_batch=True)) == 2


def test_another_profiles_rewards_come_from_the_same_episodes(tmp_path):
    path = write(tmp_path / "r", [episode("a", 1.0, rewards={"vab": 0.0}), episode("b", 1.0)])
    assert [e["reward"] for e in results.read_episodes(path, "vab")] == [0.0, None]


@pytest.mark.parametrize("text, word", [("", "no episode yet"), ('{"task": "a"}\n', ":1: not an episode"),
                                        ('{"task": "a", "reward": 1}\n{"task"\n', ":2: not a JSON line")])
def test_broken_result_files_are_named(tmp_path, text, word):
    (tmp_path / "episodes.jsonl").write_text(text)
    with pytest.raises(UserError, match=word):
        results.read_episodes(tmp_path)


def test_a_missing_result_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere", ""):
        with pytest.raises(UserError, match="no result file"):
            results.read_episodes(path)


# ------------------------------------------------------------------------------------------------- statistics
def test_mean_and_se_weigh_tasks_and_not_episodes():
    values = [[1, 1, 1, 1], [0], [1, 0]]
    mean, se = results.mean_and_se(values)
    assert mean == pytest.approx(0.5)
    assert se == pytest.approx(stats.sem([1.0, 0.0, 0.5]))
    assert math.isnan(results.mean_and_se([])[0]) and math.isnan(results.mean_and_se([[1]])[1])


def test_interval_is_the_quantile_of_all_resamples():
    v = np.array([0.0, 0.25, 0.75, 1.0])
    every = [np.mean(s) for s in itertools.product(v, repeat=4)]
    alpha = 0.4
    tail = stats.norm.cdf(stats.t.ppf(alpha / 2, 3) * math.sqrt(4 / 3))
    low, high = results.interval(lambda w: w @ v / 4, 4, Resampling(40000, alpha))
    assert (low, high) == pytest.approx(tuple(np.quantile(every, [tail, 1 - tail])), abs=0.02)


def test_interval_agrees_with_scipys_bootstrap():
    v = np.random.default_rng(3).normal(0.03, 0.4, 60)
    tail = stats.norm.cdf(stats.t.ppf(0.025, 59) * math.sqrt(60 / 59))
    theirs = stats.bootstrap((v,), np.mean, confidence_level=1 - 2 * tail, method="percentile",
                             n_resamples=20000, rng=np.random.default_rng(4)).confidence_interval
    ours = results.interval(lambda w: w @ v / 60, 60, Resampling(20000))
    assert ours == pytest.approx(list(theirs), abs=0.004)
    assert 0.5 * (ours[1] - ours[0]) == pytest.approx(stats.t.ppf(0.975, 59) * stats.sem(v), rel=0.02)
    assert results.interval(lambda w: w @ v[:1], 1) is None


@pytest.mark.parametrize("n", [6, 13, 80])
def test_permutation_p_agrees_with_scipy(n):
    rng = np.random.default_rng(n)
    a, b = rng.integers(0, 5, n) / 4, rng.integers(0, 5, n) / 4 + (0.05 if n == 80 else 0.25)
    theirs = stats.permutation_test((b, a), lambda x, y, axis: np.mean(x - y, axis), vectorized=True,
                                    permutation_type="samples", n_resamples=20000, rng=rng).pvalue
    ours = results.permutation_p(b - a, Resampling(20000))
    assert ours == pytest.approx(theirs, abs=1e-9 if n <= 13 else 0.015)
    assert results.permutation_p(np.zeros(5)) == 1.0


def test_compare_pairs_by_task_instance():
    a = [episode("x", 1.0), episode("x", 0.0, 1), episode("y", 0.0), episode("z", 1.0), episode("w", None)]
    b = [episode("x", 1.0), episode("x", 1.0, 1), episode("y", 1.0), episode("y", 0.0, 1), episode("w", 1.0),
         episode("y", None, 2, status="failure"), episode("x", 0.0, instance=1)]
    r = results.compare_systems(a, b)
    assert r["tasks"] == 2 and r["unpaired"] == 3  # x, y; z only of A, w without A's verdict, x's instance 1
    assert (r["a_success"], r["b_success"], r["gain"]) == (0.25, 0.75, 0.5)
    assert (r["better"], r["worse"], r["a_n"], r["b_n"]) == (2, 0, 4, 6)
    assert (r["a_n_infra"], r["b_n_unknown"]) == (1, 1) and r["p"] == 0.5
    with pytest.raises(UserError, match="no scored task"):
        results.compare_systems([episode("x", 1.0)], [episode("y", 1.0)])


def test_compare_agrees_with_an_independent_paired_computation():
    a, b = bernoulli(1, 60, 4), bernoulli(1, 60, 4, 0.1)
    means = [{t: np.mean([e["reward"] for e in es if e["task"] == t and e["reward"] is not None])
              for t in {e["task"] for e in es}} for es in (a, b)]
    x, y = (np.array([m[t] for t in sorted(m)]) for m in means)
    r = results.compare_systems(a, b)
    assert r["gain"] == pytest.approx((y - x).mean()) and r["gain_se"] == pytest.approx(stats.sem(y - x))
    half = stats.t.ppf(0.975, 59) * stats.sem(y - x)  # what a t-interval says; the bootstrap must be near
    assert r["gain_ci95"] == pytest.approx([r["gain"] - half, r["gain"] + half], abs=0.012)
    back = results.compare_systems(b, a)
    assert back["gain"] == -r["gain"] and back["p"] == r["p"]
    assert back["gain_ci95"] == pytest.approx([-r["gain_ci95"][1], -r["gain_ci95"][0]], abs=0.012)


def test_needed_runs_reach_the_power_and_fewer_do_not():
    a, b = bernoulli(5, 400, 4), bernoulli(5, 400, 4, 0.05)
    R_a, R_b = (list(results.scores_by_task(es).values()) for es in (a, b))
    diffs = np.array([np.mean(y) - np.mean(x) for x, y in zip(R_a, R_b)])
    n = results.needed(diffs, R_a, R_b)
    v = np.mean([np.var(r, ddof=1) for r in R_a]) + np.mean([np.var(r, ddof=1) for r in R_b])
    runs = 400 / sum(2 / (len(x) + len(y)) for x, y in zip(R_a, R_b))  # just under 4: verdicts are missing
    tau2 = max(0, diffs.var(ddof=1) - v / runs)

    def power(runs, tau2):
        return stats.norm.cdf(abs(diffs.mean()) / math.sqrt((tau2 + v / runs) / 400) - stats.norm.ppf(0.975))
    R = n["runs_needed_same_tasks"]
    assert power(R, 0) >= 0.8 and (R == 1 or power(R - 1, 0) < 0.8)
    R = n["runs_needed"]
    assert power(R * 1.05, tau2) >= 0.79 and (R == 1 or power(R - 1, tau2) < 0.81)
    more = n["tasks_needed"]
    z = abs(diffs.mean()) / math.sqrt(diffs.var(ddof=1) / more)
    assert stats.norm.cdf(z - stats.norm.ppf(0.975)) == pytest.approx(0.8, abs=0.01)


def test_needed_runs_by_hand_where_tasks_differ():
    R_a, R_b = [[0, 1] * 6] * 8, [[1] * 12, [0, 1] * 6] * 4  # v_a = 3/11, v_b = 3/22, differences 1/2 and 0
    n = results.needed(np.array([0.5, 0] * 4), R_a, R_b)
    # variance of the differences 1/14 = tau2 + (9/22) / 12: tau2 = 0.0373; allowed: 0.007963 = (0.25 / 2.8)^2
    # 9/22 / (8 * 0.007963 - 0.0373) = 15.5; without tau2 6.4; 1/14 / 0.007963 = 8.97
    assert n == {"runs_needed": 16, "runs_needed_same_tasks": 7, "tasks_needed": 9}


def test_needed_says_when_runs_do_not_help():
    R_a = [[0, 0], [1, 1], [0, 0], [1, 1]] * 5  # the tasks differ, the runs hardly
    R_b = [[1, 1], [0, 0], [0, 0], [1, 0]] * 5
    diffs = np.array([np.mean(y) - np.mean(x) for x, y in zip(R_a, R_b)])
    n = results.needed(diffs, R_a, R_b)
    assert n["runs_needed"] is None and n["runs_needed_same_tasks"] >= 1 and n["tasks_needed"] > 20
    single = results.needed(diffs, [r[:1] for r in R_a], [r[:1] for r in R_b])
    assert single["runs_needed"] is single["runs_needed_same_tasks"] is None  # one run shows no noise


# --------------------------------------------------------------------------------------------------- subgoals
def judged(seed, tasks=30, runs=4):
    rng, out = random.Random(seed), []
    for t in range(tasks):
        ease = rng.random()
        for r in range(runs):
            done = [rng.random() < ease for _ in range(rng.randrange(1, 6))]
            won = rng.random() < 0.1 + 0.7 * sum(done) / len(done)
            out.append(episode(f"t{t}", float(won), r, done=done))
    return out


def test_auroc_counts_pairs_and_ties():
    es = judged(1)
    won, lost = ([sum(e["done"]) / len(e["done"]) for e in es if e["reward"] == w] for w in (1, 0))
    pairs = np.mean([1.0 if s > f else 0.5 if s == f else 0.0 for s in won for f in lost])
    q = results.subgoal_quality(es)
    assert q["auroc"] == pytest.approx(pairs)
    assert q["auroc"] == pytest.approx(stats.mannwhitneyu(won, lost).statistic / len(won) / len(lost))
    x, y = zip(*q["roc"])
    assert np.trapezoid(y, x) == pytest.approx(pairs) and (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)


def test_auroc_interval_resamples_whole_tasks():
    es, rng, values = judged(2), random.Random(0), []
    by_task = [[e for e in es if e["task"] == f"t{t}"] for t in range(30)]
    for _ in range(1500):
        drawn = [e for group in rng.choices(by_task, k=30) for e in group]
        won, lost = ([sum(e["done"]) / len(e["done"]) for e in drawn if e["reward"] == w] for w in (1, 0))
        values.append(stats.mannwhitneyu(won, lost).statistic / len(won) / len(lost))
    tail = stats.norm.cdf(stats.t.ppf(0.025, 29) * math.sqrt(30 / 29))
    q = results.subgoal_quality(es, how=Resampling(4000))
    assert q["auroc_ci95"] == pytest.approx(list(np.quantile(values, [tail, 1 - tail])), abs=0.02)


def test_tau_b_by_counting_pairs():
    es = judged(3)
    share, won = [sum(e["done"]) / len(e["done"]) for e in es], [e["reward"] for e in es]
    agree = ties_x = ties_y = 0
    for i, j in itertools.combinations(range(len(es)), 2):
        dx, dy = share[i] - share[j], won[i] - won[j]
        agree += np.sign(dx) * np.sign(dy)
        ties_x += dx == 0
        ties_y += dy == 0
    pairs = len(es) * (len(es) - 1) / 2
    tau = agree / math.sqrt((pairs - ties_x) * (pairs - ties_y))
    assert results.subgoal_quality(es)["tau_b"] == pytest.approx(tau)


def test_success_by_share_has_no_edge_errors():
    es = [episode(f"t{n}{d}", float(d == n), done=[i < d for i in range(n)])
          for n in range(1, 6) for d in range(n + 1)]
    bins = results.subgoal_quality(es, 5)["by_share"]
    for b, low in zip(bins, (0, 1, 2, 3, 4)):
        inside = [(n, d) for n in range(1, 6) for d in range(n + 1)
                  if low * n <= 5 * d and (5 * d < (low + 1) * n or low == 4)]  # low/5 <= d/n < (low + 1)/5
        assert b["n"] == len(inside) and b["success"] == pytest.approx(np.mean([n == d for n, d in inside]))
    assert sum(b["n"] for b in bins) == len(es)


# -------------------------------------------------------------------------------------------------- hierarchy
def group(batch, rewards, plans, actions=None):
    """One task's episodes: rewards[k][m] under plans[k]; actions[k][m] is the call of that episode."""
    return [episode("t", r, batch=batch, k=k, m=m, plan=plans[k], malformed=False,
                    steps=[{"calls": [actions[k][m] if actions else "wait()"]}])
            for k, row in enumerate(rewards) for m, r in enumerate(row)]


def test_hierarchy_by_hand():
    es = group(0, [[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], ["a b", "a c", "a b"]) \
        + group(1, [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, None, 1]], ["a b", "a c", "x y"])
    h = results.hierarchy(es)
    assert h["groups"] == 2 and h["zero_adv_D"] == 0.5 and h["zero_adv_A"] == pytest.approx(4 / 6)
    assert h["mean_S"] == pytest.approx((1 / 3 + 1) / 2)
    # first halves: 1, 0, 0; second halves: .5, .5, 0. Plan 0 is the first half's best and gets .5 - 1/3 > 0;
    # the second half's best is a tie, so there is one case and no failure
    assert (h["best_half_cases"], h["best_half_not_rewarded"]) == (1, 0.0)
    x, y = [2 / 3, -1 / 3, -1 / 3, 0, 0, 0], [1 / 6, 1 / 6, -1 / 3, 0, 0, 0]
    assert h["S_first_half_vs_second"] == pytest.approx(stats.pearsonr(x, y).statistic)
    within = np.mean([0.25 / 4, 0.25 / 4, 0, 0, 0, 0])  # sample variance / M of every plan
    between = np.mean([np.var([0.75, 0.25, 0], ddof=1), 0])
    assert h["luck_share"] == pytest.approx(within / between)
    assert h["distinct_plans"] == pytest.approx((2 / 3 + 1) / 2) and h["distinct_plans_last"] == 1
    # words: {a b} {a c} -> 1 - 1/3; {a b} {a b} -> 0; {a c} {a b} -> 2/3
    assert h["plan_distance_first"] == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert h["later_pairs"] == 2 and math.isnan(h["S_vs_later_batch"])  # two plans came again


def test_hierarchy_sees_an_actor_that_follows_its_plan_and_one_that_does_not():
    rewards = [[1, 0], [0, 1]]
    near, nearer, far = "click(x=50, y=5)", "click(x=51, y=7)", "click(x=90, y=5)"
    follows = results.hierarchy(group(0, rewards, ["a", "b"], [[near, nearer], [far, far]]))
    ignores = results.hierarchy(group(0, rewards, ["a", "b"], [[near, nearer], [nearer, near]]))
    assert (follows["same_plan"], follows["other_plan"]) == (1, 0)
    assert (ignores["same_plan"], ignores["other_plan"]) == (1, 1)


def test_hierarchy_finds_lessons_e24():
    """Three plans of success .14, .24, .34 and M = 7: the best one goes unrewarded in 30 % of groups."""
    rng, es = np.random.default_rng(0), []
    for batch in range(3000):
        rewards = [(rng.random(7) < p).astype(float).tolist() for p in (0.14, 0.24, 0.34)]
        es += group(batch, rewards, ["a", "b", "c"])
    h = results.hierarchy(es)
    luck = np.mean([p * (1 - p) / 7 for p in (0.14, 0.24, 0.34)])
    assert h["luck_share"] == pytest.approx(luck / (luck + np.var([0.14, 0.24, 0.34], ddof=1)), abs=0.05)
    assert 0.27 < h["best_plan_not_rewarded"] < 0.38
    assert 0.4 < h["best_half_not_rewarded"] < 0.6  # half the episodes know less


def test_hierarchy_without_plans_is_refused():
    with pytest.raises(UserError, match="K > 1"):
        results.hierarchy([episode("t", 1.0)])
