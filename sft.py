"""Stage 2: supervised fine-tuning of one role (sections 3.3, 4.3; Eqs. 3 and 4).

    python sft.py --preset demo --role decomposer      # CPU, tiny model: 2 minutes, the actor 3
    torchrun --nproc_per_node=8 sft.py --role decomposer --model QWEN --meta M.json --decompositions D.jsonl
    torchrun --nproc_per_node=8 sft.py --role actor --model QWEN --meta M.json --decompositions D.jsonl
    --use_plan false trains the actor without subtasks, which two rows of table 2 start from

In:  GUI records in ScaleCUA's form (formats: trajectories.py) and the decompositions.jsonl of stage 1.
Out: RUN/hf, a plain Hugging Face directory; RUN/log.jsonl (one object per optimizer step); RUN/checkpoints/N.
Decomposer: (x, o_0) -> d, one example per trajectory. Actor: (x, o_t, h_t, d) -> a_t, one per record.

On several ranks the model is sharded by FSDP2 (the paper's ZeRO-3): float32 masters, bfloat16 compute,
float32 reduction. The loss is the mean over all target tokens of an optimizer step, whatever the ranks and
micro-batches. PAPER-GAP 9: everything trains; `--freeze_vision` freezes the vision blocks. PAPER-GAP 10: the
decomposer writes the numbered list that the actor reads. PAPER-GAP 11: the history holds operation texts,
else action calls.
"""

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from tqdm import tqdm

import trajectories
from policy import Inputs, forward_hidden, load_model, token_logp
from prompts import Subtask, format_plan, load_prompts
from runtime import (UserError, append_jsonl, atomic_directory, drop_old_checkpoints, gather_objects, launch,
                     latest_checkpoint, open_run, process_group, rewrite_jsonl)

# N examples of a micro-batch, S positions of a padded row, T target tokens, n of all examples


@dataclass(frozen=True)
class Config:
    role: str                            # decomposer or actor
    model: str = "Qwen2.5-VL-7B-Instruct"  # checkpoint directory to start from, sec. 3.3
    meta: str = "meta.json"              # ScaleCUA meta file, or several separated by commas
    decompositions: str = "decompositions.jsonl"  # stage 1's output
    run: str = "runs/sft_{role}"         # run directory; the same one again goes on where it stopped
    prompts: str = ""                    # JSON file that replaces texts of prompts.py
    use_plan: bool = True                # false: the actor's prompts carry no subtasks (table 2)
    epochs: int = 1                      # sec. 4.3
    max_steps: int = 0                   # optimizer steps, overrides epochs when positive
    lr: float = 1e-5                     # peak learning rate, sec. 4.3
    warmup_ratio: float = 0.03           # share of the steps that warm up, then cosine to 0, sec. 4.3
    batch_size: int = 2                  # examples per micro-batch and rank, sec. 4.3
    accumulation: int = 4                # micro-batches per optimizer step, sec. 4.3
    weight_decay: float = 0.0            # AdamW
    max_norm: float = 1.0                # gradient clip by the global norm, sec. 4.3
    max_length: int = 30720              # tokens; longer examples are dropped whole and counted, sec. 4.3
    freeze_vision: bool = False          # train merger and language model only (PAPER-GAP 9)
    dtype: str = "bfloat16"              # compute; masters and optimizer state are float32
    checkpointing: bool = True           # recompute activations in the backward pass, sec. 4.3
    save_every: int = 500                # optimizer steps between checkpoints
    keep: int = 2                        # checkpoints kept
    seed: int = 0                        # of every random draw


# -------------------------------------------------------------------------------------------------- equations
def loss_sft(logp_n, n_tokens: int):
    """Eqs. 3, 4: L^SFT = -Σ log π(target | context), here per token: divided by the step's n_tokens.

    The decomposer's targets are plans d given (x, o_0); the actor's are actions a_t given (x, o_t, h_t, d).
    """
    assert logp_n.dim() == 1
    return -logp_n.sum() / n_tokens


# --------------------------------------------------------------------------------------------------- examples
@dataclass(frozen=True)
class Example:
    """One prompt with its target: a plan's text, or the step whose action is to be learnt."""
    system: str
    user: str
    image: Path
    plan: str = ""
    step: trajectories.Record | None = None


def examples(cfg: Config) -> list[Example]:
    """All examples of the role, in file order. Raises UserError when there is nothing to learn from."""
    prompts = load_prompts(cfg.prompts)
    records = list(trajectories.read_records(cfg.meta, repeat=cfg.role == "actor"))
    plans = {}
    if cfg.use_plan:
        plans = {id: format_plan([Subtask(*s) for s in subtasks])
                 for id, subtasks in trajectories.load_decompositions(cfg.decompositions).items()}
    planned = [t for t in trajectories.build_trajectories(records) if t.id in plans]
    if cfg.role == "actor":
        plan_at = {step.where: plans[t.id] for t in planned for step in t.steps}
        out = [Example(*prompts.actor(r.instruction, r.history, plan_at.get(r.where, "")), r.image, step=r)
               for r in records if r.calls]
    else:
        out = [Example(*prompts.decomposer(t.instruction), t.steps[0].image, plan=plans[t.id])
               for t in planned]
    if not out:
        raise UserError(f"no examples for the {cfg.role}: {cfg.meta} and {cfg.decompositions} have no "
                        f"trajectory in common; run annotate.py on this data first")
    return out


@dataclass
class Encoded:
    prompt_ids: list[int]
    target_ids: list[int]                # closing <|im_end|> included: it is learnt like every other token
    png: bytes


def encode(example: Example, inputs: Inputs) -> Encoded:
    """Example -> ids. The actor's coordinates become pixels of the image as the model sees it."""
    png = example.image.read_bytes()
    prompt_ids, size = inputs.encode(example.system, example.user, png)
    target = action_text(example.step, size) if example.step else example.plan
    return Encoded(prompt_ids,
                   inputs.tokenizer(target, add_special_tokens=False)["input_ids"] + [inputs.end_id], png)


def action_text(step: trajectories.Record, size: tuple[int, int]) -> str:
    """What the actor is to write: thought and operation where the record has them,
    then the calls in pixels of `size`."""
    parts = {"think": step.think, "operation": step.operation, "action": step.action(*size)}
    return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag, text in parts.items() if text)


def order_of(n: int, epoch: int, seed: int) -> list[int]:
    """The epoch's order of n examples: a function of (seed, epoch) alone."""
    return random.Random(f"{seed} {epoch}").sample(range(n), n)


# -------------------------------------------------------------------------------------------------- the model
class TargetLogp(nn.Module):
    """The model as training needs it: inputs -> log π of the target tokens.

    A module, so that FSDP2 gathers around it.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs: dict, prompt_lengths: list[int], target_lengths: list[int], banned):
        """(n,) log-probs of the targets of a right-padded micro-batch; only their positions are projected."""
        h_NSH = forward_hidden(self.model, inputs)
        where = [(i, slice(p, p + t)) for i, (p, t) in enumerate(zip(prompt_lengths, target_lengths))]
        h = torch.cat([h_NSH[i, s.start - 1:s.stop - 1] for i, s in where])
        y = torch.cat([inputs["input_ids"][i, s] for i, s in where])
        return token_logp(h, self.model.lm_head.weight, y, 1.0, banned)


def build(cfg: Config, world):
    """Model, ready to train on this rank: trainable float32 parameters, sharded where there are several."""
    model = load_model(cfg.model, world.device, "float32")
    if cfg.freeze_vision:
        model.model.visual.blocks.requires_grad_(False)
        model.model.visual.patch_embed.requires_grad_(False)
    if cfg.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module = TargetLogp(model.train())
    if world.size > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, cfg.dtype), reduce_dtype=torch.float32)
        for block in [*model.model.language_model.layers, *model.model.visual.blocks]:
            fully_shard(block, mp_policy=precision)
        fully_shard(module, mp_policy=precision)
    return module


def learning_rate(step: int, steps: int, cfg: Config) -> float:
    """Linear warm-up over warmup_ratio of the steps, then cosine to 0."""
    warmup = max(1, round(cfg.warmup_ratio * steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def step_(module, optimizer, lr: float, max_norm: float) -> float:
    """Clip, step with learning rate `lr`, clear the gradients; returns the norm before the clip."""
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# ------------------------------------------------------------------------------------------------ bookkeeping
def save(directory: Path, step: int, module, optimizer, world, keep: int) -> None:
    """Sharded checkpoint of model and optimizer after `step` steps: complete or not there at all."""
    model_state, optimizer_state = get_state_dict(module, optimizer)
    with atomic_directory(directory / f"{step:06d}", world) as tmp:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp)
    if world.main:
        drop_old_checkpoints(directory, keep)


def restore(directory: Path, module, optimizer) -> int:
    """Load the newest checkpoint, if there is one, also on another number of ranks; returns its step."""
    newest = latest_checkpoint(directory)
    if newest is None:
        return 0
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(newest.name)


def export(module, inputs: Inputs, directory: Path, dtype, world) -> None:
    """The whole model as a Hugging Face directory: weights, tokenizer, chat template, image processor."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.main:
        with atomic_directory(directory) as tmp:
            state = {k.removeprefix("model."): v.to(getattr(torch, dtype)) for k, v in state.items()}
            module.model.config.dtype = getattr(torch, dtype)
            module.model.save_pretrained(tmp, state_dict=state)
            inputs.tokenizer.save_pretrained(tmp)
            inputs.images.save_pretrained(tmp)


# ------------------------------------------------------------------------------------------------------- main
def main(cfg: Config) -> None:
    if cfg.role not in ("decomposer", "actor"):
        raise UserError(f"--role {cfg.role}: choose decomposer or actor")
    with process_group() as world:
        run = open_run(cfg.run, cfg, world, free=("keep", "save_every"))
        if not (run / "hf" / "config.json").exists():
            train(cfg, world, run)
        if world.main:
            print(f"{run / 'hf'} is the {cfg.role} after SFT")


def train(cfg: Config, world, run: Path) -> None:
    data = examples(cfg)
    inputs = Inputs(cfg.model)
    module = build(cfg, world)
    banned = torch.tensor([], dtype=torch.long, device=world.device)
    autocast = torch.autocast(torch.device(world.device).type, torch.bfloat16,
                              enabled=cfg.dtype == "bfloat16")

    # 1 · schedule: every step takes the next world x accumulation x batch_size examples of the epoch's order
    size = world.size * cfg.accumulation * cfg.batch_size
    per_epoch = math.ceil(len(data) / size)
    steps = cfg.max_steps or cfg.epochs * per_epoch
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=cfg.lr,
                                  weight_decay=cfg.weight_decay)
    done = restore(run / "checkpoints", module, optimizer)
    if world.main:
        rewrite_jsonl(run / "log.jsonl", lambda line: line["step"] <= done)

    bar = tqdm(total=steps, initial=done, unit="step", desc=f"SFT {cfg.role}", disable=not world.main)
    for step in range(done, steps):
        start = time.monotonic()
        epoch, at = divmod(step, per_epoch)
        chosen = order_of(len(data), epoch, cfg.seed)[at * size:(at + 1) * size]
        mine = [encode(data[i], inputs) for i in chosen[world.rank::world.size]]
        long = sum(len(e.prompt_ids) + len(e.target_ids) > cfg.max_length for e in mine)
        mine = [e for e in mine if len(e.prompt_ids) + len(e.target_ids) <= cfg.max_length]
        counts = gather_objects((sum(len(e.target_ids) for e in mine), len(mine), long), world)
        n_tokens = max(1, sum(c[0] for c in counts))
        # all ranks run the same number of micro-batches; one that has fewer repeats its last with weight 0
        micro = [mine[i:i + cfg.batch_size] for i in range(0, len(mine), cfg.batch_size)]
        rounds = max(math.ceil(c[1] / cfg.batch_size) for c in counts)
        spare = (micro or [[encode(data[0], inputs)]])[-1]

        # 2 · forward and backward per micro-batch (Eqs. 3, 4); FSDP2 averages over ranks, hence the factor
        lr = learning_rate(step, steps, cfg)
        total = 0.0
        for i in range(rounds):
            part, weight = (micro[i], 1.0) if i < len(micro) else (spare, 0.0)
            batch = inputs.batch([e.prompt_ids for e in part], [e.png for e in part],
                                 [e.target_ids for e in part], device=world.device)
            with autocast:
                logp_n = module(batch, [len(e.prompt_ids) for e in part],
                                [len(e.target_ids) for e in part], banned)
            loss = loss_sft(logp_n, n_tokens) * weight
            (loss * world.size).backward()
            total += float(loss.detach())
        norm = step_(module, optimizer, lr, cfg.max_norm)

        # 3 · log and checkpoint
        total = sum(gather_objects(total, world))
        if world.main:
            append_jsonl(run / "log.jsonl", [{
                "step": step + 1, "of": steps, "loss": total, "lr": lr, "grad_norm": norm, "tokens": n_tokens,
                "too_long": sum(c[2] for c in counts),
                "samples_per_s": len(chosen) / (time.monotonic() - start)}])
            bar.set_postfix(loss=f"{total:.3f}")
            bar.update()
        if (step + 1) % cfg.save_every == 0 or step + 1 == steps:
            save(run / "checkpoints", step + 1, module, optimizer, world, cfg.keep)
    export(module, inputs, run / "hf", cfg.dtype, world)


if __name__ == "__main__":
    launch(main)
