"""Stage 4: success rates of a system on an environment's held-out tasks (sections 4.1-4.4, table 1).

    python evaluate.py --preset demo --run_dir runs/demo/eval_sft                   # both roles after stage 2
    python evaluate.py --preset demo --run_dir runs/demo/eval_rl --adapters runs/demo    # after stage 3
    python evaluate.py --actor SFT_A --decomposer SFT_D --adapters runs/grpo --tasks TASKS --sites sites.json
        --judge_model JUDGE                         # one GPU of 80 GB (not run); hours: as the sites answer

Systems: decomposer and actor; with --use_plan false an actor alone; each of them in process (--actor DIR) or
on an OpenAI-compatible server (--actor_model NAME --actor_url http://HOST/v1); a native agent of others, by
--dialect, --coordinates, --prompts and --use_plan false (the untrained Qwen2.5-VL: --dialect qwen and no
--prompts); a planner with a grounder (--planner_model, ...).
In:  stage 2's checkpoints, stage 3's run directory for the adapters, or servers; an environment's tasks.
Out: RUN/episodes.jsonl + shots/ (fields: records/episode_log.py, and `commit`, the code that ran it);
     RUN/result.json: success and its standard error (clustered by task) per site and over all tasks, by every
     evaluator profile from the same episodes, with n, n_infra, n_unknown, n_unparsable; and what it takes to
     believe them: system, judge, prompts_hash, commit, config.
One plan per episode at temperature 0, actor at temperature 0 (PAPER-GAP 14), at most 15 steps. Tasks run at
once, but in the file's order where one would find what another left on a site without a reset. An episode
with a verdict is never run again; one without (infra: something broke; unknown: the judge did not say) is run
again by the next call, and never averaged in.
"""

import argparse
import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from language import dialects
from language.prompts import Prompts, fill, load_prompts
from model.backbone import need_model
from model.paths import find_adapters, with_models
from model.policy import Policy
from model.remote import PlannerGrounder, PlannerPrompts, Remote
from model.roles import Role
from records.episode_log import EpisodeLog
from records.results import counts, mean_and_se, scores_by_task
from rollout import Pool
from runtime import (
    DTYPES,
    UserError,
    check,
    code_version,
    launch,
    open_run,
    read_jsonl,
    rewrite_jsonl,
    write_atomic,
)
from runtime.systems import load_system
from web.environment import RolloutConfig, load_environment


@dataclass(frozen=True)
class Config(RolloutConfig):
    run_dir: str = "runs/eval"           # result directory; the same one again goes on where it stopped
    actor: str = ""                      # the actor's checkpoint directory, or its stage-2 run
    decomposer: str = ""                 # the decomposer's checkpoint directory, or its stage-2 run
    system: str = "grpo_hier"            # whose agent: the paper's, or that of systems/NAME.py
    adapters: str = ""                   # stage 3's run: its newest checkpoint, or one; "" for none (w/o RL)
    actor_model: str = ""                # the actor's name on a server, instead of --actor
    actor_url: str = ""                  # the actor's server, ".../v1"; "": OpenAI's; key: $ACTOR_API_KEY
    decomposer_model: str = ""           # the decomposer's name on a server, instead of --decomposer
    decomposer_url: str = ""             # the decomposer's server; key: $DECOMPOSER_API_KEY
    planner_model: str = ""              # planner + grounder: who decides, in words, instead of an actor
    planner_url: str = ""                # the planner's server; key: $PLANNER_API_KEY
    grounder_model: str = ""             # planner + grounder: who finds the place on the screenshot
    grounder_url: str = ""               # the grounder's server; key: $GROUNDER_API_KEY
    api: str = "chat"                    # protocol of the models' servers: chat or responses
    actor_earlier: int = 0               # earlier steps that a remote actor sees again (UI-TARS: 4)
    planner_earlier: int = 15            # earlier steps that the planner sees again
    min_pixels: int = 3136               # a remote actor's or grounder's image processor, as ScaleCUA's
    max_pixels: int = 2109744            # its upper limit; 0: its image is the screenshot, not resized
    model_timeout: float = 120.0         # s, an answer of a server, asked for four times at most
    think: bool = False                  # ask the actor for <think> as well
    literal: bool = False                # keep backslash-n in ScaleCUA's prompts, as its evaluation does
    split: str = "lite_v2"               # which of the environment's tasks
    also: str = "scalecua_v2"            # webarena: published profiles to score the same episodes by
    runs: int = 4                        # independent runs of every task, sec. 4.3
    use_plan: bool = True                # false: no decomposer (table 2); a planner never has one
    temperature_D: float = 0.0           # of the plan, sec. 4.3; below 0 (servers only): the server's own
    temperature_A: float = 0.0           # of the actions (PAPER-GAP 14); below 0: as temperature_D
    max_tokens_D: int = 512              # new tokens of a plan
    max_tokens_A: int = 512              # new tokens of an action
    lora_r: int = 32                     # r of the adapters
    lora_alpha: int = 64                 # α of the adapters
    dtype: str = "bfloat16"              # of the frozen base
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # torch device
    max_missing: float = 0.2             # fail when more than this share of the episodes has no verdict
    seed: int = 0                        # of every random draw

    def __post_init__(self):
        super().__post_init__()
        check(self, "runs", "lora_r", "max_tokens_D", "max_tokens_A", dtype=DTYPES, api=("chat", "responses"))


FREE = ("threads", "max_batch", "device", "actor_url", "decomposer_url", "planner_url", "grounder_url",
        "browser_ws", "model_timeout", "judge_base_url", "max_missing", "retries",
        "retry_wait")                             # may differ on resumption


# ----------------------------------------------------------------------------------------------- the system
def planned(cfg: Config) -> bool:
    """Whether a planner and a grounder play the actor."""
    return bool(cfg.planner_model or cfg.grounder_model)


def roles_of(cfg: Config) -> list[Role]:
    """The models that are asked: of another system its own roles, else the paper's, or planner and
    grounder."""
    if cfg.system != "grpo_hier":
        return [role for role in load_system(cfg.system).roles(cfg) if role.kind != "critic"]
    if planned(cfg):
        return [papers_role("planner", cfg), papers_role("grounder", cfg)]
    return [papers_role("actor", cfg)] + [papers_role("decomposer", cfg)] * cfg.use_plan


def papers_role(name: str, cfg: Config) -> Role:
    model = getattr(cfg, f"{name}_model")
    temperature, max_tokens = cfg.temperature_A, cfg.max_tokens_A
    if name == "decomposer":
        temperature, max_tokens = cfg.temperature_D, cfg.max_tokens_D
    return Role(name, getattr(cfg, name, ""), kind="server" if model else "policy", model=model,
                urls=getattr(cfg, f"{name}_url"), temperature=temperature, max_tokens=max_tokens)


def need(cfg: Config) -> None:
    """Raises UserError for what the models and texts of `cfg` lack; loads no weights."""
    load_texts(cfg)
    if cfg.dialect != "scalecua" and planned(cfg):
        raise UserError(f"--dialect {cfg.dialect} is for an actor; a planner writes our calls")
    for role in roles_of(cfg):
        if role.kind == "server":
            load_model(cfg, role)                         # a client, which says what is wrong with its key
            continue
        if planned(cfg):
            raise UserError(f"--{role.name}_model is missing: a planner and a grounder go together")
        if not role.checkpoint:
            raise UserError(f"--{role.name} is missing: give the directory of the {role.name}'s stage-2 "
                            f"checkpoint, or --{role.name}_model and --{role.name}_url for a model on a "
                            f"server")
        if role.temperature < 0:
            raise UserError("a temperature below 0 is for models on servers; give 0 or more")
        if cfg.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device {cfg.device}: torch sees no GPU here; give --device cpu")
        need_model(role.checkpoint)


def load_texts(cfg: Config) -> Prompts:
    """The texts of --prompts; without it, those that the dialect's models know."""
    own = {} if cfg.prompts else dialects.PROMPTS.get(cfg.dialect, {})
    return load_prompts(cfg.prompts, cfg.think, cfg.literal, **own)


def with_screen(texts: Prompts, cfg: Config, env, actor) -> Prompts:
    """{width} and {height} in the actor's system text become those of the space that it counts coordinates
    in."""
    if actor is None or not any("{width}" in text for text in texts.texts.values()):
        return texts
    model = actor if isinstance(actor, Remote) else actor.__self__.inputs     # Policy.sample's own
    shot = model.resized(round(env.width * env.scale), round(env.height * env.scale))
    width, height = dialects.space(cfg.coordinates)(shot, (env.width, env.height))
    filled = {name: fill(text, width=width, height=height) for name, text in texts.texts.items()
              if name.startswith("actor_system")}
    return dataclasses.replace(texts, texts=texts.texts | filled)


def load_models(cfg: Config, texts: Prompts) -> dict:
    """The models by role, as Pool.run takes them."""
    models = {role.name: load_model(cfg, role) for role in roles_of(cfg)}
    if planned(cfg):
        return {"actor": PlannerGrounder(models["planner"], models["grounder"], texts)}
    return models


def load_model(cfg: Config, role: Role):
    """A model on a server where it has a name there, else the policy of a checkpoint directory."""
    if role.kind == "server":
        earlier = getattr(cfg, f"{role.name}_earlier", 0)
        return Remote(role.name, role.model, role.urls, cfg.api, cfg.threads, earlier, cfg.min_pixels,
                      cfg.max_pixels, cfg.model_timeout)
    policy = Policy(role.checkpoint, role.name, cfg.lora_r, cfg.lora_alpha, device=cfg.device,
                    dtype=cfg.dtype)
    if cfg.adapters:
        policy.load(Path(cfg.adapters, role.name))
    return policy.sample


def with_checkpoints(cfg: Config) -> Config:
    """Run directories become their newest checkpoints, so that what is written down is what was tested."""
    local = [role.name for role in roles_of(cfg) if role.kind == "policy"]
    cfg = with_models(cfg, *(name for name in local if hasattr(cfg, name)))
    return dataclasses.replace(cfg, adapters=find_adapters(cfg.adapters, local)) if cfg.adapters else cfg


def describe_system(cfg: Config) -> str:
    """`actor NAME or DIR (+ adapters DIR), decomposer ...`, in one line."""
    tuned = f" + adapters {cfg.adapters}" if cfg.adapters else ""
    system = "" if cfg.system == "grpo_hier" else f"{cfg.system}: "
    return system + ", ".join(f"{role.name} " + (role.model or f"{role.checkpoint}{tuned}")
                              for role in roles_of(cfg))


# ------------------------------------------------------------------------------------------------- the order
def waves(tasks: list) -> list[list]:
    """The tasks in groups that run one after the other, each of them at once: on its site, a task that leaves
    traces runs alone, after those before it in the file and before those after it."""
    number, out = Counter(), {}                   # of a site's present wave: even, its readers; odd, a writer
    for task in tasks:
        out.setdefault(number[task.site] + task.leaves_traces, []).append(task)
        number[task.site] += 2 * task.leaves_traces
    return [out[n] for n in sorted(out)]


# ------------------------------------------------------------------------------------------------ the result
def summarise(lines: list[dict]) -> dict:
    """Success per site and over all tasks: mean over tasks of their means, its standard error, and counts."""
    def rate(rows):
        success, se = mean_and_se(scores_by_task(rows).values())
        known = {k: None if math.isnan(v) else v for k, v in (("success", success), ("se", se))}
        return known | counts(rows)
    sites = sorted({line["site"] for line in lines})
    return rate(lines) | {"sites": {site: rate([line for line in lines if line["site"] == site])
                                    for site in sites}}


def make_result(cfg: Config, lines: list[dict], texts: Prompts) -> dict:
    """result.json: the summary by the profile that gives the reward, by all profiles, and the provenance.

    MiniWoB++ has one rule that gives the reward, and beside it the `raw>0` of published numbers.
    """
    profiles = sorted({name for line in lines for name in line["rewards"]})
    by_profile = {name: summarise([line | {"reward": line["rewards"].get(name)} for line in lines])
                  for name in profiles}
    own = "any raw reward above 0 (--any_reward)" if cfg.any_reward else "the environment's own"
    judged = cfg.profile in profiles
    return {"system": describe_system(cfg), "profile": cfg.profile if judged else own,
            "judge": cfg.judge_model if judged else "", "prompts_hash": texts.digest(),
            "commit": ", ".join(sorted({line.get("commit", "") for line in lines})),
            **summarise(lines), "profiles": by_profile,
            "faults": dict(Counter(line["fault"] for line in lines if line["fault"])),
            "config": dataclasses.asdict(cfg)}


def show(result: dict) -> None:
    """One line per site, one for all, and one for each further profile."""
    others = {f"all, by {name}": row for name, row in result["profiles"].items() if name != result["profile"]}
    for site, row in {**result["sites"], "all": result, **others}.items():
        shown = "no verdict" if row["success"] is None else f"{100 * row['success']:5.1f} %"
        spread = "" if row["se"] is None else f" ± {100 * row['se']:.1f}"
        print(f"{site:24} {shown}{spread:7}   n {row['n']}, infra {row['n_infra']}, "
              f"unknown {row['n_unknown']}, unparsable {row['n_unparsable']}")


# ------------------------------------------------------------------------------------------------------ main
def dry_run(cfg: Config) -> None:
    """What an evaluation would run, and what of it is done."""
    cfg = with_checkpoints(cfg)
    need(cfg)
    env = load_environment(cfg)
    tasks, file = env.tasks(cfg.split), Path(cfg.run_dir, "episodes.jsonl")
    done = sum(line["reward"] is not None for line in read_jsonl(file))
    print(f"{describe_system(cfg)}\n{cfg.env} {cfg.split}: {len(tasks)} tasks x {cfg.runs} runs = "
          f"{len(tasks) * cfg.runs} episodes of at most {cfg.max_steps} actions, in {cfg.threads} browsers\n"
          f"{cfg.run_dir}: {done} episodes are there already; sites, judge: python -m sites.webarena check")
    env.close()


def config_of(argv: list[str]):
    """The settings of an evaluation; of another system's, its own as well: those that `roles` and Agent
    read."""
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--system", default="grpo_hier")
    name = chosen.parse_known_args(argv)[0].system
    if name == "grpo_hier":
        return Config
    system = load_system(name)
    own = [(f.name, f.type, f.default) for f in dataclasses.fields(system.Config) if f.name == "use_plan"]
    both = dataclasses.make_dataclass("Config", own, bases=(Config, system.Config), frozen=True)
    both.__module__ = __name__
    return both


def main(cfg: Config) -> None:
    torch.set_num_threads(cfg.cpu_threads)
    cfg = with_checkpoints(cfg)
    need(cfg)                                             # what is missing is said before anything is written
    env = load_environment(cfg)
    tasks = env.tasks(cfg.split)
    with open_run(cfg.run_dir, cfg, free=FREE) as run:
        episodes = run / "episodes.jsonl"
        texts = load_texts(cfg)
        models = load_models(cfg, texts)
        texts = with_screen(texts, cfg, env, models.get("actor"))
        roles = [role for role in roles_of(cfg) if role.name in models]
        if planned(cfg):
            texts = PlannerPrompts(texts.texts)
            roles = [papers_role("actor", cfg)]

        # what an earlier call finished stays; what broke is run again
        done = rewrite_jsonl(episodes, lambda line: line["reward"] is not None)
        seen = {(line["task"], line["run"]) for line in done}
        log, commit = EpisodeLog(run), code_version()
        with Pool(env, cfg, partial(load_system(cfg.system).Agent, cfg, texts), roles) as pool:
            for r in range(cfg.runs):
                todo = [task for task in tasks if (task.id, r) not in seen]
                for wave in waves(todo):
                    bar = f"{run.name} run {r + 1}/{cfg.runs}"
                    for group in pool.run(wave, 1, 1, cfg.seed, models, runs=(r,), bar=bar):
                        log.append([group], beside=[{"commit": commit}])
        env.close()
        result = make_result(cfg, rewrite_jsonl(episodes, lambda line: True), texts)
        write_atomic(run / "result.json", json.dumps(result, indent=1) + "\n")
    show(result)
    missing = result["n_infra"] + result["n_unknown"]
    if missing > cfg.max_missing * (result["n"] + missing):
        raise UserError(f"{missing} of {result['n'] + missing} episodes have no verdict ({result['faults']}, "
                        f"--max_missing {cfg.max_missing}); see {episodes}, then run the same command again")


if __name__ == "__main__":
    launch(main, dry_run=dry_run, config=config_of)
