"""What stage 3 writes down beside its episodes: statistics of a rollout batch, phases of time, checkpoints.

Phases, in seconds of one rollout batch (means over the ranks): `browser` (a browser works or waits for its
page), `waiting` (for a model's answer) and `idle` (no episode to run) are means over the browser threads and
add up to the rollout; `generation` (a model writes; for servers: some request is under way), `update` and
`sync` (adapters to where they generate, waits for other ranks) are the trainer's.
"""

import pickle
import time
from collections import Counter
from pathlib import Path

import torch

from episode_log import fault_counts
from rollout import Group
from runtime import (UserError, World, atomic_directory, drop_old_checkpoints, gather_objects,
                     latest_checkpoint, read_jsonl)

PHASES = ("browser", "waiting", "idle", "generation", "update", "sync")


def statistics(groups: list[Group], R_BKM, valid_BKM, S_BK, adv_A_BKM, adv_D_BK) -> dict:
    """Sums over this rank's groups, from which `log_line` makes the logged means."""
    episodes = [e for g in groups for row in g.episodes for e in row]
    plans = [p for g in groups for p in g.plans if p.sample is not None]
    actions = [s.sample for e in episodes for s in e.steps]
    lengths = lambda samples: sum(len(s.response_ids) for s in samples)
    return {"episodes": len(episodes), "valid": int(valid_BKM.sum()), "reward": float(R_BKM.nansum()),
            "steps": len(actions), "tokens_A": lengths(actions), "plans": len(plans), "tasks": len(groups),
            "tokens_D": lengths([p.sample for p in plans]), "malformed": sum(p.malformed for p in plans),
            "cut": sum(s.truncated for s in actions),
            "S_std": sum(float(S[there].std(correction=0)) for S, there in zip(S_BK, valid_BKM.any(-1))
                         if there.any()),       # over the plans that have a return
            "zero_A": int((adv_A_BKM == 0).all(-1).sum()),
            "groups_A": adv_A_BKM.shape[0] * adv_A_BKM.shape[1],
            "zero_D": int((adv_D_BK == 0).all(-1).sum()),
            "unparsable": sum(e.status == "unparsable" for e in episodes), "faults": fault_counts(episodes)}


def total(rows: list[dict]) -> dict:
    """Key by key, the sum over all ranks."""
    return {k: sum((row[k] for row in rows[1:]), rows[0][k]) for k in rows[0]}


# ------------------------------------------------------------------------------------------------- the phases
class Stopwatch:
    """Seconds by phase, for one rollout batch."""

    def __init__(self):
        self.spent, self.begun = Counter(), time.monotonic()

    def lap(self, phase: str) -> float:
        """What has passed since the last lap was for `phase`."""
        now = time.monotonic()
        self.spent[phase] += now - self.begun
        self.begun = now
        return self.spent[phase]


def rollout_phases(before: Counter, after: Counter, threads: int, seconds: float) -> dict:
    """The browsers' phases and the generation between two looks at Pool.clock, `seconds` apart."""
    d = {k: after[k] - before[k] for k in ("busy", "model", "generation", "batches")}
    return {"browser": (d["busy"] - d["model"]) / threads, "waiting": d["model"] / threads,
            "idle": max(0.0, seconds - d["busy"] / threads), "generation": d["generation"],
            "rollout": seconds, "batches": d["batches"]}


def times(phases: dict, told: dict, watch: Stopwatch, world) -> dict:
    """Wall clock of a rollout batch and its phases, means over the ranks."""
    phases |= {"sync": told.pop("seconds_sync") + watch.spent["sync"], "update": watch.spent["update"],
               "seconds": sum(watch.spent.values())}
    mean = {k: round(v / world.size, 3) for k, v in total(gather_objects(phases, world)).items()}
    return {"seconds": mean["seconds"], "seconds_rollout": mean["rollout"],
            "seconds_update": mean["update"], "generations": mean["batches"],
            "phases": {k: mean[k] for k in PHASES}}


def phase_table(log: Path) -> str:
    """Seconds of a run by phase, and their share of the wall clock of its rollout batches."""
    lines = [line for line in read_jsonl(log) if "phases" in line]
    wall = sum(line["seconds"] for line in lines)
    rows = {phase: sum(line["phases"][phase] for line in lines) for phase in PHASES}
    return "\n".join([f"{'phase':12} {'seconds':>10} {'share':>6}",
                      *(f"{k:12} {v:10.1f} {v / max(wall, 1e-9):6.1%}" for k, v in rows.items()),
                      f"{'wall clock':12} {wall:10.1f}"])


# ------------------------------------------------------------------------------------------------ checkpoints
def save_checkpoint(directory: Path, done: int, policies: dict, optimizers: dict, keep: int) -> None:
    """Everything a resumed run needs after `done` rollout batches, in directory/NNNNNN,
    complete or not there at all."""
    with atomic_directory(directory / f"{done:06d}") as tmp:
        for role, policy in policies.items():
            policy.save(tmp / role)
            if role in optimizers:
                torch.save(optimizers[role].state_dict(), tmp / role / "optimizer.pt")
        torch.save(torch.get_rng_state(), tmp / "rng.pt")
    drop_old_checkpoints(directory, keep)


def load_checkpoint(directory: Path, policies: dict, optimizers: dict, world: World = World()) -> int:
    """Restore the newest checkpoint, if there is one; returns the number of finished rollout batches.
    UserError where ranks see different ones: rank 0 alone saves them."""
    newest = latest_checkpoint(directory)
    seen = gather_objects(newest and newest.name, world)
    if differ := [rank for rank, name in enumerate(seen) if name != seen[0]]:
        raise UserError(f"--run_dir {directory.parent} must be a directory that all nodes share: the newest "
                        f"checkpoint is {seen[0]} for rank 0, {seen[differ[0]]} for rank {differ[0]}")
    if newest is None:
        return 0
    for role, policy in policies.items():
        policy.load(newest / role)
    try:
        for role, optimizer in optimizers.items():
            optimizer.load_state_dict(torch.load(newest / role / "optimizer.pt", weights_only=True))
        torch.set_rng_state(torch.load(newest / "rng.pt", weights_only=True))
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as e:
        raise UserError(f"{newest} cannot be gone on from ({str(e)[:200]}): remove it, then the run goes on "
                        f"from the checkpoint before, if there is one") from e
    return int(newest.name)
