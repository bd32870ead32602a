"""One role's optimizer steps on a rollout batch, whatever its objective is.

`update` runs the rows through the network in micro-batches, hands each to the system's `loss`, and makes one
optimizer step per pass. Ranks may hold different numbers of rows, also none: `loss` divides by constants of
the whole batch, so the shares of all micro-batches and ranks add up to the objective.

PAPER-GAP 4: log π_old is pass 1's own log-prob, as the weights have not moved yet. PAPER-GAP 5: a pass covers
the whole batch and ends in one step; the micro-batches are a matter of memory. """

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from model.inputs import Sample
from model.roles import Role
from runtime import World, all_reduce_flat_, gather_objects

# N samples, T tokens of a padded response


@dataclass
class Row:
    """What a role learns from one response: the sample, its advantage (one number, or one per token), and T,
    the number of actions of its episode (1 for a plan). `places` and `target`, for a critic: head ->
    positions where it is read, and head -> what it should have said there."""
    sample: Sample
    adv: float | list[float] = 0.0
    T: int = 1
    places: dict = field(default_factory=dict)
    target: dict = field(default_factory=dict)


@dataclass
class Credit:
    """What this rank's groups of a rollout batch teach, and what to log of it."""
    rows: dict[str, list[Row]]                       # role -> what it learns from
    shares: dict[str, tuple]                         # log key -> (sum, number); the mean is logged
    of_episode: list[dict]                           # what the episode log says beside each episode


@dataclass
class Micro:
    """A micro-batch as an objective sees it. A policy's tensors are (N, T), right-padded with 0 where mask_NT
    is 0; a critic has `values` only, head -> tensor for each row."""
    rows: list[Row]
    logp_NT: Any = None                              # with gradient
    logp_old_NT: Any = None                          # before the update (PAPER-GAP 4)
    logp_ref_NT: Any = None                          # of the base without adapter; only where β > 0
    logp_sampler_NT: Any = None                      # what the sampler said
    mask_NT: Any = None
    adv_NT: Any = None
    values: list = field(default_factory=list)       # with gradient
    values_old: list = field(default_factory=list)   # before the update

    @property
    def T_N(self) -> torch.Tensor:
        """T of each row."""
        return torch.tensor([row.T for row in self.rows], dtype=torch.float32, device=self.mask_NT.device)

    def furthest(self) -> float:
        """The largest |log r| of its tokens."""
        moved_NT = (self.logp_NT - self.logp_old_NT).detach().abs() * self.mask_NT
        return max([0.0, *moved_NT.flatten().tolist()])


def pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged per-token tensors -> (N, T) right-padded with 0, and the mask of real tokens."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r.detach()) for r in rows], batch_first=True)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask


def clip_acts(r_NT, adv_NT, eps):
    """Where ℓ's clip takes the gradient away: r > 1+ε with A > 0, r < 1-ε with A < 0."""
    return torch.where(adv_NT > 0, r_NT > 1 + eps, r_NT < 1 - eps)


def importance(logp_old_NT, logp_sampler_NT, cap):
    """min(π_old(u) / π_sampler(u), cap): what a sampler with other numerics drew, weighted as if by π_old."""
    assert logp_old_NT.shape == logp_sampler_NT.shape
    return (logp_old_NT - logp_sampler_NT).exp().clamp(max=cap)


def micro_batches(rows: list[Row], cfg) -> list[list[int]]:
    """Numbers of the rows, in parts of at most micro_batch samples and micro_tokens tokens; sorted by prompts
    and their length, so that equal ones share a pass and little is padded."""
    lengths = [len(row.sample.prompt_ids) + len(row.sample.response_ids) for row in rows]
    prompts = [row.sample.prompt_ids for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (len(prompts[i]), prompts[i], lengths[i]))
    parts: list[list[int]] = [[]]
    for i in order:
        n = len(parts[-1]) + 1
        longest = max(lengths[j] for j in [*parts[-1], i])
        if n > cfg.micro_batch or n > 1 and 0 < cfg.micro_tokens < n * longest:
            parts.append([])
        parts[-1].append(i)
    return [part for part in parts if part]


class Logps:
    """A policy's micro-batches, pass after pass: what its log-probs were before the first step is kept."""

    def __init__(self, policy, rows: list[Row], T: float, cfg):
        self.policy = policy
        self.rows = rows
        self.T = T
        self.cfg = cfg
        self.old: dict[int, torch.Tensor] = {}
        self.reference: dict[int, torch.Tensor] = {}
        self.sampler = [torch.tensor(row.sample.logp, device=policy.device) for row in rows]
        self.mismatch = 0.0                           # Σ |log π_sampler - log π| of the first pass

    def micro(self, part: list[int], first: bool) -> Micro:
        samples = [self.rows[i].sample for i in part]
        logp = self.policy.logp(samples, self.T)
        if first:
            self.remember(part, samples, logp)
        logp_NT, mask_NT = pad(logp)
        m = Micro([self.rows[i] for i in part], logp_NT, mask_NT=mask_NT)
        m.logp_old_NT = pad([self.old[i] for i in part])[0]
        m.logp_sampler_NT = pad([self.sampler[i] for i in part])[0]
        if self.reference:
            m.logp_ref_NT = pad([self.reference[i] for i in part])[0]
        adv = [torch.tensor(row.adv, dtype=torch.float32, device=self.policy.device) for row in m.rows]
        m.adv_NT = pad([a.expand(len(s.response_ids)) for a, s in zip(adv, samples)])[0]
        return m

    def remember(self, part: list[int], samples: list[Sample], logp: list[torch.Tensor]) -> None:
        for i, row in zip(part, logp):
            self.mismatch += float((row.detach() - self.sampler[i]).abs().sum())
            # drawn ahead, the weights have moved since, by one update
            self.old[i] = self.sampler[i] if self.cfg.pipeline else row.detach()
        if self.cfg.beta > 0:
            with torch.no_grad():
                self.reference |= zip(part, self.policy.logp(samples, self.T, reference=True))


class Values:
    """The same for a critic: its values before the first step are kept."""

    def __init__(self, critic, rows: list[Row]):
        self.critic = critic
        self.rows = rows
        self.old: dict[int, dict] = {}
        self.mismatch = 0.0                           # nobody else draws values

    def micro(self, part: list[int], first: bool) -> Micro:
        rows = [self.rows[i] for i in part]
        values = self.critic.values([row.sample for row in rows], [row.places for row in rows])
        if first:
            self.old |= {i: {head: v.detach() for head, v in of.items()} for i, of in zip(part, values)}
        return Micro(rows, values=values, values_old=[self.old[i] for i in part])


def update(role: Role, network, optimizer, rows: list[Row], loss: Callable, cfg, world: World) -> dict:
    """`passes` optimizer steps of one role on its rows of this rank; returns statistics of the last pass.

    `loss(micro)` returns the micro-batch's share of the objective, and sums that become means over a policy's
    tokens, a critic's rows: those that `role.told` names. `cfg`: passes, micro_batch, micro_tokens, max_norm,
    beta, pipeline.
    """
    is_policy = role.kind == "policy"
    source = Logps(network, rows, role.temperature, cfg) if is_policy else Values(network, rows)
    parts = micro_batches(rows, cfg)
    for step in range(cfg.passes):
        sums = dict.fromkeys(("loss", "weight", *role.told), 0.0)
        furthest = 0.0                                # the largest |log r|, which cannot be summed
        for p in network.parameters().values():
            p.grad = torch.zeros_like(p)
        for part in parts:
            m = source.micro(part, first=step == 0)
            share, told = loss(m)
            share.backward()
            told |= {"loss": share.detach(), "weight": m.mask_NT.sum() if is_policy else len(part)}
            for name, value in told.items():
                sums[name] += float(value)
            if is_policy:
                furthest = max(furthest, m.furthest())
        grad_norm = step_together_(network, optimizer, cfg.max_norm)
    every = gather_objects((sums, len(rows), furthest, source.mismatch), world)
    sums = {name: sum(rank[0][name] for rank in every) for name in sums}
    weight = max(sums.pop("weight"), 1)
    out = {"loss": sums.pop("loss"), **{name: value / weight for name, value in sums.items()},
           "grad": grad_norm, "trained": sum(rank[1] for rank in every)}
    if is_policy:
        out["ratio_max"] = math.exp(max(rank[2] for rank in every))
        out["mismatch"] = sum(rank[3] for rank in every) / weight
    return out


def step_together_(network, optimizer, max_norm: float) -> float:
    """Sum the gradients of all ranks in one all_reduce, clip, step; returns the norm before the clip."""
    parameters = list(network.parameters().values())
    all_reduce_flat_([p.grad for p in parameters])
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return float(norm)
