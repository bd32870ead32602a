"""Stage 4: success rates of a system on an environment's held-out tasks (sections 4.1-4.4, table 1).

    python evaluate.py --preset demo --run runs/demo/eval_sft                     # SFT decomposer + SFT actor
    python evaluate.py --preset demo --run runs/demo/eval_rl --adapters runs/demo     # the same after stage 3
    python evaluate.py --actor SFT_A --decomposer SFT_D --adapters runs/grpo --sites sites.json      # one GPU
    --use_plan false evaluates an actor without a decomposer

In:  stage 2's checkpoints, stage 3's run directory for the adapters, an environment's tasks.
Out: RUN/episodes.jsonl + shots/ (fields: episode_log.py), RUN/result.json: success per site and over all
     tasks, with the counts of episodes that have no verdict.
One plan per episode at temperature 0, actor at temperature 0 (PAPER-GAP 14), at most 15 steps. Episodes that
have a verdict are never run again; those that infrastructure broke are, on the next call, and are never
averaged in.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from episode_log import EpisodeLog
from policy import Policy
from prompts import load_prompts
from rollout import Pool, RolloutConfig, load_environment
from runtime import UserError, latest_checkpoint, launch, only_process, open_run, rewrite_jsonl, write_atomic


@dataclass(frozen=True)
class Config(RolloutConfig):
    run: str = "runs/eval"               # result directory; the same one again goes on where it stopped
    actor: str = ""                      # checkpoint directory of the actor
    decomposer: str = ""                 # checkpoint directory of the decomposer
    adapters: str = ""                   # stage 3's run directory: its newest adapters; "" for none (w/o RL)
    split: str = "lite_v2"               # which of the environment's tasks
    runs: int = 4                        # independent runs of every task, sec. 4.3
    use_plan: bool = True                # false: no decomposer (table 2)
    temperature_D: float = 0.0           # of the plan, sec. 4.3
    temperature_A: float = 0.0           # of the actions (PAPER-GAP 14)
    lora_r: int = 32                     # r of the adapters
    lora_alpha: int = 64                 # α of the adapters
    dtype: str = "bfloat16"              # of the frozen base
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # torch device
    seed: int = 0                        # of every random draw


def load_policies(cfg: Config) -> dict[str, Policy]:
    """The roles' policies, with stage 3's newest adapters where they are asked for."""
    policies = {}
    newest = latest_checkpoint(Path(cfg.adapters) / "checkpoints") if cfg.adapters else None
    if cfg.adapters and newest is None:
        raise UserError(f"--adapters {cfg.adapters}: no checkpoints there; "
                        f"give the run directory of grpo_hier.py")
    for role in ("actor", "decomposer") if cfg.use_plan else ("actor",):
        if not getattr(cfg, role):
            raise UserError(f"--{role} is missing: give the directory of the {role}'s stage-2 checkpoint")
        policies[role] = Policy(getattr(cfg, role), role, cfg.lora_r, cfg.lora_alpha, device=cfg.device,
                                dtype=cfg.dtype)
        if newest and (newest / role).exists():
            policies[role].load(newest / role)
    return policies


def summarise(lines: list[dict]) -> dict:
    """Success rate over the episodes that have a verdict, per site and over all (task-weighted),
    with the counts of the rest."""
    def rate(rows):
        scored = [r["reward"] for r in rows if r["reward"] is not None]
        return {"success": sum(scored) / len(scored) if scored else None, "n": len(scored),
                "n_infra": len(rows) - len(scored),
                "n_unparsable": sum(r["status"] == "unparsable" for r in rows)}
    sites = sorted({line["site"] for line in lines})
    return rate(lines) | {"sites": {site: rate([line for line in lines if line["site"] == site])
                                    for site in sites}}


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.cpu_threads)
    run = open_run(cfg.run, cfg, free=("threads", "max_batch", "device"))
    with only_process(run / "episodes.jsonl"):
        policies = load_policies(cfg)
        env = load_environment(cfg)
        done = rewrite_jsonl(run / "episodes.jsonl", lambda line: line["reward"] is not None)
        seen = {(line["task"], line["run"]) for line in done}
        log = EpisodeLog(run)
        with Pool(env, load_prompts(cfg.prompts), cfg) as pool:
            for r in range(cfg.runs):
                tasks = [task for task in env.tasks(cfg.split) if (task.id, r) not in seen]
                for group in pool.run(tasks, 1, 1, cfg.seed, {role: p.sample for role, p in policies.items()},
                                      cfg.use_plan, runs=(r,), bar=f"{run.name} run {r + 1}/{cfg.runs}"):
                    log.append([group])
        env.close()
        result = summarise(rewrite_jsonl(run / "episodes.jsonl", lambda line: True))
        write_atomic(run / "result.json",
                     json.dumps({"config": dataclasses.asdict(cfg)} | result, indent=1) + "\n")
    for site, row in {**result.pop("sites"), "all": result}.items():
        shown = "no verdict" if row["success"] is None else f"{100 * row['success']:5.1f} %"
        print(f"{site:24} {shown}   n {row['n']}, infra {row['n_infra']}, unparsable {row['n_unparsable']}")


if __name__ == "__main__":
    launch(main)
