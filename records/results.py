"""Result files and the statistics on them: what evaluate.py reports and analysis.py shows (paper 4.3-4.6).

An episode is one line of episodes.jsonl (fields: episode_log.py). A task instance is (task, instance); it is
the cluster of every standard error and interval, because the runs of one instance are not independent. An
episode with reward null has no verdict: it is counted, and enters no mean.
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
    alpha: float = 0.05  # 1 - confidence level
    seed: int = 0


# ---------------------------------------------------------------------------------------------------- reading
KEY = ("batch", "task", "instance", "run", "k", "m")  # which episode it is, also when it is run again


def key_of(e: dict) -> tuple:
    return tuple(e.get(name, 0) for name in KEY)


def read_episodes(path, profile: str = "", by_batch: bool = False) -> list[dict]:
    """Episodes of a result directory (or its episodes.jsonl), one per (task, instance, run, plan, rollout).

    A retried episode is in the file twice: a line with a reward replaces one without, else the later one
    counts. `by_batch` keeps the visits of different rollout batches apart, as a training log needs it.
    `profile` scores by `rewards[profile]`. UserError for a missing, empty or foreign file.
    """
    file = Path(path) / "episodes.jsonl" if Path(path).is_dir() else Path(path)
    if not str(path) or not file.is_file():
        raise UserError(f"{file}: no result file; name a directory that evaluate.py or grpo_hier.py wrote")
    latest: dict[tuple, dict] = {}
    for n, e in enumerate(runtime.read_jsonl(file), 1):
        if not isinstance(e, dict) or "task" not in e or "reward" not in e:
            raise UserError(f"{file}:{n}: not an episode (no task or no reward); give a file of episodes")
        if profile:
            e["reward"] = (e.get("rewards") or {}).get(profile)
        key = key_of(e)[0 if by_batch else 1:]
        if e["reward"] is not None or key not in latest or latest[key]["reward"] is None:
            latest[key] = e
    if not latest:
        raise UserError(f"{file}: holds no episode yet; let the stage that writes it finish first")
    return list(latest.values())


def directory_of(path: Path) -> Path:
    """The directory of a run that is named by itself or by one of its files."""
    return path if path.is_dir() else path.parent


def facts(path: Path) -> dict:
    """The run's config.json and result.json, as one object."""
    known: dict = {}
    for name in ("config.json", "result.json"):
        file = directory_of(path) / name
        if file.is_file():
            known |= runtime.read_json(file, "the directory of a run")
    return known


def scores_by_task(episodes: list[dict]) -> dict[tuple, list[float]]:
    """(task, instance) -> the rewards of its scored episodes; an instance without any is absent."""
    scores: dict[tuple, list[float]] = {}
    for e in episodes:
        if e["reward"] is not None:
            scores.setdefault((e["task"], e.get("instance", 0)), []).append(float(e["reward"]))
    return scores


def counts(episodes: list[dict]) -> dict[str, int]:
    """n (scored), n_infra (browser or site broke), n_unknown (it ended, no verdict came), n_unparsable."""
    unscored = [e for e in episodes if e["reward"] is None]
    infra = sum(e.get("status") == "infra" and e.get("fault") != "verdict" for e in unscored)
    return {"n": len(episodes) - len(unscored), "n_infra": infra, "n_unknown": len(unscored) - infra,
            "n_unparsable": sum(e.get("status") == "unparsable" for e in episodes)}


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Training log -> {key: (batches, values)}; a batch run again after a kill counts as last run."""
    file = path / "log.jsonl" if path.is_dir() else path
    lines = {line.get("batch", n): line for n, line in enumerate(runtime.read_jsonl(file))}
    if not lines:
        raise UserError(f"{file}: no training log there, or an empty one; run grpo_hier.py first")
    known = [(b, k, v) for b in sorted(lines) for k, v in lines[b].items() if type(v) in (int, float)]
    return {key: np.array([(b, v) for b, k, v in known if k == key], float).T
            for key in dict.fromkeys(k for _, k, _ in known)}


def rounded(x):
    """Any result as JSON shows it: four decimals (small numbers two digits), not-a-number as null."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(v) for v in x]
    if not isinstance(x, float):
        return x
    if not math.isfinite(x):
        return None
    return round(float(x), 4) if abs(x) >= 1e-3 else float(f"{x:.2g}")


# ------------------------------------------------------------------------------------------------- statistics
def interval(statistic, n: int, how: Resampling = Resampling()) -> list[float] | None:
    """Cluster-bootstrap interval; `statistic` maps draw counts (B, n) to values (B,). None for n < 2.

    Percentiles, moved outwards to Student's width and by the bootstrap's missing n / (n - 1) (Hesterberg
    2015's expanded percentile interval; 0.9 % wider at n = 154): few tasks must not make it too short.
    """
    if n < 2:
        return None
    rng = np.random.default_rng(how.seed)
    values = []
    chunk = max(1, 4_000_000 // n)
    for b in [chunk] * (how.resamples // chunk) + [how.resamples % chunk]:
        drawn = rng.integers(n, size=(b, n)) + n * np.arange(b)[:, None]
        values.append(statistic(np.bincount(drawn.ravel(), minlength=b * n).reshape(b, n)))
    tail = stats.norm.cdf(stats.t.ppf(how.alpha / 2, n - 1) * math.sqrt(n / (n - 1)))
    return [float(q) for q in np.nanquantile(np.concatenate(values), [tail, 1 - tail])]


def permutation_p(diffs: np.ndarray, how: Resampling = Resampling()) -> float:
    """Two-sided p of mean(diffs) when the systems are swapped at random within each task: exact up to 13
    differences that are not zero, else by random swaps (the observed one among them, so p is never 0)."""
    d = diffs[diffs != 0]
    observed = abs(d.sum()) - 1e-9
    if len(d) <= 13:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((abs(signs @ d) >= observed).mean())
    rng = np.random.default_rng(how.seed)
    rounds = -(-how.resamples // 500)
    swapped = [abs(rng.choice([-1.0, 1.0], size=(500, len(d))) @ d) for _ in range(rounds)]
    hits = sum(int((s >= observed).sum()) for s in swapped)
    return (hits + 1) / (rounds * 500 + 1)


def mean_and_se(values) -> tuple[float, float]:
    """Mean over tasks of their means, and its standard error with tasks as clusters: sd / sqrt(tasks)."""
    v = np.array([np.mean(x) for x in values])
    se = float(v.std(ddof=1) / math.sqrt(len(v))) if len(v) > 1 else math.nan
    return float(v.mean()) if len(v) else math.nan, se


def needed(diffs: np.ndarray, R_a: list[list[float]], R_b: list[list[float]], alpha: float = 0.05) -> dict:
    """How large an experiment would resolve the difference seen (80 % power at `alpha`).

    var(mean difference) = (tau2 + (v_a + v_b) / runs) / tasks, with tau2 the variance over tasks of the true
    difference and v that of one episode within its task, which takes tasks with two runs to know.
    `runs_needed`: these tasks stand for more such tasks; None where no number of runs is enough.
    `runs_needed_same_tasks`: the question is about these tasks only (no tau2).
    `tasks_needed`: with the present number of runs.
    """
    out = {"runs_needed": None, "runs_needed_same_tasks": None, "tasks_needed": None}
    n = len(diffs)
    z = stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(0.8)
    allowed = (diffs.mean() / z) ** 2  # the variance of the mean difference at which this gain is resolved
    if n < 2 or allowed == 0:
        return out
    out["tasks_needed"] = math.ceil(diffs.var(ddof=1) / allowed)
    within = [[np.var(r, ddof=1) for r in side if len(r) > 1] for side in (R_a, R_b)]
    if all(within):
        v_a, v_b = (float(np.mean(w)) for w in within)
        noise = np.mean([v_a / len(x) + v_b / len(y) for x, y in zip(R_a, R_b)])
        tau2 = max(0.0, diffs.var(ddof=1) - noise)
        out["runs_needed_same_tasks"] = max(1, math.ceil((v_a + v_b) / (n * allowed)))
        if n * allowed > tau2:
            out["runs_needed"] = max(1, math.ceil((v_a + v_b) / (n * allowed - tau2)))
    return out


def compare_systems(a: list[dict], b: list[dict], how: Resampling = Resampling()) -> dict:
    """Paired comparison over the task instances that both systems have a score for; gain = B - A."""
    all_a = scores_by_task(a)
    all_b = scores_by_task(b)
    both = [t for t in all_a if t in all_b]
    if not both:
        raise UserError("the two systems share no scored task instance; evaluate both on one split")
    R_a = [all_a[t] for t in both]
    R_b = [all_b[t] for t in both]
    diffs = np.array([np.mean(y) - np.mean(x) for x, y in zip(R_a, R_b)])
    (success_a, se_a), (success_b, se_b), (gain, gain_se) = map(mean_and_se, (R_a, R_b, diffs))
    return {"a_success": success_a, "b_success": success_b, "a_se": se_a, "b_se": se_b,
            "gain": gain, "gain_se": gain_se, "alpha": how.alpha,
            "gain_ci95": interval(lambda w: w @ diffs / len(diffs), len(diffs), how),
            "p": permutation_p(diffs, how), "better": int((diffs > 0).sum()), "worse": int((diffs < 0).sum()),
            "tasks": len(both), "unpaired": len(all_a.keys() ^ all_b.keys()),
            **needed(diffs, R_a, R_b, how.alpha),
            **{f"{side}_{k}": v for side, es in (("a", a), ("b", b)) for k, v in counts(es).items()}}


# --------------------------------------------------------------------------------------------------- subgoals
def auroc(successes: np.ndarray, failures: np.ndarray) -> np.ndarray:
    """Area under the ROC curve, P(score of a success > of a failure) + P(tie) / 2, from counts (..., S) per
    score value in rising order; not-a-number where one of the two is absent."""
    below = np.cumsum(failures, -1) - failures / 2
    with np.errstate(invalid="ignore"):
        return (successes * below).sum(-1) / (successes.sum(-1) * failures.sum(-1))


def subgoal_quality(episodes: list[dict], bins: int = 5, how: Resampling = Resampling()) -> dict:
    """AUROC of the completed share (`done`: one bool per subtask) against success, ROC points, success by
    share, Kendall's tau-b. Both outcomes must occur.

    tau-b is taken over episodes: only then do the paper's AUROC, success rate and tau fit together.
    """
    share = np.array([np.mean(e["done"]) for e in episodes])
    success = np.array([e["reward"] > 0 for e in episodes])
    values, level = np.unique(share, return_inverse=True)
    _, cluster = np.unique([f"{e['task']} {e.get('instance', 0)}" for e in episodes], return_inverse=True)
    P, N = np.zeros((2, cluster.max() + 1, len(values)))  # successes and failures per task and share
    for table, chosen in ((P, success), (N, ~success)):
        np.add.at(table, (cluster[chosen], level[chosen]), 1)
    true_rate, false_rate = (np.cumsum(t.sum(0)[::-1]) / t.sum() for t in (P, N))
    # in whole numbers, so that a share of 3/5 is never just below the edge 0.6
    bin_of = np.array([min(sum(e["done"]) * bins // len(e["done"]), bins - 1) for e in episodes])
    tau = stats.kendalltau(share, success)
    return {"n": len(episodes), "tasks": len(P), "success": float(success.mean()),
            "auroc": float(auroc(P.sum(0), N.sum(0))),
            "auroc_ci95": interval(lambda w: auroc(w @ P, w @ N), len(P), how),
            "tau_b": float(tau.statistic), "tau_p": float(tau.pvalue),
            "by_share": [{"from": b / bins, "n": int((bin_of == b).sum()),
                          "share": float(share[bin_of == b].mean()),
                          "success": float(success[bin_of == b].mean())} for b in np.unique(bin_of).tolist()],
            "roc": [(0.0, 0.0), *zip(false_rate.tolist(), true_rate.tolist())]}


# ---------------------------------------------------------------------------------------------- the hierarchy
def hierarchy(episodes: list[dict]) -> dict:
    """What the hierarchy does in a training run. A group is one task's K plans in one batch, M episodes each.

    best_plan_not_rewarded  how often the best plan would have A^D <= 0 if M rewards were drawn again
    best_half_not_rewarded  the same without a model: half of the episodes say which is best, the others pay
    luck_share              share of the variance of S_i within groups that chance alone makes with M episodes
    S_first_half_vs_second  correlation of S_i from a plan's first episodes with the success of its later ones
    S_vs_later_batch        rank correlation of S_i with that of the same plan and task in a later batch
    distinct_plans, plan_distance   share of different texts among K; mean Jaccard distance of their words;
                            _first and _last: in the first and last third of the groups
    same_plan, other_plan   similarity (0-1) of two action sequences under one plan, under two plans of a task
    """
    groups: dict[tuple, dict[int, list[dict]]] = {}
    for e in sorted(episodes, key=key_of):
        if e["reward"] is not None:
            groups.setdefault(key_of(e)[:4], {}).setdefault(e.get("k", 0), []).append(e)
    plans = [list(g.values()) for g in groups.values() if len(g) > 1]  # ragged: groups of plans of episodes
    if not plans:
        raise UserError("no task has episodes under two plans; give a run of grpo_hier.py with K > 1")
    S = [np.array([np.mean([e["reward"] for e in p]) for p in g]) for g in plans]
    luck = [np.var([e["reward"] for e in p], ddof=1) / len(p) for g in plans for p in g if len(p) > 1]
    luck_share = average(luck) / max(1e-12, average(s.var(ddof=1) for s in S))
    texts = [[p[0].get("plan", "") for p in g] for g in plans]
    third = -(-len(texts) // 3)
    flat = [e for g in plans for p in g for e in p]
    return {"groups": len(plans), "tasks": len({k[1:3] for k in groups}),
            "mean_S": average(s.mean() for s in S),
            "S_std": average(s.std() for s in S), "zero_adv_D": average(np.ptp(s) == 0 for s in S),
            "zero_adv_A": average(len({e["reward"] for e in p}) == 1 for g in plans for p in g),
            "adv_D_std": spread(e.get("adv_D") for e in flat),
            "adv_A_std": spread(e.get("adv_A") for e in flat),
            "luck_share": luck_share, "best_plan_not_rewarded": best_plan_not_rewarded(plans, S, luck_share),
            **split_halves(plans), **later_batches(plans, S),
            "malformed": average(p[0].get("malformed", False) for g in plans for p in g),
            **{f"{name}{when}": average(map(f, part))
               for name, f in (("distinct_plans", distinct), ("plan_distance", plan_distance))
               for when, part in (("", texts), ("_first", texts[:third]), ("_last", texts[-third:]))},
            **following(plans)}


def average(values) -> float:
    values = [float(v) for v in values]
    return float(np.mean(values)) if values else math.nan


def spread(values) -> float:
    known = [v for v in values if v is not None]
    return float(np.std(known)) if known else math.nan


def best_plan_not_rewarded(plans: list, S: list, luck_share: float) -> float:
    """How often luck hides a group's best plan, at this run's success rates. A plan's rate is its S_i drawn
    to its group's mean until they vary as little as S_i would without luck; a group of equal S_i has no best
    plan."""
    rng = np.random.default_rng(0)
    keep = math.sqrt(max(0.0, 1 - luck_share))
    missed = []
    for g, s in zip(plans, S):
        if np.ptp(s) > 0:
            M = np.array([len(x) for x in g])
            p = np.clip(s.mean() + keep * (s - s.mean()), 0, 1)
            drawn = rng.binomial(M, p, (200, len(M))) / M
            missed.append((drawn[:, s.argmax()] <= drawn.mean(1) + 1e-9).mean())
    return average(missed)


def split_halves(plans: list) -> dict:
    """Half of each plan's episodes rank the plans, the others give S_i and A^D; both ways round."""
    not_rewarded = []
    centred = []
    for g in plans:
        halves = [[average(e["reward"] for e in part) for part in (p[:len(p) // 2], p[len(p) // 2:])]
                  for p in g if len(p) > 1]
        if len(halves) < 2:
            continue
        h = np.array(halves) - np.mean(halves, 0)
        centred.append(h)
        for judge, credit in ((0, 1), (1, 0)):
            best = np.flatnonzero(h[:, judge] >= h[:, judge].max() - 1e-9)
            if len(best) == 1:
                not_rewarded.append(h[best[0], credit] <= 1e-9)
    x, y = np.concatenate(centred).T if centred else np.zeros((2, 1))
    known = x.std() > 0 and y.std() > 0
    return {"best_half_not_rewarded": average(not_rewarded), "best_half_cases": len(not_rewarded),
            "S_first_half_vs_second": float(np.corrcoef(x, y)[0, 1]) if known else math.nan}


def later_batches(plans: list, S: list) -> dict:
    """Whether a plan that did well for a task does well when that task's decomposer writes it again."""
    visits: dict[tuple, dict] = {}  # (task, plan) -> batch -> the S_i there
    for g, s in zip(plans, S):
        for p, s_i in zip(g, s):
            batches = visits.setdefault((p[0]["task"], p[0].get("plan", "")), {})
            batches.setdefault(p[0].get("batch", 0), []).append(float(s_i))
    means = [[average(s) for s in batches.values()] for batches in visits.values()]
    pairs = np.array([pair for v in means for pair in zip(v, v[1:])]).reshape(-1, 2)
    known = len(pairs) > 2 and np.ptp(pairs, axis=0).min() > 0
    return {"S_vs_later_batch": float(stats.spearmanr(*pairs.T).statistic) if known else math.nan,
            "later_pairs": len(pairs)}


def distinct(texts: list[str]) -> float:
    return len(set(texts)) / len(texts)


def plan_distance(texts: list[str]) -> float:
    """Mean Jaccard distance of the words of two plans."""
    words = [set(re.findall(r"\w+", t.lower())) for t in texts]
    return average(1 - len(a & b) / max(1, len(a | b)) for a, b in combinations(words, 2))


def following(plans: list) -> dict:
    """How much the plan decides what the actor does: action sequences compared within a plan and between
    plans of a task. Numbers are compared in steps of 20, so that two clicks on one button are one action."""
    same: list[float] = []
    other: list[float] = []
    for g in plans:
        if len({p[0].get("plan") for p in g}) < 2:
            continue
        sequences = [(e.get("plan"), [re.sub(r"\d+", lambda n: str(int(n[0]) // 20), " ".join(s["calls"]))
                                      for s in e["steps"]]) for p in g for e in p]
        for (plan_a, a), (plan_b, b) in combinations(sequences, 2):
            similarity = difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
            (same if plan_a == plan_b else other).append(similarity)
    return {"same_plan": average(same), "other_plan": average(other)}
