"""log.jsonl: what is counted of a rollout batch's groups, and the line that is made of it (docs/metrics.md).

A logged mean is counted as (sum, number), so that ranks can add theirs up.
"""

from collections import Counter
from pathlib import Path

from model.backbone import parameter_count
from model.inputs import Sample
from model.roles import Role
from records.episode import Group, all_episodes, all_samples
from runtime.errors import UserError
from runtime.files import latest_checkpoint

Shares = dict[str, tuple[float, float]]               # log key -> (sum, number)


def count(groups: list[Group], roles: list[Role]) -> tuple[Shares, Counter]:
    """What every system logs of this rank's groups: shares, and how often each fault cost an episode
    (`infra_KIND`) or an attempt at one (`retried_KIND`)."""
    episodes = all_episodes(groups)
    known = [e.reward for e in episodes if e.reward is not None]
    n = len(episodes)
    shares: Shares = {"reward_mean": (sum(known), len(known)), "infra_rate": (n - len(known), n),
              "unparsable_rate": (sum(e.status == "unparsable" for e in episodes), n),
              "steps_mean": (sum(len(e.steps) for e in episodes), n)}
    samples = all_samples(groups)
    for role in (role for role in roles if role.kind != "critic"):
        shares[f"len_{role.mark}"] = length_of([s for s in samples if s.role == role.name])
    return shares, fault_counts(episodes)


def length_of(samples: list[Sample]) -> tuple[int, int]:
    """Response tokens."""
    return sum(len(s.response_ids) for s in samples), len(samples)


def truncated(samples: list[Sample]) -> tuple[int, int]:
    """Responses cut at their limit (PAPER-GAP 17)."""
    return sum(s.truncated for s in samples), len(samples)


def share_of(there) -> tuple[int, int]:
    """Of a tensor of bools."""
    return int(there.sum()), there.numel()


def spread(S_BK, valid_BK) -> tuple[float, int]:
    """The standard deviation of S over a task's plans that have one."""
    each = [float(S[valid].std(correction=0)) for S, valid in zip(S_BK, valid_BK) if valid.any()]
    return sum(each), len(S_BK)


def fault_counts(episodes: list) -> Counter:
    lost = [f"infra_{e.fault}" for e in episodes if e.fault]
    return Counter(sorted(lost + [f"retried_{kind}" for e in episodes for kind in e.retried]))


def total(ranks: list[tuple[Shares, Counter]]) -> tuple[Shares, Counter]:
    """The sum over all ranks."""
    shares = {key: (sum(rank[0][key][0] for rank in ranks), sum(rank[0][key][1] for rank in ranks))
              for key in ranks[0][0]}
    return shares, sum((rank[1] for rank in ranks), Counter())


def batch_line(shares: Shares, faults: Counter, updates: dict[str, dict]) -> dict:
    """The logged object of a rollout batch; `updates`: a role's mark in log keys -> statistics of its
    update."""
    line: dict = {key: part / max(1, n) for key, (part, n) in shares.items()}
    line |= {"episodes": shares["infra_rate"][1], "faults": dict(faults)}
    for mark, told in updates.items():
        line |= {f"{key}_{mark}": value for key, value in told.items()}
    return line


def printed(line: dict) -> str:
    """The same in one line of text."""
    return " ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items())


def need_enough(infra: tuple, batch: int, run: Path, most: float) -> None:
    """UserError where more than the share `most` of a batch failed on infrastructure: nothing is learnt of
    it."""
    lost, episodes = infra
    if lost > most * episodes:
        raise UserError(f"batch {batch}: {lost} of {episodes} episodes failed for reasons of infrastructure "
                        f"(--max_infra {most}); see {run}/episodes.jsonl, then start again")


def foretold(cfg, roles: list[Role], rollouts: list[list]) -> str:
    """What a run of stage 3 would do, in words, and the most it can take."""
    n = sum(map(len, rollouts))
    trained = [role.name for role in roles if role.trained]
    lines = [f"{n} tasks of {cfg.env} {cfg.split} in {len(rollouts)} rollout batches; after each, "
             f"{cfg.passes} steps of {' and '.join(trained)}",
             f"{n} tasks x {cfg.plans} plans x {cfg.M} episodes = {n * cfg.plans * cfg.M:,} episodes of "
             f"at most {cfg.max_steps} actions of at most {max(r.max_tokens for r in roles)} tokens"]
    for role in (role for role in roles if role.checkpoint):
        size = parameter_count(role.checkpoint) / 1e6
        lines.append(f"{role.checkpoint}: {size:,.1f} M parameters, frozen, in {cfg.dtype}")
    newest = latest_checkpoint(Path(cfg.run_dir) / "checkpoints")
    return "\n".join([*lines, f"{cfg.run_dir}: {newest or 'new'}; hours: bench/simulate.py, and `seconds` in "
                              f"log.jsonl after the first rollout batch"])
