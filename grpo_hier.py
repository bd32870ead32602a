"""Stage 3: joint hierarchical multi-agent GRPO of a decomposer and an actor (sections 3.4, 4.3, appendix B).

    python grpo_hier.py --preset demo                  # CPU, tiny model, MiniWoB++: 6 minutes
    python grpo_hier.py --actor SFT_A --decomposer SFT_D --tasks TASKS --sites sites.json --judge_model JUDGE
        on one GPU of 80 GB (not run); on eight: torchrun --nproc_per_node=8 grpo_hier.py ...
    table 2:  --train_decomposer false  |  --use_plan false --M 7  |  --use_plan false --M 21
    servers generate:  --engine vllm --actor_url http://a:8000/v1,... --decomposer_url ...   (model/engine.py)

In:  two stage-2 checkpoints, an environment's training tasks.
Out: RUN/checkpoints/N/{actor,decomposer} (LoRA adapters, PEFT format, with optimizers), RUN/log.jsonl (a line
     per rollout batch: docs/metrics.md), RUN/episodes.jsonl + shots/ (records/episode_log.py).
A run killed at any moment goes on from its last rollout batch and, with the local engine, one browser and no
--pipeline, ends with the same bytes. With --pipeline 1 a batch is drawn with the weights before the last
update (the first one after a restart: with the newest), and its log π_old are the sampler's own.

What differs from the equations as printed, and what the paper leaves open (all settings, docs/gaps.md):
1 lengths: `--norm drgrpo` divides by constants (Eqs. 7', 10'), `--norm printed` by T and |a|, |d|; 2 std off,
unbiased when on; 4 log π_old is pass 1's own log-prob; 5 a pass covers the whole batch and makes one step per
role; 6 world x tasks_per_rank tasks per batch; 7 failed infrastructure leaves baseline and loss, divisors
stay as planned; 16 AdamW, gradient clip per role. β's KL is the k3 estimate against the adapter switched off.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import rollout
from language.prompts import load_prompts
from model.engine import load_engine
from model.roles import Role, build, with_checked_roles
from model.update import Credit, Micro, Row, clip_acts, importance, update
from records import training_log
from records.episode import Episode, Group, Plan, all_episodes, read_plan
from records.episode_log import EpisodeLog
from records.training_log import share_of, spread, truncated
from runtime.batches import drawn_batches, schedule
from runtime.checkpoints import load_checkpoint, save_checkpoint
from runtime.command import launch
from runtime.files import append_jsonl, rewrite_jsonl
from runtime.process import gather_objects, process_group
from runtime.run import DTYPES, check, need_directories, open_run
from runtime.stopwatch import Stopwatch, phase_table, timed_rollout, times
from runtime.systems import need_names
from web.environment import RolloutConfig, load_environment

# B tasks of a rollout batch, K plans per task, M episodes per plan, N samples, T tokens of a padded response;
# D and A are the roles. A sample is one response: a plan d_i, or one action a_ijk.


@dataclass(frozen=True)
class Config(RolloutConfig):
    run_dir: str = "runs/grpo"           # run directory; the same one again goes on where it stopped
    actor: str = ""                      # the actor's stage-2 checkpoint (frozen base), or its stage-2 run
    decomposer: str = ""                 # the decomposer's, likewise
    K: int = 3                           # plans per task, sec. 4.3
    M: int = 7                           # episodes per plan, sec. 4.3
    temperature_D: float = 0.8           # sampling temperature of the decomposer, sec. 4.3
    temperature_A: float = 0.8           # sampling temperature of the actor, sec. 4.3
    max_tokens_D: int = 512              # new tokens of a plan (PAPER-GAP 17)
    max_tokens_A: int = 512              # new tokens of an action
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
        check(self, "K", "M", "passes", "epochs", "tasks_per_rank", "micro_batch", "lora_r", "max_tokens_D",
              "max_tokens_A", norm=("drgrpo", "printed"), dtype=DTYPES, engine=("local", "vllm"),
              pipeline=(0, 1))
        need_directories(self, "adapters_dir")

    @property
    def plans(self) -> int:
        """Plans of a task: K, or the one empty plan."""
        return self.K if self.use_plan else 1


FREE = ("threads", "micro_batch", "micro_tokens", "keep", "max_batch", "adapters_dir", "browser_ws",
        "max_infra", "retries", "retry_wait", "call_timeout", "open_timeout", "deadline", "recycle", "memory",
        "judge_base_url", "leases")      # may differ on resumption, as may the roles' servers


# -------------------------------------------------------------------------------------------------- equations
def advantage_A(R_BKM, valid_BKM, std=False, std_eps=1e-4):
    """Eq. 5: A^A_ij = R_ij - mean_m R_im   [printed: / (std_m R_im + δ)]; PAPER-GAP 7: over plan i's valid
    episodes, 0 for invalid ones and where fewer than 2 are valid."""
    assert R_BKM.shape == valid_BKM.shape and R_BKM.dim() == 3
    return _centre(R_BKM, valid_BKM, std, std_eps)


def ratio(logp_NT, logp_old_NT):
    """Eq. 6: r_u = π(u) / π_old(u), at the very context the token was sampled in."""
    assert logp_NT.shape == logp_old_NT.shape
    return (logp_NT - logp_old_NT).exp()


def clipped(r_NT, adv_NT, eps):
    """ℓ(r, A) = min(r·A, clip(r, 1-ε, 1+ε)·A) of Eqs. 7 and 10."""
    assert r_NT.dim() == 2 and adv_NT.shape == r_NT.shape
    return torch.minimum(r_NT * adv_NT, r_NT.clamp(1 - eps, 1 + eps) * adv_NT)


def kl(logp_NT, logp_ref_NT):
    """D_KL of Eqs. 7 and 10, per token; PAPER-GAP (KL estimate): k3, π_ref/π - log(π_ref/π) - 1."""
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
    """Eq. 8: S_i = mean_j R_ij -> S_BK, and which of them exist; PAPER-GAP 7: over the valid episodes."""
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


def loss_joint(*L):
    """Eq. 11: L = L_A + L_D, of disjoint parameters: `train` takes one gradient after the other."""
    return sum(L)


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


# ------------------------------------------------------------------------------------------- roles and agent
def roles(cfg: Config) -> list[Role]:
    """Two policies with parameters of their own (sec. 3.1); without a plan the actor alone (table 2)."""
    actor = Role("actor", cfg.actor, "A", temperature=cfg.temperature_A, max_tokens=cfg.max_tokens_A,
                 lr=cfg.lr, urls=cfg.actor_url)
    decomposer = Role("decomposer", cfg.decomposer, "D", temperature=cfg.temperature_D,
                      max_tokens=cfg.max_tokens_D, lr=cfg.lr, urls=cfg.decomposer_url,
                      trained=cfg.train_decomposer)
    return [actor, decomposer] if cfg.use_plan else [actor]


class Agent(rollout.Agent):
    """A plan per task from the decomposer, then one action per screenshot from the actor."""

    def plans(self, instruction, png, ask, K) -> list[Plan]:
        """Eq. 1: d ~ π_D(· | x, o_0), K times; one empty plan where there is no decomposer."""
        if not ask.has("decomposer"):
            return super().plans(instruction, png, ask, K)
        system, user = self.prompts.decomposer(instruction)
        asked = [ask.later("decomposer", system, user, png) for _ in range(K)]
        return [read_plan(k, ask.wait(answer)) for k, answer in enumerate(asked)]

    def act(self, png, ask):
        """Eq. 2: a_t ~ π_A(· | x, o_t, h_t, d)."""
        system, user = self.prompts.actor(self.instruction, self.history, self.plan.text)
        sample = ask("actor", system, user, png, self.steps)
        return sample, self.read(sample.text)


# ----------------------------------------------------------------------------------- groups -> what is learnt
def rewards(episode: Episode) -> list[float]:
    """The reward of each step: R_ij at the last one, 0 before."""
    return [0.0] * (len(episode.steps) - 1) + [episode.reward]


def returns(groups: list[Group], K: int, M: int) -> tuple[torch.Tensor, torch.Tensor]:
    """R_BKM, the sum of each episode's rewards, and which of them are known (PAPER-GAP 7); float64."""
    R = [torch.nan if e.reward is None else sum(rewards(e)) for e in all_episodes(groups)]
    R_BKM = torch.tensor(R, dtype=torch.float64).reshape(len(groups), K, M)
    return R_BKM, ~R_BKM.isnan()


def credit(groups: list[Group], cfg: Config, networks: dict | None = None) -> Credit:
    """Within a plan for the actor (Eq. 5), across plans for the decomposer (Eqs. 8, 9); no network is
    asked."""
    R_BKM, valid_BKM = returns(groups, cfg.plans, cfg.M)
    S_BK, valid_BK = plan_return(R_BKM, valid_BKM)
    adv_A_BKM = advantage_A(R_BKM, valid_BKM, cfg.std, cfg.std_eps)
    adv_D_BK = advantage_D(S_BK, valid_BK, cfg.std, cfg.std_eps)
    rows = {"actor": [], "decomposer": []}
    of_episode = []
    for g, group in enumerate(groups):
        for k, (plan, row) in enumerate(zip(group.plans, group.episodes, strict=True)):
            adv_D = float(adv_D_BK[g, k])
            if plan.sample is not None:
                rows["decomposer"].append(Row(plan.sample, adv_D))
            for m, e in enumerate(row):
                adv_A = float(adv_A_BKM[g, k, m])
                if e.reward is not None:
                    rows["actor"] += [Row(step.sample, adv_A, len(e.steps)) for step in e.steps]
                S_i = float(S_BK[g, k]) if valid_BK[g, k] else None
                of_episode.append({"S_i": S_i, "adv_A": adv_A, "adv_D": adv_D})
    written = [plan for group in groups for plan in group.plans if plan.sample is not None]
    shares = {"S_std": spread(S_BK, valid_BK), "zero_adv_A": share_of((adv_A_BKM == 0).all(-1)),
              "zero_adv_D": share_of((adv_D_BK == 0).all(-1)),
              "malformed_rate": (sum(plan.malformed for plan in written), len(written)),
              "truncated_A": truncated([s.sample for e in all_episodes(groups) for s in e.steps])}
    teaching = {role: [row for row in some if teaches(row, cfg)] for role, some in rows.items()}
    return Credit(teaching, shares, of_episode)


def teaches(row: Row, cfg: Config) -> bool:
    """A sample of advantage 0 has gradient 0, unless a KL term pulls at it: it is not run at all."""
    return row.adv != 0 or cfg.beta > 0


def loss(role: str, m: Micro, B: int, cfg: Config) -> tuple[torch.Tensor, dict]:
    """A micro-batch's share of L_A or L_D, for B tasks of all ranks, and sums over its tokens for the log."""
    r_NT = ratio(m.logp_NT, m.logp_old_NT)
    term_NT = clipped(r_NT, m.adv_NT, cfg.eps)
    told = {"clip": (clip_acts(r_NT, m.adv_NT, cfg.eps) * m.mask_NT).sum(), "kl": 0.0}
    if cfg.is_cap > 0:
        term_NT = term_NT * importance(m.logp_old_NT, m.logp_sampler_NT, cfg.is_cap)
    if cfg.beta > 0:
        kl_NT = kl(m.logp_NT, m.logp_ref_NT)
        term_NT = term_NT - cfg.beta * kl_NT
        told["kl"] = (kl_NT.detach() * m.mask_NT).sum()
    if role == "actor" and cfg.norm == "printed":
        return loss_A_printed(term_NT, m.mask_NT, m.T_N, B, cfg.plans, cfg.M), told
    if role == "actor":
        return loss_A(term_NT, m.mask_NT, B, cfg.plans, cfg.M, cfg.max_steps * cfg.max_tokens_A), told
    if cfg.norm == "printed":
        return loss_D_printed(term_NT, m.mask_NT, B, cfg.plans), told
    return loss_D(term_NT, m.mask_NT, B, cfg.plans, cfg.max_tokens_D), told


# ---------------------------------------------------------------------------------------- samples and updates
def draw(batch: int, tasks: list, pool: rollout.Pool, models: dict, cfg: Config, bar: str) -> list[Group]:
    """Where samples come from: K plans per task, M episodes per plan (Eqs. 1, 2), in the tasks' order."""
    groups = pool.run(tasks, cfg.plans, cfg.M, (cfg.seed, batch), models, bar=bar)
    return sorted(groups, key=lambda group: tasks.index(group.task))


def trains(batch: int, cfg: Config) -> list[str]:
    """The roles that are updated after this batch."""
    return [role.name for role in roles(cfg) if role.trained]


# ------------------------------------------------------------------------------------ the loop, of any system
def train(cfg: Config, system, world, run: Path, env, tasks: list) -> None:
    """Run `system`, a module with the names that are defined above, on the environment's tasks."""
    # 1 · each role's network with its own adapter and optimizer; who generates with them
    its_roles = system.roles(cfg)
    networks, optimizers = build(its_roles, cfg, world.device)
    engine = load_engine(cfg, its_roles, networks, run, world)

    # 2 · where a killed run stopped: nothing is lost, nothing is there twice
    done = load_checkpoint(run / "checkpoints", networks, optimizers, world)
    if world.main:
        for name in ("log.jsonl", "episodes.jsonl"):
            rewrite_jsonl(run / name, lambda line: line["batch"] < done)
    gather_objects(done, world)                           # all ranks see the same files before anybody writes
    episode_log = EpisodeLog(run)
    rollouts = schedule(tasks, cfg.epochs, world.size * cfg.tasks_per_rank, cfg.seed)
    agent = partial(system.Agent, cfg, load_prompts(cfg.prompts))
    with rollout.Pool(env, cfg, agent, its_roles) as pool:
        # 3 · plans and episodes (Eqs. 1, 2) with their rewards
        def draw_batch(i: int):
            mine = rollouts[i][world.rank::world.size]
            bar = f"batch {i + 1}/{len(rollouts)}" if world.main else ""
            drawn = partial(system.draw, i, mine, pool, engine.models, cfg, bar)
            return timed_rollout(drawn, lambda: pool.clock() + engine.clock(), cfg.threads)
        watch = Stopwatch()
        left = range(done, len(rollouts))
        for batch, told, (groups, phases) in drawn_batches(left, draw_batch, engine.sync, cfg):
            watch.lap("rollout")

            # 4 · credit: who gets how much of the rewards (Eqs. 5, 8, 9)
            learnt = system.credit(groups, cfg, networks)
            shares, faults = training_log.count(groups, its_roles)
            shares, faults = training_log.total(gather_objects((shares | learnt.shares, faults), world))
            watch.lap("sync")                             # with the slowest rank
            episode_log.append(groups, batch, learnt.of_episode)
            training_log.need_enough(shares["infra_rate"], batch, run, cfg.max_infra)

            # 5 · one update per role from the one batch (Eqs. 6, 7, 10, 11)
            watch.lap("files")
            updates = {}
            for role in (role for role in its_roles if role.name in system.trains(batch, cfg)):
                objective = partial(system.loss, role.name, B=len(rollouts[batch]), cfg=cfg)
                updates[role.mark] = update(role, networks[role.name], optimizers[role.name],
                                            learnt.rows[role.name], objective, cfg, world)
            watch.lap("update")

            # 6 · log and checkpoint; a kill between the two is undone by step 2
            line = {"batch": batch, "of": len(rollouts)} | training_log.batch_line(shares, faults, updates)
            line["loss"] = loss_joint(*(its["loss"] for its in updates.values()))
            line |= times(phases, told.pop("seconds_sync"), watch, world) | told
            watch = Stopwatch()
            gather_objects(None, world)                   # every rank's episodes are written
            if world.main:
                append_jsonl(run / "log.jsonl", [line])
                save_checkpoint(run / "checkpoints", batch + 1, networks, optimizers, cfg.keep)
                print(training_log.printed(line), flush=True)
    engine.close()
    if world.main:
        print(phase_table(run / "log.jsonl"))


# ------------------------------------------------------------------------------------------------------- main
def main(cfg: Config, system=sys.modules[__name__]) -> None:
    torch.set_num_threads(cfg.cpu_threads)
    cfg = ready(cfg, system)                              # what is missing is said before anything is written
    env = load_environment(cfg)
    tasks = env.tasks(cfg.split)
    free = (*FREE, *(f"{role.name}_url" for role in system.roles(cfg)))
    with process_group() as world, open_run(cfg.run_dir, cfg, world, free) as run:
        train(cfg, system, world, run, env, tasks)
    env.close()


def ready(cfg: Config, system) -> Config:
    """Each role's stage-2 run becomes its checkpoint. UserError for what roles or texts lack."""
    need_names(system)
    load_prompts(cfg.prompts)
    return with_checked_roles(cfg, system.roles)


def dry_run(cfg: Config, system=sys.modules[__name__]) -> None:
    """What a run would do, and the most it can take."""
    cfg = ready(cfg, system)
    env = load_environment(cfg)
    with process_group() as world:
        rollouts = schedule(env.tasks(cfg.split), cfg.epochs, world.size * cfg.tasks_per_rank, cfg.seed)
        if world.main:
            print(training_log.foretold(cfg, system.roles(cfg), rollouts))
    env.close()


def launch_system(system) -> None:
    """Run a system as a program: systems/NAME.py ends with `launch_system(sys.modules[__name__])`."""
    launch(partial(main, system=system), dry_run=partial(dry_run, system=system),
           config=lambda argv: system.Config)


if __name__ == "__main__":
    launch_system(sys.modules[__name__])
