"""Does the 95 % interval of `analysis.py compare` hold the truth as often as it says?

    python bench/coverage.py        2,000 simulated experiments of the paper's size, about a minute on one CPU

Tasks are drawn from a population as unequal as a benchmark (many never solved, some always), each system
solves a task with its own probability, and the truth is the population's mean difference, by quadrature.
`interval_coverage` is the share of intervals that contain it, `rejected_null` the share of p < 0.05 where the
systems are alike. Prints one JSON line last; exit code 1 if the coverage is outside 93-97 %.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runtime
from records import results


@dataclass
class Config:
    experiments: int = 2000  # simulated comparisons
    tasks: int = 154  # task instances, sec. 4.1
    runs: int = 4  # evaluation runs of each system, sec. 4.3
    resamples: int = 2000  # bootstrap draws per interval
    difficulty: float = 2.5  # standard deviation of a task's log-odds: 2.5 makes the success rates bimodal
    change: float = 0.25  # mean difference of log-odds, B - A: about the 2-4 points of table 2
    uneven: float = 1.0  # standard deviation of that difference over tasks
    seed: int = 0  # of every random draw


def truth(cfg: Config, centre: float) -> float:
    """E[p_b - p_a] over the population of tasks, by Gauss-Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    log_odds = centre + cfg.difficulty * z
    p_b = expit(log_odds[:, None] + cfg.change + cfg.uneven * z[None]) @ w
    return float(w @ (p_b - expit(log_odds)))


def experiment(rng, cfg: Config, centre: float, change: float, uneven: float) -> dict:
    """One simulated evaluation of two systems, through the shipped comparison."""
    log_odds = centre + cfg.difficulty * rng.standard_normal(cfg.tasks)
    p = expit(log_odds), expit(log_odds + change + uneven * rng.standard_normal(cfg.tasks))
    wins = [rng.random((cfg.runs, cfg.tasks)) < p_system for p_system in p]
    a, b = ([{"task": t, "run": r, "reward": float(win[r, t])} for r, t in np.ndindex(win.shape)]
            for win in wins)
    return results.compare_systems(a, b, results.Resampling(cfg.resamples, 0.05, int(rng.integers(2 ** 31))))


def main(cfg: Config) -> None:
    rng, centre, started = np.random.default_rng(cfg.seed), -1.0, time.perf_counter()
    target = truth(cfg, centre)
    inside, width, gain, rejected = [], [], [], []
    for _ in range(cfg.experiments):
        r = experiment(rng, cfg, centre, cfg.change, cfg.uneven)
        low, high = r["gain_ci95"]
        inside.append(low <= target <= high)
        width.append(high - low)
        gain.append(r["gain"])
        rejected.append(experiment(rng, cfg, centre, 0.0, 0.0)["p"] < 0.05)
    coverage = float(np.mean(inside))
    result = {"true_gain": target, "mean_gain": np.mean(gain), "interval_coverage": coverage,
              "interval_width": np.mean(width), "rejected_null": np.mean(rejected),
              "seconds": time.perf_counter() - started}
    size = {"experiments": cfg.experiments, "tasks": cfg.tasks, "runs": cfg.runs}
    print(json.dumps({"bench": "coverage", **size, **{k: round(float(v), 4) for k, v in result.items()}}))
    sys.exit(0 if 0.93 <= coverage <= 0.97 else 1)


if __name__ == "__main__":
    runtime.launch(main)
