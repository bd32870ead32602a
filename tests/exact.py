"""Three small worlds for the tests of the equations, in which the paper's mathematics can be had exactly.

`Rollouts`: a ragged rollout batch with ratios on all sides of the clip, and the losses on it as plain loops.
`Toy`: a tabular decomposer and actor whose rollout batches can all be enumerated, with their probabilities.
`TrlCase`: ragged log-probs from formulas instead of random numbers, for our losses and for TRL's.
"""

import dataclasses
import itertools
import math

import torch

import grpo_hier
from grpo_hier import (
    advantage_A,
    advantage_D,
    clipped,
    loss_A,
    loss_D,
    loss_joint,
    plan_return,
    ratio,
)
from model.update import Micro, Row, pad


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def close(a, b, tolerance=1e-12):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and (a - b).abs().max() <= tolerance, f"{a} is not {b}"


def everyone(x):
    return torch.ones_like(x, dtype=torch.bool)


def config(**settings):
    small = {"K": 3, "M": 2, "max_steps": 4, "max_tokens_A": 8, "max_tokens_D": 16}
    return dataclasses.replace(grpo_hier.Config(), **small | settings)


class Rollouts:
    """B tasks, K plans, M episodes with T_ij actions of |a| tokens: ragged log-probs in float64."""

    def __init__(self, B=2, K=3, M=2, seed=7, equal=False):
        g = torch.Generator().manual_seed(seed)
        self.B, self.K, self.M = B, K, M
        self.adv = torch.randn(B * K * M, generator=g, dtype=torch.float64).tolist()
        self.T = torch.randint(1, 4, (B * K * M,), generator=g).tolist()
        self.episode = [i for i, T in enumerate(self.T) for _ in range(T)]            # of each action
        lengths = torch.randint(1, 6, (len(self.episode),), generator=g).tolist()
        draw = lambda scale: [scale * torch.randn(n, generator=g, dtype=torch.float64) for n in lengths]
        self.old = [-1 - x.abs() for x in draw(1.0)]
        self.logp = [(o + (0 if equal else d)).requires_grad_() for o, d in zip(self.old, draw(0.3))]
        self.ref = [o + d for o, d in zip(self.old, draw(0.3))]

    def loss(self, cfg, role="actor", rows=None, extra=0):
        """Through the shipped functions; `rows` picks a micro-batch, `extra` adds columns of padding."""
        rows = range(len(self.logp)) if rows is None else rows
        take = lambda ragged: torch.nn.functional.pad(pad([ragged[i] for i in rows])[0], (0, extra))
        mask_NT = torch.nn.functional.pad(pad([self.logp[i] for i in rows])[1], (0, extra))
        episodes = [self.episode[i] for i in rows]
        adv_N = torch.tensor([self.adv[e] for e in episodes], dtype=torch.float64)
        m = Micro([Row(None, self.adv[e], self.T[e]) for e in episodes], take(self.logp), take(self.old),
                  take(self.ref), mask_NT=mask_NT, adv_NT=adv_N[:, None].expand_as(mask_NT))
        return grpo_hier.loss(role, m, self.B, cfg)[0]

    def oracle(self, cfg, weight):
        """-Σ weight · (ℓ - β KL) over all tokens as a loop, and its derivative for every token."""
        total, slopes = 0.0, []
        for i, (logp, old, ref) in enumerate(zip(self.logp, self.old, self.ref)):
            A, w = self.adv[self.episode[i]], weight(self.T[self.episode[i]], len(logp))
            for lp, o, f in zip(logp.tolist(), old.tolist(), ref.tolist()):
                r = math.exp(lp - o)
                bounded = min(max(r, 1 - cfg.eps), 1 + cfg.eps)
                total -= w * (min(r * A, bounded * A) - cfg.beta * (math.exp(f - lp) - (f - lp) - 1))
                slope = r * A if r * A <= bounded * A else 0.0
                slopes.append(-w * (slope - cfg.beta * (1 - math.exp(f - lp))))
        return total, slopes


class Toy:
    """A decomposer that writes L binary tokens, an actor that takes two binary actions, a table of rewards.

    Tabular softmax policies: one pair of logits per prefix, for the actor per plan and prefix. With P plans
    and E = 4 episodes per plan, all P^K · E^(KM) rollout batches can be listed with their probabilities.
    """

    def __init__(self, K, M, L, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.K, self.M = K, M
        P = 2 ** L
        self.theta_D = torch.randn(P - 1, 2, generator=g, dtype=torch.float64, requires_grad=True)
        self.theta_A = torch.randn(P, 3, 2, generator=g, dtype=torch.float64, requires_grad=True)
        quality = torch.linspace(0.05, 0.95, P, dtype=torch.float64)[:, None]
        self.R = 0.8 * quality + 0.2 * torch.rand(P, 4, generator=g, dtype=torch.float64)      # (P, E)
        self.logp_D = self.log_prob(self.theta_D, L)                                # (P, L)
        self.logp_A = torch.stack([self.log_prob(theta, 2) for theta in self.theta_A])          # (P, E, 2)
        index = torch.cartesian_prod(*[torch.arange(P)] * K, *[torch.arange(4)] * (K * M))
        self.d, self.e = index[:, :K], index[:, K:].reshape(-1, K, M)               # (B, K), (B, K, M)
        self.taken_D, self.taken_A = self.logp_D[self.d], self.logp_A[self.d[..., None], self.e]
        self.p = (self.taken_D.sum((1, 2)) + self.taken_A.sum((1, 2, 3))).exp().detach()
        self.R_BKM = self.R[self.d[..., None], self.e]

    @staticmethod
    def log_prob(theta, L):
        logp = theta.log_softmax(-1)
        node = lambda s, u: 2 ** u - 1 + int("0" + "".join(map(str, s[:u])), 2)         # of the prefix s[:u]
        return torch.stack([torch.stack([logp[node(s, u), s[u]] for u in range(L)])
                            for s in itertools.product((0, 1), repeat=L)])

    def J(self):
        """E[R], the one objective of both roles."""
        return (self.logp_D.sum(-1).exp()[:, None] * self.logp_A.sum(-1).exp() * self.R).sum()

    def expected(self, std=False):
        """Exact expectation of the gradients that Eqs. 5-11 (primed, C = 1) give: decomposer's, actor's."""
        everyone = torch.ones_like(self.R_BKM, dtype=torch.bool)
        adv_A = advantage_A(self.R_BKM, everyone, std)
        adv_D = advantage_D(*plan_return(self.R_BKM, everyone), std)
        L_A, L_D = self.loss(self.taken_A, adv_A, loss_A, self.M), self.loss(self.taken_D, adv_D, loss_D)
        return torch.autograd.grad(loss_joint(L_A, L_D), (self.theta_D, self.theta_A), retain_graph=True)

    def loss(self, logp, adv, loss_role, *sizes):
        """Σ_batches p · loss; p goes in with the advantage, since ℓ(r, p·A) = p·ℓ(r, A)."""
        adv_N = (adv * self.p.view(-1, *[1] * (adv.dim() - 1))).reshape(-1)
        logp_NT = logp.reshape(-1, logp.shape[-1])
        adv_NT = adv_N[:, None].expand_as(logp_NT)
        term_NT = clipped(ratio(logp_NT, logp_NT.detach()), adv_NT, 0.2)
        return loss_role(term_NT, torch.ones_like(term_NT), 1, self.K, *sizes, 1)


class TrlCase:
    """Four episodes (one task, K = M = 2) of 1-3 actions of 1-5 tokens, from formulas, not random numbers."""
    T, lengths = (2, 1, 3, 2), (3, 5, 2, 1, 4, 2, 3, 5)

    def __init__(self):
        wave = lambda a, b: [torch.tensor([math.sin(a * i + b * u) for u in range(n)])
                             for i, n in enumerate(self.lengths)]
        self.logp = [(-1 - x.abs()).requires_grad_() for x in wave(1.7, 0.9)]
        self.old = [x.detach() + 0.4 * y for x, y in zip(self.logp, wave(2.3, 1.1))]
        self.adv = [0.7, -0.7, -0.4, 0.4]
        self.episode = [e for e, T in enumerate(self.T) for _ in range(T)]

    def ours(self, equation):
        adv_N = torch.tensor([float(self.adv[e]) for e in self.episode])
        (logp_NT, mask_NT), (old_NT, _) = pad(self.logp), pad(self.old)
        K = len(self.logp) if "10" in equation else 2          # for Eqs. 10 and 10' every action plays a plan
        cfg = grpo_hier.Config(K=K, M=2, max_steps=4, max_tokens_A=8, max_tokens_D=24,
                               norm="drgrpo" if "'" in equation else "printed")
        m = Micro([Row(None, self.adv[e], self.T[e]) for e in self.episode], logp_NT, old_NT, mask_NT=mask_NT,
                  adv_NT=adv_N[:, None].expand_as(mask_NT))
        return grpo_hier.loss("decomposer" if "10" in equation else "actor", m, 1, cfg)[0]

    def trl(self, equation):
        """7': dr_grpo on whole episodes. 7: mean over episodes of grpo on actions. 10', 10: single rows."""
        rows = [[i for i, e in enumerate(self.episode) if e == episode] for episode in range(4)]
        if equation == "7":
            return sum(self.call("grpo", [[i] for i in r], 0) for r in rows) / 4
        if equation == "7'":
            return self.call("dr_grpo", rows, 4 * 8)
        return self.call("dr_grpo" if "'" in equation else "grpo", [[i] for i in range(8)], 24)

    def call(self, loss_type, rows, C):
        from trl import GRPOTrainer

        from bench.loss import trl_trainer
        joined = lambda ragged: pad([torch.cat([ragged[i] for i in row]) for row in rows])
        (logp_NT, mask_NT), (old_NT, _) = joined(self.logp), joined(self.old)
        trainer, ids = trl_trainer(logp_NT, loss_type, 0.2), mask_NT.long()
        trainer.max_completion_length = C
        adv_N = torch.tensor([self.adv[self.episode[row[0]]] for row in rows])
        return GRPOTrainer._compute_loss(trainer, None, {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": mask_NT, "advantages": adv_N, "old_per_token_logps": old_NT})

    def numbers(self, loss):
        grad = torch.cat(torch.autograd.grad(loss, self.logp)).double()
        return float(loss.detach()), float(grad.sum()), float(grad.square().sum().sqrt())
