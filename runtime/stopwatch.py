"""Where the time of a rollout batch goes, in seconds by phase (means over the ranks).

`browser` (a browser works or waits for its page), `waiting` (for a model's answer) and `idle` (no episode to
run) are means over the browser threads and add up to the rollout; `generation` (a model writes; for servers:
some request is under way), `update` and `sync` (adapters to where they generate, waits for other ranks) are
the trainer's. """

import time
from collections import Counter
from pathlib import Path

from runtime.files import read_jsonl
from runtime.process import World, gather_objects

PHASES = ("browser", "waiting", "idle", "generation", "update", "sync")


class Stopwatch:
    """Seconds by phase, for one rollout batch."""

    def __init__(self):
        self.spent: Counter = Counter()
        self.begun = time.monotonic()

    def lap(self, phase: str) -> float:
        """What has passed since the last lap was for `phase`."""
        now = time.monotonic()
        self.spent[phase] += now - self.begun
        self.begun = now
        return self.spent[phase]


def timed_rollout(draw, clock, threads: int) -> tuple:
    """What `draw()` returns, and the phases of its time, by two looks at `clock()` (Pool.clock)."""
    start = time.monotonic()
    before = clock()
    drawn = draw()
    return drawn, rollout_phases(before, clock(), threads, time.monotonic() - start)


def rollout_phases(before: Counter, after: Counter, threads: int, seconds: float) -> dict:
    """The browsers' phases and the generation between two looks at Pool.clock, `seconds` apart."""
    d = {k: after[k] - before[k] for k in ("busy", "model", "generation", "batches")}
    return {"browser": (d["busy"] - d["model"]) / threads, "waiting": d["model"] / threads,
            "idle": max(0.0, seconds - d["busy"] / threads), "generation": d["generation"],
            "rollout": seconds, "batches": d["batches"]}


def times(phases: dict, seconds_sync: float, watch: Stopwatch, world: World) -> dict:
    """What is logged of a rollout batch: its wall clock and its phases, means over the ranks."""
    phases |= {"sync": seconds_sync + watch.spent["sync"], "update": watch.spent["update"],
               "seconds": sum(watch.spent.values())}
    every = gather_objects(phases, world)
    mean = {k: round(sum(rank[k] for rank in every) / world.size, 3) for k in phases}
    return {"seconds": mean["seconds"], "seconds_rollout": mean["rollout"], "seconds_update": mean["update"],
            "generations": mean["batches"], "phases": {k: mean[k] for k in PHASES}}


def phase_table(log: Path) -> str:
    """Seconds of a run by phase, and their share of the wall clock of its rollout batches."""
    lines = [line for line in read_jsonl(log) if "phases" in line]
    wall = sum(line["seconds"] for line in lines)
    rows = {phase: sum(line["phases"][phase] for line in lines) for phase in PHASES}
    return "\n".join([f"{'phase':12} {'seconds':>10} {'share':>6}",
                      *(f"{k:12} {v:10.1f} {v / max(wall, 1e-9):6.1%}" for k, v in rows.items()),
                      f"{'wall clock':12} {wall:10.1f}"])
