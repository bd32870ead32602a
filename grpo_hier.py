"""Stage 3: joint hierarchical multi-agent GRPO of a decomposer and an actor (sections 3.4, 4.3, appendix B).

    python grpo_hier.py --preset demo                  # CPU, tiny model, MiniWoB++: 6 minutes
    python grpo_hier.py --actor SFT_A --decomposer SFT_D --tasks TASKS --sites sites.json --judge_model JUDGE
        on one GPU of 80 GB (not run); on eight: torchrun --nproc_per_node=8 grpo_hier.py ...
    table 2:  --train_decomposer false  |  --use_plan false --M 7  |  --use_plan false --M 21
    servers generate:  --engine vllm --actor_url http://a:8000/v1,... --decomposer_url ...    (see engine.py)

In:  two stage-2 checkpoints, an environment's training tasks.
Out: RUN/checkpoints/N/{actor,decomposer} (LoRA adapters, PEFT format, with optimizers), RUN/log.jsonl (one
     object per rollout batch; the README's glossary defines every key), RUN/episodes.jsonl + shots/
     (fields: episode_log.py).
A run killed at any moment goes on from its last rollout batch and, with the local engine, one browser and no
--pipeline, ends with the same bytes. With --pipeline 1 a batch is drawn with the weights before the last
update (the first one after a restart: with the newest), and its log π_old are the sampler's own.

What differs from the equations as printed, and what the paper leaves open (all settings, README: PAPER-GAPs):
1 lengths: `--norm drgrpo` divides by constants (Eqs. 7', 10'), `--norm printed` by T and |a|, |d|; 2 std off,
unbiased when on; 4 log π_old is pass 1's own log-prob; 5 a pass covers the whole batch and makes one step per
role; 6 world x tasks_per_rank tasks per batch; 7 failed infrastructure leaves baseline and loss, divisors
stay as planned; 16 AdamW, gradient clip per role. The KL of β > 0 is the k3 estimate against the adapter
switched off.
"""

import math
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bookkeeping import (Stopwatch, load_checkpoint, phase_table, rollout_phases, save_checkpoint,
                         statistics, times, total)
from checkpoints import with_models
from engine import addresses, load_engine
from episode_log import EpisodeLog
from policy import Policy, Sample, need_model, parameter_count
from prompts import load_prompts
from rollout import Group, Pool, RolloutConfig, load_environment
from runtime import (DTYPES, UserError, all_reduce_flat_, append_jsonl, check, gather_objects,
                     latest_checkpoint, launch, need_directories, open_run, process_group, rewrite_jsonl)

# B tasks of a rollout batch, K plans per task, M episodes per plan, N samples, T tokens of a padded response.
# D and A are the roles, never dimensions. A sample is one response: a plan d_i, or one action a_ijk.


@dataclass(frozen=True)
class Config(RolloutConfig):
    run_dir: str = "runs/grpo"           # run directory; the same one again goes on where it stopped
    actor: str = ""                      # the actor's stage-2 checkpoint (frozen base), or its stage-2 run
    decomposer: str = ""                 # the decomposer's, likewise
    K: int = 3                           # plans per task, sec. 4.3
    M: int = 7                           # episodes per plan, sec. 4.3
    use_plan: bool = True                # false: no decomposer, plain multi-turn GRPO with K = 1 (table 2)
    train_decomposer: bool = True        # false: the decomposer stays as SFT left it (table 2)
    norm: str = "drgrpo"                 # drgrpo: Eqs. 7', 10'; printed: Eqs. 7, 10 (PAPER-GAP 1)
    std: bool = False                    # divide advantages by the group's std (PAPER-GAP 2)
    std_eps: float = 1e-4                # δ of Eqs. 5 and 9
    eps: float = 0.2                     # ε, clip, sec. 4.3
    beta: float = 0.0                    # β, weight of the KL to the SFT policy, sec. 4.3
    passes: int = 2                      # optimisation steps per rollout batch, sec. 4.3
    epochs: int = 1                      # passes over the training tasks, sec. 4.3
    tasks_per_rank: int = 1              # tasks of a rollout batch on each rank (PAPER-GAP 6)
    micro_batch: int = 8                 # samples per forward and backward: memory only, never the objective
    micro_tokens: int = 0                # at most so many tokens in it, padding counted; 0: no limit
    lr: float = 1e-5                     # sec. 4.3
    lora_r: int = 32                     # r, sec. 4.3
    lora_alpha: int = 64                 # α, sec. 4.3
    adam_eps: float = 1e-12              # small, as the constants C make gradients tiny (PAPER-GAP 16)
    max_norm: float = 1.0                # gradient clip, per role
    dtype: str = "bfloat16"              # of the frozen base; adapters are float32
    checkpointing: bool = True           # recompute activations in the backward pass
    engine: str = "local"                # who generates: local (this process) or vllm (servers)
    actor_url: str = ""                  # vllm: the actor's servers, by commas: http://HOST:PORT/v1
    decomposer_url: str = ""             # vllm: the decomposer's servers
    adapters_dir: str = ""               # vllm: directory that trainer and servers see; "": RUN/adapters
    probe_limit: float = 0.1             # vllm: largest mean |Δ log π| of the probe, nats; more ends the run
    is_cap: float = 0.0                  # weight terms by min(π_old / π_sampler, cap); 0: no weights
    pipeline: int = 0                    # 1: the next rollout batch runs while this one trains
    max_infra: float = 0.3               # stop when more than this share of a batch fails on infrastructure
    keep: int = 2                        # checkpoints kept
    seed: int = 0                        # of every random draw

    def __post_init__(self):
        super().__post_init__()
        check(self, "K", "M", "passes", "epochs", "tasks_per_rank", "micro_batch", "lora_r",
              norm=("drgrpo", "printed"), dtype=DTYPES, engine=("local", "vllm"), pipeline=(0, 1))
        need_directories(self, "adapters_dir")


FREE = ("threads", "micro_batch", "micro_tokens", "keep", "max_batch", "actor_url", "decomposer_url",
        "adapters_dir", "browser_ws", "max_infra", "retries", "retry_wait", "call_timeout", "open_timeout",
        "deadline", "recycle", "memory", "judge_base_url", "leases")      # may differ on resumption


# -------------------------------------------------------------------------------------------------- equations
def advantage_A(R_BKM, valid_BKM, std=False, std_eps=1e-4):
    """Eq. 5: A^A_ij = R_ij - mean_m R_im   [printed: / (std_m R_im + δ)]

    PAPER-GAP 7: mean and std over the valid episodes of plan i;
    0 for invalid ones and where fewer than 2 are valid.
    """
    assert R_BKM.shape == valid_BKM.shape and R_BKM.dim() == 3
    return _centre(R_BKM, valid_BKM, std, std_eps)


def ratio(logp_NT, logp_old_NT):
    """Eq. 6: r_u = π(u) / π_old(u), at the very context the token was sampled in."""
    assert logp_NT.shape == logp_old_NT.shape
    return (logp_NT - logp_old_NT).exp()


def clipped(r_NT, adv_N, eps):
    """ℓ(r, A) = min(r·A, clip(r, 1-ε, 1+ε)·A) of Eqs. 7 and 10."""
    assert r_NT.dim() == 2 and adv_N.shape == r_NT.shape[:1]
    return torch.minimum(r_NT * adv_N[:, None], r_NT.clamp(1 - eps, 1 + eps) * adv_N[:, None])


def importance(logp_old_NT, logp_sampler_NT, cap):
    """min(π_old(u) / π_sampler(u), cap): what a sampler with other numerics drew, weighted as if by π_old."""
    assert logp_old_NT.shape == logp_sampler_NT.shape
    return (logp_old_NT - logp_sampler_NT).exp().clamp(max=cap)


def kl(logp_NT, logp_ref_NT):
    """D_KL of Eqs. 7 and 10, per token.

    PAPER-GAP (KL estimate): k3, π_ref/π - log(π_ref/π) - 1, non-negative.
    """
    d_NT = logp_ref_NT - logp_NT
    return d_NT.exp() - d_NT - 1


def loss_A(term_NT, mask_NT, B, K, M, C_A):
    """Eq. 7': L_A = -1/(K·M·C_A) Σ_ij Σ_k Σ_u term, mean over B tasks;
    PAPER-GAP 1: C_A = max_steps · max_tokens_A."""
    assert term_NT.shape == mask_NT.shape
    return -(term_NT * mask_NT).sum() / (B * K * M * C_A)


def loss_A_printed(term_NT, mask_NT, T_N, B, K, M):
    """Eq. 7: L_A = -1/(KM) Σ_ij 1/T_ij Σ_k 1/|a_ijk| Σ_u term, mean over B tasks;
    T_N is T_ij of each action's episode."""
    assert term_NT.shape == mask_NT.shape and T_N.shape == term_NT.shape[:1]
    return -((term_NT * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1) / T_N).sum() / (B * K * M)


def plan_return(R_BKM, valid_BKM):
    """Eq. 8: S_i = mean_j R_ij -> S_BK, and which of them exist.

    PAPER-GAP 7: over the valid episodes, needs at least one.
    """
    n_BK = valid_BKM.sum(-1)
    return torch.where(valid_BKM, R_BKM, 0).sum(-1) / n_BK.clamp(min=1), n_BK > 0


def advantage_D(S_BK, valid_BK, std=False, std_eps=1e-4):
    """Eq. 9: A^D_i = S_i - mean_i' S_i'   [printed: / (std_i' S_i' + δ)]; PAPER-GAP 7 as in Eq. 5."""
    assert S_BK.shape == valid_BK.shape and S_BK.dim() == 2
    return _centre(S_BK, valid_BK, std, std_eps)


def loss_D(term_NT, mask_NT, B, K, C_D):
    """Eq. 10': L_D = -1/(K·C_D) Σ_i Σ_u term, mean over B tasks; PAPER-GAP 1: C_D = max_tokens_D."""
    assert term_NT.shape == mask_NT.shape
    return -(term_NT * mask_NT).sum() / (B * K * C_D)


def loss_D_printed(term_NT, mask_NT, B, K):
    """Eq. 10: L_D = -1/K Σ_i 1/|d_i| Σ_u term, mean over B tasks."""
    assert term_NT.shape == mask_NT.shape
    return -((term_NT * mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1)).sum() / (B * K)


def loss_joint(L_A, L_D):
    """Eq. 11: L = L_A + L_D.

    The parameters are disjoint, so `update` takes the two gradients one after the other.
    """
    return L_A + L_D


def _centre(x, valid, std, std_eps):
    """x minus its mean over the valid entries of the last dimension; exactly 0 where they are all equal,
    fewer than 2, or invalid. With `std` also divided by the unbiased standard deviation plus δ."""
    n = valid.sum(-1, keepdim=True)
    mean = torch.where(valid, x, 0).sum(-1, keepdim=True) / n.clamp(min=1)
    d = torch.where(valid, x - mean, 0)
    if std:
        d = d / ((d.square().sum(-1, keepdim=True) / (n - 1).clamp(min=1)).sqrt() + std_eps)
    spread = (torch.where(valid, x, -torch.inf).amax(-1, keepdim=True)
              > torch.where(valid, x, torch.inf).amin(-1, keepdim=True))
    return torch.where(spread & valid, d, 0)


# ------------------------------------------------------------------------------------- groups -> training set
@dataclass
class Batch:
    """What one role learns from a rollout batch: samples, the advantage of each,
    T_ij of its episode (1 for a plan)."""
    samples: list[Sample]
    adv: list[float]
    T: list[int]


def credit(groups: list[Group], cfg: Config):
    """Rewards and both advantages of a rollout batch's groups:
    R_BKM, valid_BKM, S_BK, adv_A_BKM, adv_D_BK (float64)."""
    R = [math.nan if e.reward is None else e.reward for g in groups for row in g.episodes for e in row]
    R_BKM = torch.tensor(R, dtype=torch.float64).reshape(len(groups), cfg.K if cfg.use_plan else 1, cfg.M)
    valid_BKM = ~R_BKM.isnan()
    S_BK, valid_BK = plan_return(R_BKM, valid_BKM)
    adv_A_BKM = advantage_A(R_BKM, valid_BKM, cfg.std, cfg.std_eps)
    return R_BKM, valid_BKM, S_BK, adv_A_BKM, advantage_D(S_BK, valid_BK, cfg.std, cfg.std_eps)


def batches(groups: list[Group], adv_A_BKM, adv_D_BK) -> dict[str, Batch]:
    """The two roles' training sets, in an order that does not depend on when an episode finished."""
    A, D = Batch([], [], []), Batch([], [], [])
    for g, group in enumerate(groups):
        for plan, row in zip(group.plans, group.episodes, strict=True):
            if plan.sample is not None:
                D.samples.append(plan.sample), D.adv.append(float(adv_D_BK[g, plan.k])), D.T.append(1)
            for episode in row:
                for step in episode.steps if episode.reward is not None else ():
                    A.samples.append(step.sample), A.T.append(len(episode.steps))
                    A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]))
    return {"actor": A, "decomposer": D}


# ------------------------------------------------------------------------------------------------- the update
def pad(rows: list[torch.Tensor]):
    """Ragged per-token tensors -> (N, T) right-padded with 0, and the mask of real tokens."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r.detach()) for r in rows], batch_first=True)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask


def role_loss(role: str, term_NT, mask_NT, T_N, B: int, cfg: Config):
    """A micro-batch's share of L_A or L_D: the shares of all micro-batches and ranks add up to the whole."""
    K = cfg.K if cfg.use_plan else 1
    if role == "actor":
        if cfg.norm == "printed":
            return loss_A_printed(term_NT, mask_NT, T_N, B, K, cfg.M)
        return loss_A(term_NT, mask_NT, B, K, cfg.M, cfg.max_steps * cfg.max_tokens_A)
    if cfg.norm == "printed":
        return loss_D_printed(term_NT, mask_NT, B, K)
    return loss_D(term_NT, mask_NT, B, K, cfg.max_tokens_D)


def micro_batches(order: list[int], lengths: list[int], cfg: Config) -> list[list[int]]:
    """`order`, sorted by prompts and their length so that equal ones share a pass and little is padded, in
    parts of at most micro_batch samples and micro_tokens tokens."""
    parts = [[]]
    for i in order:
        n = len(parts[-1]) + 1
        longest = max(lengths[j] for j in [*parts[-1], i])
        if n > cfg.micro_batch or n > 1 and 0 < cfg.micro_tokens < n * longest:
            parts.append([])
        parts[-1].append(i)
    return [part for part in parts if part]


def update(policy: Policy, optimizer, batch: Batch, B: int, cfg: Config, world) -> dict:
    """`passes` optimizer steps of one role on one rollout batch of B tasks (all ranks); returns statistics.

    Samples of advantage 0 have gradient 0 (without a KL term) and are not run through the model at all.
    """
    T = cfg.temperature_A if policy.role == "actor" else cfg.temperature_D
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in batch.samples]
    order = [i for i, a in enumerate(batch.adv) if a != 0 or cfg.beta > 0]
    order.sort(key=lambda i: (len(batch.samples[i].prompt_ids), batch.samples[i].prompt_ids, lengths[i]))
    micro = micro_batches(order, lengths, cfg)
    logp_old, logp_ref, mismatch = {}, {}, 0.0
    logp_sampler = {i: torch.tensor(batch.samples[i].logp, device=policy.device) for i in order}
    for step in range(cfg.passes):
        for p in policy.parameters().values():
            p.grad = torch.zeros_like(p)
        # loss, tokens, clipped tokens, sum of KL; the largest |log r| cannot be summed
        sums, furthest = torch.zeros(4, dtype=torch.float64), 0.0
        for part in micro:
            samples = [batch.samples[i] for i in part]
            rows = policy.logp(samples, T)
            if step == 0:                                 # PAPER-GAP 4: the weights have not moved yet
                mismatch += sum(float((r.detach() - logp_sampler[i]).abs().sum()) for i, r in zip(part, rows))
                logp_old |= ({i: logp_sampler[i] for i in part} if cfg.pipeline     # they have: one update
                             else {i: row.detach() for i, row in zip(part, rows)})
                if cfg.beta > 0:
                    with torch.no_grad():
                        logp_ref |= zip(part, policy.logp(samples, T, reference=True))
            logp_NT, mask_NT = pad(rows)
            logp_old_NT = pad([logp_old[i] for i in part])[0]
            adv_N = torch.tensor([batch.adv[i] for i in part], dtype=torch.float32, device=logp_NT.device)
            T_N = torch.tensor([batch.T[i] for i in part], dtype=torch.float32, device=logp_NT.device)
            r_NT = ratio(logp_NT, logp_old_NT)
            term_NT = clipped(r_NT, adv_N, cfg.eps)
            if cfg.is_cap > 0:
                sampler_NT = pad([logp_sampler[i] for i in part])[0]
                term_NT = term_NT * importance(logp_old_NT, sampler_NT, cfg.is_cap)
            if cfg.beta > 0:
                kl_NT = kl(logp_NT, pad([logp_ref[i] for i in part])[0])
                term_NT = term_NT - cfg.beta * kl_NT
                sums[3] += float((kl_NT.detach() * mask_NT).sum())
            loss = role_loss(policy.role, term_NT, mask_NT, T_N, B, cfg)
            loss.backward()
            # the clip is active where it takes the gradient away: r > 1+ε with A > 0, r < 1-ε with A < 0
            active = torch.where(adv_N[:, None] > 0, r_NT > 1 + cfg.eps, r_NT < 1 - cfg.eps)
            sums[:3] += torch.stack([loss.detach(), mask_NT.sum(), (active * mask_NT).sum()]).double().cpu()
            furthest = max(furthest, 0.0, *((logp_NT - logp_old_NT).abs() * mask_NT).flatten().tolist())
        grad_norm = step_together_(policy, optimizer, cfg.max_norm)
    sums = torch.tensor(gather_objects(sums.tolist(), world)).sum(0).tolist()
    tokens = max(sums[1], 1)
    return {"loss": sums[0], "clip": sums[2] / tokens, "kl": sums[3] / tokens, "grad": grad_norm,
            "ratio_max": math.exp(max(gather_objects(furthest, world))),
            "mismatch": sum(gather_objects(mismatch, world)) / tokens,
            "trained": sum(gather_objects(len(order), world))}


def step_together_(policy: Policy, optimizer, max_norm: float) -> float:
    """Sum the gradients of all ranks in one all_reduce, clip, step; returns the norm before the clip."""
    parameters = list(policy.parameters().values())
    all_reduce_flat_([p.grad for p in parameters])
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return float(norm)


# ------------------------------------------------------------------------------------------------ bookkeeping
def schedule(tasks: list, cfg: Config, world_size: int) -> list[list]:
    """The rollout batches of the run, each a list of tasks; every epoch is shuffled from (seed, epoch)."""
    size, out = world_size * cfg.tasks_per_rank, []
    for epoch in range(cfg.epochs):
        order = random.Random(f"{cfg.seed} {epoch}").sample(tasks, len(tasks))
        out += [order[i:i + size] for i in range(0, len(order), size)]
    return out


def log_line(s: dict, updates: dict) -> dict:
    """Sums over all ranks -> the logged object (README: metric glossary)."""
    line = {"reward_mean": s["reward"] / max(1, s["valid"]), "S_std": s["S_std"] / s["tasks"],
            "episodes": s["episodes"], "infra_rate": 1 - s["valid"] / s["episodes"],
            "unparsable_rate": s["unparsable"] / s["episodes"],
            "zero_adv_A": s["zero_A"] / s["groups_A"], "zero_adv_D": s["zero_D"] / s["tasks"],
            "steps_mean": s["steps"] / s["episodes"], "len_A": s["tokens_A"] / max(1, s["steps"]),
            "len_D": s["tokens_D"] / max(1, s["plans"]),
            "malformed_rate": s["malformed"] / max(1, s["plans"]),
            "truncated_A": s["cut"] / max(1, s["steps"]), "faults": dict(s["faults"])}
    for role, u in updates.items():
        line |= {f"{k}_{'A' if role == 'actor' else 'D'}": v for k, v in u.items()}
    return line | {"loss": loss_joint(line.get("loss_A", 0.0), line.get("loss_D", 0.0))}


# ------------------------------------------------------------------------------------------------------- main
def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.cpu_threads)
    cfg = with_checkpoints(cfg)                           # what is missing is said before anything is written
    env = load_environment(cfg)
    tasks = env.tasks(cfg.split)
    with process_group() as world, open_run(cfg.run_dir, cfg, world, free=FREE) as run:
        train(cfg, world, run, env, tasks)
    env.close()


def dry_run(cfg: Config) -> None:
    """What a run would do, and the most it can take."""
    cfg, (roles, trained), env = with_checkpoints(cfg), roles_of(cfg), load_environment(cfg)
    with process_group() as world:
        rollouts = schedule(env.tasks(cfg.split), cfg, world.size)
        n, K = sum(map(len, rollouts)), cfg.K if cfg.use_plan else 1
        if world.main:
            print(f"{n} tasks of {cfg.env} {cfg.split} in {len(rollouts)} rollout batches; after each, "
                  f"{cfg.passes} steps of {' and '.join(trained)}\n"
                  f"{n} tasks x {K} plans x {cfg.M} episodes = {n * K * cfg.M:,} episodes of at most "
                  f"{cfg.max_steps} actions of at most {cfg.max_tokens_A} tokens")
            for path in (getattr(cfg, role) for role in roles):
                print(f"{path}: {parameter_count(path) / 1e6:,.1f} M parameters, frozen, in {cfg.dtype}")
            print(f"{cfg.run_dir}: {latest_checkpoint(Path(cfg.run_dir) / 'checkpoints') or 'new'}; hours: "
                  f"bench/simulate.py, and `seconds` in log.jsonl after the first rollout batch")
    env.close()


def roles_of(cfg: Config) -> tuple[list[str], list[str]]:
    """The roles there are, and those that are trained."""
    roles = ["actor", "decomposer"] if cfg.use_plan else ["actor"]
    return roles, [r for r in roles if r == "actor" or cfg.train_decomposer]


def with_checkpoints(cfg: Config) -> Config:
    """Each role's stage-2 run becomes its checkpoint. Raises UserError for what models and texts lack."""
    roles, _ = roles_of(cfg)
    for role in roles:
        if not getattr(cfg, role):
            raise UserError(f"--{role} is missing: give the directory of the {role}'s stage-2 checkpoint")
        cfg = with_models(cfg, role)
        need_model(getattr(cfg, role))
    addresses(cfg, roles)
    load_prompts(cfg.prompts)
    return cfg


def build(cfg: Config, world, roles, trained) -> tuple[dict, dict]:
    """The roles' policies, and an optimizer for each role that is trained (PAPER-GAP 16)."""
    policies = {role: Policy(getattr(cfg, role), role, cfg.lora_r, cfg.lora_alpha, device=world.device,
                             dtype=cfg.dtype, seed=cfg.seed + i, checkpointing=cfg.checkpointing)
                for i, role in enumerate(roles)}
    optimizers = {r: torch.optim.AdamW(policies[r].parameters().values(), lr=cfg.lr, betas=(0.9, 0.999),
                                       eps=cfg.adam_eps, weight_decay=0.0) for r in trained}
    return policies, optimizers


def roll_out(batch: int, tasks: list, pool: Pool, engine, cfg: Config, bar: str) -> tuple[list[Group], dict]:
    """This rank's share of a rollout batch, in the order of its tasks, and where the time went."""
    clock = lambda: pool.clock() + Counter(generation=engine.seconds())
    start, before = time.monotonic(), clock()
    groups = sorted(pool.run(tasks, cfg.K, cfg.M, (cfg.seed, batch), engine.models, cfg.use_plan, bar=bar),
                    key=lambda group: tasks.index(group.task))
    return groups, rollout_phases(before, clock(), cfg.threads, time.monotonic() - start)


def drawn_batches(batches: range, draw, sync, cfg: Config):
    """Yields (batch, what `sync` told, what `draw` returned) for one rollout batch after the other. With
    `pipeline` the next one is under way, on the weights of now, while the caller trains on what it got."""
    def timed(batch):
        start = time.monotonic()
        return sync(batch) | {"seconds_sync": time.monotonic() - start}
    ahead = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(cfg.cpu_threads,))
    coming = None
    try:
        for batch in batches:
            told, drawn = (coming[0], coming[1].result()) if coming else (timed(batch), draw(batch))
            if cfg.pipeline and batch + 1 in batches:
                coming = timed(batch + 1), ahead.submit(draw, batch + 1)
            yield batch, told, drawn
    finally:
        ahead.shutdown(wait=False)                        # the pool's end ends what is still being drawn


def train(cfg: Config, world, run: Path, env, tasks: list) -> None:
    roles, trained = roles_of(cfg)
    # 1 · two policies on two frozen bases, each with its own adapter and optimizer; who generates with them
    policies, optimizers = build(cfg, world, roles, trained)
    engine = load_engine(cfg, policies, run, world)

    # 2 · where a killed run stopped: nothing is lost, nothing is there twice
    done = load_checkpoint(run / "checkpoints", policies, optimizers, world)
    if world.main:
        for name in ("log.jsonl", "episodes.jsonl"):
            rewrite_jsonl(run / name, lambda line: line["batch"] < done)
    rollouts = schedule(tasks, cfg, world.size)
    gather_objects(done, world)                           # all ranks see the same files before anybody writes
    episode_log = EpisodeLog(run)

    with Pool(env, load_prompts(cfg.prompts), cfg) as pool:
        # 3 · K plans per task, M episodes per plan (Eqs. 1, 2), terminal rewards
        def draw(i):
            bar = f"batch {i + 1}/{len(rollouts)}" if world.main else ""
            return roll_out(i, rollouts[i][world.rank::world.size], pool, engine, cfg, bar)
        watch, to_do = Stopwatch(), range(done, len(rollouts))
        for batch, told, (groups, phases) in drawn_batches(to_do, draw, engine.sync, cfg):
            watch.lap("rollout")

            # 4 · credit: within a plan for the actor (Eq. 5), across plans for the decomposer (Eqs. 8, 9)
            R_BKM, valid_BKM, S_BK, adv_A_BKM, adv_D_BK = credits = credit(groups, cfg)
            s = total(gather_objects(statistics(groups, *credits), world))
            watch.lap("sync")                             # with the slowest rank
            episode_log.append(groups, batch, lambda g, k, m: {
                "S_i": float(S_BK[g, k]) if valid_BKM[g, k].any() else None,
                "adv_A": float(adv_A_BKM[g, k, m]), "adv_D": float(adv_D_BK[g, k])})
            if (lost := s["episodes"] - s["valid"]) > cfg.max_infra * s["episodes"]:
                raise UserError(f"batch {batch}: {lost} of {s['episodes']} episodes failed for reasons of "
                                f"infrastructure (--max_infra {cfg.max_infra}); see {run}/episodes.jsonl, "
                                f"then start again")

            # 5 · one update per role from the one batch (Eqs. 6, 7, 10, 11)
            watch.lap("files")
            data, B = batches(groups, adv_A_BKM, adv_D_BK), len(rollouts[batch])
            updates = {r: update(policies[r], optimizers[r], data[r], B, cfg, world) for r in trained}
            watch.lap("update")

            # 6 · log and checkpoint; a kill between the two is undone by step 2
            line = ({"batch": batch, "of": len(rollouts)} | log_line(s, updates)
                    | times(phases, told, watch, world) | told)
            watch = Stopwatch()
            gather_objects(None, world)                   # every rank's episodes are written
            if world.main:
                append_jsonl(run / "log.jsonl", [line])
                save_checkpoint(run / "checkpoints", batch + 1, policies, optimizers, cfg.keep)
                print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                               for k, v in line.items()), flush=True)
    engine.close()
    if world.main:
        print(phase_table(run / "log.jsonl"))


if __name__ == "__main__":
    launch(main, dry_run=dry_run)
