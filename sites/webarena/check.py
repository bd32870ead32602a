"""What is in a task file, and every problem of it, before an hour is spent on it.

    python -m sites.webarena check --tasks FILE --sites FILE [--patch FILE] [--live true]
"""

from collections import Counter
from dataclasses import dataclass

from runtime import UserError
from sites.webarena.replicas import SiteError, check_address, load_sites
from sites.webarena.score import needs_judge
from sites.webarena.tasks import (
    apply_patch,
    changes_state,
    read_tasks,
    sites_of,
    task_problems,
    to_placeholders,
)


@dataclass
class Config:
    tasks: str                      # task file
    sites: str = "sites.json"       # addresses, accounts, replicas and resets of the sites
    patch: str = ""                 # repairs of annotations, by task_id
    live: bool = False              # also ask every replica whether it answers at its address


def check(cfg: Config) -> None:
    """What a task file holds and every problem of it; UserError when there are some."""
    sites = load_sites(cfg.sites)
    raw = read_tasks(cfg.tasks)
    patched = apply_patch(raw, cfg.patch) if cfg.patch else 0
    tasks = [to_placeholders(t, sites) for t in raw]
    found = problems(tasks, sites)
    bad = {task_id for task_id, _ in found}
    readable = sum(t["task_id"] not in bad for t in tasks)
    print(f"{cfg.tasks}: {len(tasks)} tasks, {readable} readable, {patched} patched")
    print("\n".join(summary(tasks, sites)))
    if cfg.live:
        found += silent(sites)
    for name, problem in found:
        print(f"  PROBLEM {name}: {problem}")
    if found:
        raise UserError(f"{cfg.tasks}: {len(found)} problems, listed above")


def problems(tasks: list[dict], sites: dict) -> list[tuple]:
    """(task_id, what is wrong with it) of a file's tasks."""
    found = [(t["task_id"], p) for t in tasks for p in task_problems(t, sites)]
    ids = Counter(t["task_id"] for t in tasks)
    return found + [(i, f"the task_id is there {n} times") for i, n in ids.items() if n > 1]


def summary(tasks: list[dict], sites: dict) -> list[str]:
    """How many tasks need what, a line each."""
    said = [f"  need a judge   {sum(needs_judge(t['eval']) for t in tasks)}",
            f"  change state   {sum(map(changes_state, tasks))}"]
    for name, n in sorted(Counter(s for t in tasks for s in sites_of(t)).items()):
        there = sites.get(name)
        state = f"{len(there.replicas)} replica(s)" if there else "left out" if name in sites else "MISSING"
        hook = ", reset" if there and any(r.reset for r in there.replicas) else ""
        said.append(f"  need {name:15} {n:4}   {state}{hook}")
    for kind, n in sorted(Counter("+".join(t["eval"]["eval_types"]) for t in tasks).items()):
        said.append(f"  {kind:30} {n:4}")
    return said


def silent(sites: dict) -> list[tuple]:
    """(site, why) of each replica that does not answer at its address."""
    found = []
    for replica in [r for s in sites.values() if s for r in s.replicas]:
        try:
            check_address(replica)
        except SiteError as e:
            found.append((replica.site, str(e)))
    return found
