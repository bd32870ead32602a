"""Result files and the statistics on them: what evaluate.py reports and analysis.py shows (paper 4.3-4.6).

An episode is one line of episodes.jsonl (its fields: rollout.py). A task instance is (task, instance) and is the cluster of
every standard error and interval: runs of one instance are not independent. An episode with reward null has no verdict:
it is counted, and enters no mean.
"""

import difflib
import math
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

import runtime
from runtime import UserError


@dataclass(frozen=True)
class Resampling:
    """How intervals and p-values are drawn."""
    resamples: int = 10000
    alpha: float = 0.05     # 1 - confidence level
    seed: int = 0


# ----------------------------------------------------------------------------------------------------- reading
def key_of(e: dict) -> tuple:
    """What makes an episode the same one when it is run again."""
    return e.get("batch", 0), e["task"], e.get("instance", 0), e.get("run", 0), e.get("k", 0), e.get("m", 0)


def read_episodes(path, profile: str = "", by_batch: bool = False) -> list[dict]:
    """Episodes of a result directory (or of its episodes.jsonl), one per (task, instance, run, plan, rollout).

    A retried episode is in the file twice: a line with a reward replaces one without, otherwise the later one counts.
    `by_batch` keeps the visits of different rollout batches apart, as a training log needs it.
    """
    file = Path(path) / "episodes.jsonl" if Path(path).is_dir() else Path(path)
    if not str(path) or not file.is_file():
        raise UserError(f"{file}: no result file there; name a directory that evaluate.py or grpo_hier.py has written")
    latest: dict[tuple, dict] = {}
    for n, e in enumerate(runtime.read_jsonl(file), 1):
        if not isinstance(e, dict) or "task" not in e or "reward" not in e:
            raise UserError(f"{file}:{n}: not an episode (it has no task or no reward); give a file of episodes")
        if profile:
            e["reward"] = e.get("rewards", {}).get(profile)
        key = key_of(e)[0 if by_batch else 1:]
        if e["reward"] is not None or key not in latest or latest[key]["reward"] is None:
            latest[key] = e
    if not latest:
        raise UserError(f"{file}: holds no episode yet; let the stage that writes it finish first")
    return list(latest.values())


def scores_by_task(episodes: list[dict]) -> dict[tuple, list[float]]:
    """(task, instance) -> the rewards of its scored episodes; an instance without any is absent."""
    scores: dict[tuple, list[float]] = {}
    for e in episodes:
        if e["reward"] is not None:
            scores.setdefault((e["task"], e.get("instance", 0)), []).append(float(e["reward"]))
    return scores


def counts(episodes: list[dict]) -> dict[str, int]:
    """n (scored), n_infra (browser or site broke), n_unknown (no verdict for another reason), n_unparsable."""
    null = [e.get("status") == "infra" for e in episodes if e["reward"] is None]
    return {"n": len(episodes) - len(null), "n_infra": sum(null), "n_unknown": len(null) - sum(null),
            "n_unparsable": sum(e.get("status") == "unparsable" for e in episodes)}


# -------------------------------------------------------------------------------------------------- statistics
def interval(statistic, n: int, how: Resampling = Resampling()) -> list[float] | None:
    """Cluster-bootstrap interval; `statistic` maps draw counts (B, n) to values (B,). None for n < 2.

    Percentiles, moved outwards to Student's width and by the bootstrap's missing n / (n - 1) (Hesterberg 2015's expanded
    percentile interval; 0.9 % wider at n = 154), so that few tasks do not give too short an interval.
    """
    if n < 2:
        return None
    rng, values, chunk = np.random.default_rng(how.seed), [], max(1, 4_000_000 // n)
    for b in [chunk] * (how.resamples // chunk) + [how.resamples % chunk]:
        drawn = rng.integers(n, size=(b, n)) + n * np.arange(b)[:, None]
        values.append(statistic(np.bincount(drawn.ravel(), minlength=b * n).reshape(b, n)))
    tail = stats.norm.cdf(stats.t.ppf(how.alpha / 2, n - 1) * math.sqrt(n / (n - 1)))
    return [float(q) for q in np.nanquantile(np.concatenate(values), [tail, 1 - tail])]


def permutation_p(diffs: np.ndarray, how: Resampling = Resampling()) -> float:
    """Two-sided p of mean(diffs) when the systems are swapped at random within each task: exact up to 13 differences
    that are not zero, else by random swaps (with the observed one among them, so p is never 0)."""
    d = diffs[diffs != 0]
    observed = abs(d.sum()) - 1e-9
    if len(d) <= 13:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((abs(signs @ d) >= observed).mean())
    rng, rounds = np.random.default_rng(how.seed), -(-how.resamples // 500)
    hits = sum(int((abs(rng.choice([-1.0, 1.0], size=(500, len(d))) @ d) >= observed).sum()) for _ in range(rounds))
    return (hits + 1) / (rounds * 500 + 1)


def mean_and_se(values) -> tuple[float, float]:
    """Mean over tasks of their means, and its standard error with tasks as clusters: sd / sqrt(tasks)."""
    v = np.array([np.mean(x) for x in values])
    return (float(v.mean()) if len(v) else math.nan), (float(v.std(ddof=1) / len(v) ** 0.5) if len(v) > 1 else math.nan)


def needed(diffs: np.ndarray, a: list[list[float]], b: list[list[float]], how: Resampling = Resampling()) -> dict:
    """How large an experiment would resolve the difference seen (80 % power at `alpha`).

    var(mean difference) = (tau2 + (v_a + v_b) / runs) / tasks, with tau2 the variance over tasks of the true difference
    and v that of one episode within its task, which needs tasks with two runs. `runs_needed`: these tasks stand for more
    such tasks; None where no number of runs is enough. `runs_needed_same_tasks`: the question is about these tasks only
    (no tau2). `tasks_needed`: with the present number of runs.
    """
    out = {"runs_needed": None, "runs_needed_same_tasks": None, "tasks_needed": None}
    target = (diffs.mean() / (stats.norm.ppf(1 - how.alpha / 2) + stats.norm.ppf(0.8))) ** 2  # variance we can afford
    if len(diffs) < 2 or target == 0:
        return out
    out["tasks_needed"] = math.ceil(diffs.var(ddof=1) / target)
    within = [[np.var(r, ddof=1) for r in side if len(r) > 1] for side in (a, b)]
    if all(within):
        v_a, v_b = (float(np.mean(w)) for w in within)
        tau2 = max(0.0, diffs.var(ddof=1) - np.mean([v_a / len(x) + v_b / len(y) for x, y in zip(a, b)]))
        out["runs_needed_same_tasks"] = max(1, math.ceil((v_a + v_b) / (len(diffs) * target)))
        if len(diffs) * target > tau2:
            out["runs_needed"] = max(1, math.ceil((v_a + v_b) / (len(diffs) * target - tau2)))
    return out


def compare_systems(a: list[dict], b: list[dict], how: Resampling = Resampling()) -> dict:
    """Paired comparison over the task instances that both systems have a score for; gain = B - A."""
    all_a, all_b = scores_by_task(a), scores_by_task(b)
    both = [t for t in all_a if t in all_b]
    if not both:
        raise UserError("the two systems share no scored task instance; evaluate both on the same split and seeds")
    R_a, R_b = [all_a[t] for t in both], [all_b[t] for t in both]
    diffs = np.array([np.mean(y) - np.mean(x) for x, y in zip(R_a, R_b)])
    (success_a, se_a), (success_b, se_b), (gain, gain_se) = mean_and_se(R_a), mean_and_se(R_b), mean_and_se(diffs)
    return {"a_success": success_a, "b_success": success_b, "a_se": se_a, "b_se": se_b, "gain": gain, "gain_se": gain_se,
            "gain_ci95": interval(lambda w: w @ diffs / len(diffs), len(diffs), how), "alpha": how.alpha,
            "p": permutation_p(diffs, how), "better": int((diffs > 0).sum()), "worse": int((diffs < 0).sum()),
            "tasks": len(both), "unpaired": len(all_a.keys() ^ all_b.keys()), **needed(diffs, R_a, R_b, how),
            **{f"{side}_{k}": v for side, es in (("a", a), ("b", b)) for k, v in counts(es).items()}}


def auroc(successes: np.ndarray, failures: np.ndarray) -> np.ndarray:
    """Area under the ROC curve, P(score of a success > of a failure) + P(tie) / 2, from counts (..., S) per score value in
    rising order; not-a-number where one of the two is absent."""
    below = np.cumsum(failures, -1) - failures / 2
    with np.errstate(invalid="ignore"):
        return (successes * below).sum(-1) / (successes.sum(-1) * failures.sum(-1))


# ------------------------------------------------------------------------------------------------- the hierarchy
def hierarchy(episodes: list[dict]) -> dict:
    """The numbers of `diagnostics` for one run. Groups are a task's K plans in one batch, with M episodes each.

    best_plan_not_rewarded  how often the plan that is best by one half of the episodes has an advantage <= 0 by the other
    luck_share              share of the variance of S_i within groups that M Bernoulli rewards make by themselves
    S_first_half_vs_second  correlation of S_i from the first half of a plan's episodes with the second half's success
    S_vs_later_batch        rank correlation of a plan's S_i with its S_i when the task's same plan comes up again
    distinct_plans, plan_distance    different texts among K; mean Jaccard distance of their words
    same_plan, other_plan   similarity (0-1) of two action sequences under the same plan, under two plans of the task
    """
    groups: dict[tuple, dict[int, list[dict]]] = {}
    for e in sorted(episodes, key=key_of):
        if e["reward"] is not None:
            groups.setdefault(key_of(e)[:4], {}).setdefault(e["k"], []).append(e)
    plans = [list(g.values()) for g in groups.values() if len(g) > 1]
    if not plans:
        raise UserError("no task has episodes under two plans; diagnostics reads the episodes of grpo_hier.py with K > 1")
    S = [np.array([np.mean([e["reward"] for e in p]) for p in g]) for g in plans]
    luck = [np.mean([np.var([e["reward"] for e in p], ddof=1) / len(p) for p in g if len(p) > 1] or [np.nan]) for g in plans]
    texts = [[p[0]["plan"] for p in g] for g in plans]
    later: dict[tuple, list[float]] = {}
    for g, s in zip(plans, S):
        for p, s_i in zip(g, s):
            later.setdefault((p[0]["task"], p[0]["plan"]), []).append(float(s_i))
    pairs = [pair for visits in later.values() for pair in zip(visits, visits[1:])]
    third = -(-len(texts) // 3)
    advs = [(e.get("adv_D"), e.get("adv_A")) for g in plans for p in g for e in p]
    return {"groups": len(plans), "tasks": len({k[1:3] for k in groups}), "mean_S": float(np.mean([s.mean() for s in S])),
            "zero_adv_D": float(np.mean([np.ptp(s) == 0 for s in S])),
            "zero_adv_A": float(np.mean([len({e["reward"] for e in p}) == 1 for g in plans for p in g])),
            "logged_adv_D_std": spread([d for d, _ in advs]), "logged_adv_A_std": spread([a for _, a in advs]),
            **split_halves(plans), "S_std": float(np.mean([s.std(ddof=1) for s in S])),
            "luck_share": float(np.nanmean(luck) / max(1e-12, np.mean([s.var(ddof=1) for s in S]))),
            "S_vs_later_batch": float(stats.spearmanr(*zip(*pairs)).statistic) if len(pairs) > 2 else math.nan,
            "later_pairs": len(pairs), "malformed": float(np.mean([p[0]["malformed"] for g in plans for p in g])),
            **{f"{what}{when}": float(np.mean([f(t) for t in part])) for what, f in (
                ("distinct_plans", lambda t: len(set(t))), ("plan_distance", plan_distance))
               for when, part in (("", texts), ("_first_third", texts[:third]), ("_last_third", texts[-third:]))},
            **following(plans)}


def spread(values: list) -> float:
    known = [v for v in values if v is not None]
    return float(np.std(known)) if known else math.nan


def split_halves(plans: list[list[list[dict]]]) -> dict:
    """One half of each plan's episodes ranks the plans, the other one gives S_i and the advantage; both ways round."""
    wrong, centred = [], []
    for g in plans:
        halves = [[np.mean([e["reward"] for e in part]) for part in (p[:len(p) // 2], p[len(p) // 2:])] for p in g if len(p) > 1]
        if len(halves) < 2:
            continue
        h = np.array(halves)
        h -= h.mean(0)
        centred.append(h)
        for judge, credit in ((0, 1), (1, 0)):
            best = np.flatnonzero(h[:, judge] >= h[:, judge].max() - 1e-9)
            if len(best) == 1:
                wrong.append(h[best[0], credit] <= 1e-9)
    x, y = np.concatenate(centred).T if centred else (np.zeros(1), np.zeros(1))
    return {"best_plan_not_rewarded": float(np.mean(wrong)) if wrong else math.nan, "best_plan_cases": len(wrong),
            "S_first_half_vs_second": float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else math.nan}


def plan_distance(texts: list[str]) -> float:
    """Mean Jaccard distance of the words of two plans."""
    words = [set(re.findall(r"\w+", t.lower())) for t in texts]
    return float(np.mean([1 - len(a & b) / max(1, len(a | b)) for a, b in combinations(words, 2)]))


def following(plans: list[list[list[dict]]]) -> dict:
    """How much the plan decides what the actor does: action sequences compared within a plan and between plans."""
    same, other = [], []
    for g in plans:
        if len({p[0]["plan"] for p in g}) < 2:
            continue
        sequences = [(p[0]["plan"], [tuple(re.sub(r"\d+", lambda n: str(int(n[0]) // 20), c) for c in s["calls"])
                                     for s in e["steps"]]) for p in g for e in p]
        for (plan_a, a), (plan_b, b) in combinations(sequences, 2):
            (same if plan_a == plan_b else other).append(difflib.SequenceMatcher(None, a, b, autojunk=False).ratio())
    return {"same_plan": float(np.mean(same)) if same else math.nan, "other_plan": float(np.mean(other)) if other else math.nan}
