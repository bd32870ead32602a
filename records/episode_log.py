"""What is written down about episodes: episodes.jsonl and shots/ of a run directory.

One line per episode: batch, task, site, instance (seed of the task), run, k, m, seed, instruction, plan,
subtasks [[title, goal]], malformed, status (success | failure | max_steps | unparsable | infra), reward (null
for infra), rewards (by other rules), reason, answer, seconds, fault (its kind, web/chromium.py; "verdict":
there was none), retried (kinds of earlier attempts), error (traceback), details (the environment's own), S_i,
adv_A, adv_D (stage 3 only), first_shot, final_shot, steps [{shot, text (raw output), history (line), calls,
point (page pixels), error, n_tokens}]. Texts that an environment calls secret are masked.
"""

import hashlib
from collections import Counter
from pathlib import Path

from language import actions
from rollout import Episode, Group
from runtime import append_jsonl, write_atomic
from web.session import redact


def fault_counts(episodes: list[Episode]) -> Counter:
    """How often each kind of fault cost an episode (`infra_KIND`) or an attempt at one (`retried_KIND`)."""
    lost = [f"infra_{e.fault}" for e in episodes if e.fault]
    return Counter(sorted(lost + [f"retried_{kind}" for e in episodes for kind in e.retried]))


class EpisodeLog:
    """episodes.jsonl and its screenshots, one directory. Equal screenshots are stored once."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        (self.directory / "shots").mkdir(parents=True, exist_ok=True)

    def append(self, groups: list[Group], batch: int = 0, credit=None) -> None:
        """Write the groups' episodes; `credit(group index, k, m)` adds S_i, adv_A and adv_D."""
        append_jsonl(self.directory / "episodes.jsonl", [
            self.line(e, batch) | (credit(g, e.plan.k, e.m) if credit else {})
            for g, group in enumerate(groups) for row in group.episodes for e in row])

    def line(self, e: Episode, batch: int) -> dict:
        task = e.group.task
        steps = [{"shot": self.shot(s.png), "text": s.sample.text, "history": s.line, "error": s.error,
                  "calls": [actions.format_call(c) for c in s.calls], "n_tokens": len(s.sample.response_ids),
                  "point": next(([c["x"], c["y"]] for c in s.calls if c.args.get("x") is not None), None)}
                 for s in e.steps]
        return redact({
            "batch": batch, "task": task.id, "site": task.site, "instance": task.seed, "run": e.group.run,
            "k": e.plan.k, "m": e.m, "seed": e.seed, "instruction": e.group.instruction, "plan": e.plan.text,
            "subtasks": [[g.title, g.goal] for g in e.plan.subtasks], "malformed": e.plan.malformed,
            "status": e.status, "reward": e.reward, "rewards": e.rewards, "reason": e.reason,
            "answer": e.answer, "seconds": round(e.seconds, 3), "fault": e.fault, "retried": e.retried,
            "error": e.error, "details": e.details, "first_shot": steps[0]["shot"] if steps else None,
            "final_shot": self.shot(e.final_png), "steps": steps}, e.secrets)

    def shot(self, png: bytes | None) -> str | None:
        """Store a screenshot under its hash; the name relative to the directory."""
        if not png:
            return None
        name = f"shots/{hashlib.sha256(png).hexdigest()[:20]}.png"
        if not (self.directory / name).exists():
            write_atomic(self.directory / name, png)
        return name
