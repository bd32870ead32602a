"""Episodes against a hostile local site that throws every fault at random: what came of them, what is left.

    python bench/soak.py --episodes 500       # 5 minutes on two idle cores; the last line is one JSON object

Half of the episodes meet a harmless page, the others one of tests/scenarios.py each: dialogs,
popups, crashes, killed browsers, hangs, downloads, endless redirects, memory without end ...

    lost               episodes that never came back: after the longest time that one may take without any
                       other, the pool is closed
    hung               episodes that took longer than their deadlines allow
    misclassified      episodes whose status, fault, retries or history are not the scenario's; printed
    leftover_processes of ours, after the pool was closed, also those that have lost their parent
    rss_growth_mb      of this process, from a tenth of the episodes to the last, before the pool is closed
    faults             how often each kind cost an episode or an attempt
"""

import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from hostile import Hostile, act, left_behind, outcome, scripted
from scenarios import SCENARIOS

from records.training_log import fault_counts
from rollout import Pool
from runtime import launch
from web.environment import RolloutConfig


@dataclass
class Config:
    episodes: int = 500  # in all
    threads: int = 4  # browsers
    call_timeout: float = 4.0  # s, any single browser call
    only: str = ""  # scenarios, with commas; "" for all
    seed: int = 0  # of the order


def rss_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def while_they_come(pool: Pool, groups, seconds: float):
    """The groups, until the next one takes longer than that: then the pool is closed and the rest is lost."""
    while True:
        alarm = threading.Timer(seconds, pool.close)
        alarm.start()
        try:
            group = next(groups, None)
        except RuntimeError:
            if not pool.closing.is_set():
                raise
            group = None
        finally:
            alarm.cancel()
        if group is None:
            return
        yield group


def main(cfg: Config) -> None:
    names = cfg.only.split(",") if cfg.only else sorted(SCENARIOS)
    dice = random.Random(cfg.seed)
    todo = [name for i in range(cfg.episodes // 2) for name in ("ok", names[i % len(names)])]
    todo += ["ok"] * (cfg.episodes - len(todo))
    dice.shuffle(todo)
    site, deadline = Hostile(), 15 * cfg.call_timeout
    settings = RolloutConfig(
        threads=cfg.threads,
        retries=1,
        coordinates="page",
        max_steps=6,
        settle=1.0,
        call_timeout=cfg.call_timeout,
        retry_wait=0.0,
        memory=600.0,
        deadline=deadline,
        open_timeout=5 * cfg.call_timeout,
        recycle=50,
    )
    found, faults, wrong, hung, first = 0, Counter(), [], 0, 0.0
    longest = (1 + settings.retries) * (deadline + 15)  # s; an episode, or the first look at its task
    start = time.monotonic()
    with scripted(site, settings) as pool:
        tasks = [site.task(name, i) for i, name in enumerate(todo)]
        groups = pool.run(tasks, 1, 1, cfg.seed, {"actor": act}, bar="soak")
        for group in while_they_come(pool, groups, 2 * longest):
            (episode,) = group.episodes[0]
            found += 1
            faults.update(fault_counts([episode]))
            hung += episode.seconds > longest
            if complaint := outcome(episode):
                wrong.append(complaint)
                print(complaint, file=sys.stderr, flush=True)
            if found == max(1, cfg.episodes // 10):
                first = rss_mb()
        growth = rss_mb() - first
    site.close()
    print(
        json.dumps(
            {
                "episodes": cfg.episodes,
                "lost": cfg.episodes - found,
                "hung": hung,
                "misclassified": len(wrong),
                "leftover_processes": len(left_behind()),
                "rss_growth_mb": round(growth, 1),
                "minutes": round((time.monotonic() - start) / 60, 1),
                "faults": dict(sorted(faults.items())),
            }
        )
    )


if __name__ == "__main__":
    launch(main)
