"""What is written down about episodes: episodes.jsonl and shots/ of a run directory.

One line per episode: batch, task, site, instance (seed of the task), run, k, m, seed, instruction, plan,
subtasks [[title, goal]], malformed, status (success | failure | max_steps | unparsable | infra), reward (null
for infra), rewards (by other rules), reason, answer, seconds, fault (its kind, web/chromium.py; "verdict":
there was none), retried (kinds of earlier attempts), error (traceback), details (the environment's own),
first_shot, final_shot, steps [{shot, text (raw output), history (line), calls, point (page pixels), error,
n_tokens; where several answers were asked: asked [{role, text, n_tokens, acted}]}]; in training what the
system's credit adds (grpo_hier.py: S_i, adv_A, adv_D). Texts that an environment calls secret are masked. """

import hashlib
from pathlib import Path

from language import actions
from records.episode import Episode, Group, Step, all_episodes
from runtime import append_jsonl, write_atomic
from web.session import redact


class EpisodeLog:
    """episodes.jsonl and its screenshots, one directory. Equal screenshots are stored once."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        (self.directory / "shots").mkdir(parents=True, exist_ok=True)

    def append(self, groups: list[Group], batch: int = 0, beside: list[dict] | None = None) -> None:
        """Write the groups' episodes; `beside` has what else stands in the line of each (a system's
        credit)."""
        episodes = all_episodes(groups)
        beside = beside or [{}] * len(episodes)
        lines = [self.line(e, batch) | more for e, more in zip(episodes, beside, strict=True)]
        append_jsonl(self.directory / "episodes.jsonl", lines)

    def line(self, e: Episode, batch: int) -> dict:
        task = e.group.task
        steps = [self.step(s) for s in e.steps]
        return redact({
            "batch": batch, "task": task.id, "site": task.site, "instance": task.seed, "run": e.group.run,
            "k": e.plan.k, "m": e.m, "seed": e.seed, "instruction": e.group.instruction, "plan": e.plan.text,
            "subtasks": [[g.title, g.goal] for g in e.plan.subtasks], "malformed": e.plan.malformed,
            "status": e.status, "reward": e.reward, "rewards": e.rewards, "reason": e.reason,
            "answer": e.answer, "seconds": round(e.seconds, 3), "fault": e.fault, "retried": e.retried,
            "error": e.error, "details": e.details, "first_shot": steps[0]["shot"] if steps else None,
            "final_shot": self.shot(e.final_png), "steps": steps}, e.secrets)

    def step(self, s: Step) -> dict:
        point = next(([c["x"], c["y"]] for c in s.calls if c.args.get("x") is not None), None)
        line = {"shot": self.shot(s.png), "text": s.sample.text, "history": s.line, "error": s.error,
                "calls": [actions.format_call(c) for c in s.calls], "n_tokens": len(s.sample.response_ids),
                "point": point}
        if len(s.samples) > 1:
            line["asked"] = [{"role": one.role, "text": one.text, "n_tokens": len(one.response_ids),
                              "acted": one is s.sample} for one in s.samples]
        return line

    def shot(self, png: bytes | None) -> str | None:
        """Store a screenshot under its hash; the name relative to the directory."""
        if not png:
            return None
        name = f"shots/{hashlib.sha256(png).hexdigest()[:20]}.png"
        if not (self.directory / name).exists():
            write_atomic(self.directory / name, png)
        return name
