"""Stage 2: supervised fine-tuning of one role (sections 3.3, 4.3; Eqs. 3 and 4).

    python sft.py --preset demo --role decomposer      # CPU, tiny model: 1 minute, the actor 2
    torchrun --nproc_per_node=8 sft.py --role decomposer --model QWEN --meta M.json --decompositions D.jsonl
    torchrun --nproc_per_node=8 sft.py --role actor --model QWEN --meta M.json --decompositions D.jsonl
    --use_plan false trains the actor without subtasks, which two rows of table 2 start from
    python sft.py export RUN                        # RUN/hf_so_far from an unfinished run's newest checkpoint

In:  GUI records in ScaleCUA's form (records/trajectories.py) and the decompositions.jsonl of stage 1.
Out: RUN/hf, a plain Hugging Face directory; RUN/log.jsonl (one object per optimizer step) and RUN/eval.jsonl;
RUN/quarantine.jsonl (what was left out, and why); RUN/checkpoints/N; RUN/index.npy (records/examples.py).
Decomposer: (x, o_0) -> d, one example per trajectory. Actor: (x, o_t, h_t, d) -> a_t, one per record.

A 7B takes 16 bytes a parameter while it trains (133 GB): eight GPUs of 80 GB, 44 GB each (`--dry_run`).
On several ranks the model is sharded by FSDP2 (the paper's ZeRO-3): float32 masters, bfloat16 compute,
float32 reduction. The loss is the mean over all target tokens of an optimizer step, which takes the next
`global_batch` examples; ranks, packing and micro-batches change nothing but rounding. PAPER-GAP 9: everything
trains; `--freeze_vision` freezes the vision blocks. PAPER-GAP 10: the decomposer writes the numbered list
that the actor reads. PAPER-GAP 11: the history holds operation texts, else action calls.
"""

import contextlib
import math
import os
import resource
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tqdm import tqdm

from language.plans import Subtask, format_plan
from language.prompts import load_prompts
from model import flops
from model.attention import pieces_to, separate_records
from model.backbone import forward_hidden, load_model, need_model, parameter_count, recompute_activations
from model.inputs import Inputs
from model.paths import alone, load_sharded, need_room, with_models
from model.policy import token_logp
from records import examples, trajectories
from runtime import (
    DTYPES,
    UserError,
    World,
    append_jsonl,
    atomic_directory,
    check,
    drop_old_checkpoints,
    gather_objects,
    latest_checkpoint,
    launch,
    open_run,
    process_group,
    read_settings,
    rewrite_jsonl,
)

# N rows of a micro-batch, S positions of a row, n target tokens of all examples


@dataclass(frozen=True)
class Config:
    role: str                            # decomposer or actor
    model: str = "Qwen2.5-VL-7B-Instruct"  # checkpoint to start from, or a stage-2 run, sec. 3.3
    meta: str = "meta.json"              # ScaleCUA meta file, or several separated by commas
    decompositions: str = "decompositions.jsonl"  # stage 1's output
    run_dir: str = "runs/sft_{role}"     # run directory; the same one again goes on where it stopped
    prompts: str = ""                    # JSON file that replaces texts of language/texts.py
    use_plan: bool = True                # false: the actor's prompts carry no subtasks (table 2)
    epochs: int = 1                      # sec. 4.3
    max_steps: int = 0                   # optimizer steps, overrides epochs when positive
    lr: float = 1e-5                     # peak learning rate, sec. 4.3
    warmup_ratio: float = 0.03           # share of the steps that warm up, then cosine to 0, sec. 4.3
    global_batch: int = 64               # examples per optimizer step: 2 x 4 accumulated x 8 GPUs, sec. 4.3
    weight_decay: float = 0.0            # AdamW
    max_norm: float = 1.0                # gradient clip by the global norm, sec. 4.3
    max_length: int = 30720              # tokens; longer examples are dropped whole and counted, sec. 4.3
    freeze_vision: bool = False          # train merger and language model only (PAPER-GAP 9)
    dtype: str = "bfloat16"              # compute; masters and optimizer state are float32
    seed: int = 0                        # of every random draw
    held_out: int = 0                    # trajectories of each kind of data kept for evaluation
    eval_every: int = 500                # optimizer steps between evaluations
    packing: bool = True                 # several records per row, none sees another; false: padded rows
    row_tokens: int = 30720              # positions of a packed row
    batch_size: int = 2                  # examples per micro-batch without packing
    checkpointing: bool = True           # recompute activations in the backward pass, sec. 4.3
    workers: int = 4                     # processes per rank that read and encode ahead; 0: none
    save_every: int = 500                # optimizer steps between checkpoints
    keep: int = 2                        # checkpoints kept

    def __post_init__(self):
        check(self, "epochs", "global_batch", "max_length", "row_tokens", "batch_size", "eval_every",
              "save_every", role=("decomposer", "actor"), dtype=DTYPES)


# what a run may change when it goes on: these touch memory, speed and what is looked at, never the weights
FREE = ("eval_every", "packing", "row_tokens", "batch_size", "checkpointing", "workers", "save_every", "keep")


# -------------------------------------------------------------------------------------------------- equations
def loss_sft(logp_n, n_tokens: int):
    """Eqs. 3, 4: L^SFT = -Σ log π(target | context), here per token: divided by the step's n_tokens.

    The decomposer's targets are plans d given (x, o_0); the actor's are actions a_t given (x, o_t, h_t, d).
    """
    assert logp_n.dim() == 1
    return -logp_n.sum() / n_tokens


# ------------------------------------------------------------------------------------------------------- data
def datasets(cfg: Config, inputs: Inputs, world, run: Path) -> tuple[examples.Steps, examples.Steps]:
    """(optimizer steps, held-out ones) of this rank. Raises UserError when there is nothing to learn from."""
    plans = {}
    if cfg.use_plan or cfg.role == "decomposer":
        plans = {id: format_plan([Subtask(*s) for s in subtasks])
                 for id, subtasks in trajectories.load_decompositions(cfg.decompositions).items()}
    if world.main and not (run / "index.npy").exists():
        examples.write_index(run / "index.npy", cfg.role, cfg.meta, plans, inputs,
                         trajectories.Quarantine(run / "quarantine.jsonl"))
    gather_objects(None, world)
    table = examples.read_index(run / "index.npy", plans)
    rows, held = examples.split(table, cfg.held_out, cfg.seed)
    if not len(rows):
        raise UserError(f"no examples for the {cfg.role}: {cfg.meta} and {cfg.decompositions} have no "
                        f"trajectory in common, or --held_out {cfg.held_out} left none; "
                        f"run annotate.py on this data first (and remove {run})")
    source = examples.Source(table, cfg.role, cfg.meta, list(plans.values()), load_prompts(cfg.prompts),
                         load_prompts(cfg.prompts, think=True), inputs, cfg.max_length,
                         getattr(torch, cfg.dtype))
    shape = examples.Shape(cfg.packing, cfg.row_tokens, cfg.batch_size)
    return (examples.Steps(source, rows, cfg.global_batch, shape, world.rank, world.size, cfg.seed),
            examples.Steps(source, held, cfg.global_batch, shape, world.rank, world.size, None))


# -------------------------------------------------------------------------------------------------- the model
class TargetLogp(nn.Module):
    """The model as training needs it: a micro-batch of examples.collate -> log π of its target tokens.

    A module, so that FSDP2 gathers around it.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch: dict):
        """(n,) log-probs of the targets; only the positions that predict them are projected."""
        h_NSH = forward_hidden(self.model, batch["inputs"] | {"pieces": batch["pieces"]})
        y = batch["y"]
        return token_logp(h_NSH.flatten(0, 1)[batch["where"]], self.model.lm_head.weight, y, 1.0, y[:0])

    def generate(self, inputs: dict, settings):
        return self.model.generate(**inputs, generation_config=settings, synced_gpus=False)


def build(cfg: Config, world):
    """Model, ready to train on this rank: trainable float32 parameters, sharded where there are several."""
    model = separate_records(load_model(cfg.model, world.device, "float32"))
    if cfg.freeze_vision:
        model.model.visual.blocks.requires_grad_(False)
        model.model.visual.patch_embed.requires_grad_(False)
    if cfg.checkpointing:
        recompute_activations(model)
    module = TargetLogp(model.train())
    return shard(module, getattr(torch, cfg.dtype)) if world.size > 1 else module


def shard(module: TargetLogp, dtype: torch.dtype) -> TargetLogp:
    """FSDP2 over all ranks, one group of parameters per decoder layer and vision block, the rest in one."""
    precision = {"param_dtype": dtype, "reduce_dtype": torch.float32}
    # a block's inputs keep their dtype: the vision tower's rotary angles are float32
    inner = MixedPrecisionPolicy(**precision, cast_forward_inputs=False)
    for block in [*module.model.model.language_model.layers, *module.model.model.visual.blocks]:
        fully_shard(block, mp_policy=inner)
    fully_shard(module, mp_policy=MixedPrecisionPolicy(**precision))
    register_fsdp_forward_method(module, "generate")
    return module


def on_device(batch: dict, device) -> dict:
    """What the module needs of a micro-batch, on `device`."""
    move = lambda t: t.to(device, non_blocking=True)
    return {"inputs": {k: move(t) for k, t in batch["inputs"].items()}, "y": move(batch["y"]),
            "where": move(batch["where"]), "pieces": batch["pieces"] and pieces_to(batch["pieces"], device)}


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


# ------------------------------------------------------------------------------------------------ checkpoints
class Checkpoints:
    """Sharded checkpoints of model and optimizer: copied to the host while the run waits, written to disk
    while it goes on, and there under their number only when they are complete."""

    def __init__(self, directory: Path, module, inputs: Inputs, optimizer, world, keep: int):
        self.directory, self.module, self.optimizer, self.keep = directory, module, optimizer, keep
        self.inputs = inputs                      # written beside, as in any model directory
        self.world, self.pending, self.step = world, None, 0
        # the writer's collectives run beside those of the training loop, so they need a group of their own
        self.group = torch.distributed.new_group(backend="gloo") if world.size > 1 else None

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> int:
        """Load the newest checkpoint, if there is one, also on another number of ranks; returns its step."""
        newest = latest_checkpoint(self.directory)
        if newest is None:
            return 0
        state = self.state()
        load_sharded(state, newest, self.world)
        set_state_dict(self.module, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        return int(newest.name)

    def save(self, step: int) -> None:
        """Begin to write the state after `step` steps."""
        self.finish()
        self.step = step
        if self.world.main:
            shutil.rmtree(self.temporary, ignore_errors=True)
        gather_objects(None, self.world)
        self.pending = dcp.async_save(self.state(), checkpoint_id=self.temporary, process_group=self.group,
                                      no_dist=alone(self.world))

    def finish(self, wait: bool = True) -> None:
        """Give a written checkpoint its name. Rank 0 writes last of all, once every shard is there."""
        if self.pending and (wait or self.pending.done()):
            self.pending.result()
            self.pending = None
            if self.world.main:
                self.module.model.config.save_pretrained(self.temporary)
                self.module.model.generation_config.save_pretrained(self.temporary)
                self.inputs.save(self.temporary)
                self.temporary.replace(self.directory / f"{self.step:06d}")
                drop_old_checkpoints(self.directory, self.keep)

    @property
    def temporary(self) -> Path:
        return self.directory / f".{self.step:06d}.tmp"


def write_hf(module, inputs: Inputs, directory: Path, dtype, world) -> None:
    """The whole model as a Hugging Face directory: weights, tokenizer, chat template, image processor."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.main:
        with atomic_directory(directory) as tmp:
            state = {k.removeprefix("model."): v.to(getattr(torch, dtype)) for k, v in state.items()}
            module.model.config.dtype = getattr(torch, dtype)
            module.model.save_pretrained(tmp, state_dict=state)
            inputs.save(tmp)


# ------------------------------------------------------------------------------------------------- evaluation
@contextlib.contextmanager
def gathered(module):
    """Within, what a forward pass gathers stays: ranks may then generate different numbers of tokens without
    waiting for one another."""
    root, *layers = [m for m in module.modules() if isinstance(m, FSDPModule)] or [None]
    for m in layers:
        m.set_reshard_after_forward(False, recurse=False)
    yield
    for m in layers:
        m.set_reshard_after_forward(True, recurse=False)
    for m in [root, *layers] if root else []:
        m.reshard()


@torch.no_grad()
def evaluate(module, held: examples.Steps, cfg: Config, world, blank: dict) -> dict:
    """Held-out loss (Eqs. 3, 4); for the actor also how its greedy answers score (examples.score)."""
    total, n, scores = 0.0, 0, defaultdict(list)
    with gathered(module), autocast(cfg, world):
        for item in held.load(0, len(held), cfg.workers, world.device):
            rounds = max(gather_objects(len(item["batches"]), world))
            for batch in item["batches"] + [blank] * (rounds - len(item["batches"])):
                tensors = on_device(batch, world.device)
                logp_n = module(tensors)
                texts = []
                if cfg.role == "actor":
                    texts = answers(module, batch["examples"], tensors["inputs"], held.source.inputs)
                if batch["examples"][0][-1] is None:                       # the blank one
                    continue
                total, n = total - float(logp_n.sum()), n + len(logp_n)
                for text, (_, _, size, record) in zip(texts, batch["examples"]):
                    for name, value in examples.score(text, record, size).items():
                        scores[record.kind, name].append(value)
    every = gather_objects((total, n, dict(scores)), world)
    kinds: dict = defaultdict(dict)
    for kind, name in sorted({key for _, _, part in every for key in part}):
        values = [v for _, _, part in every for v in part.get((kind, name), [])]
        kinds[kind] |= {name: sum(values) / len(values), f"n_{name}": len(values)}
    return {"loss": sum(e[0] for e in every) / max(1, sum(e[1] for e in every)), "kinds": kinds}


def answers(module, examples: list, images: dict, inputs: Inputs) -> list[str]:
    """What the model writes, greedily, for every example of a micro-batch."""
    from transformers import GenerationConfig
    prompts = [torch.tensor(prompt) for prompt, *_ in examples]
    ids = nn.utils.rnn.pad_sequence(prompts, True, inputs.pad_id, padding_side="left")
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in prompts], True, padding_side="left")
    tensors = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == inputs.image_id).long()}
    tensors = {k: t.to(images["pixel_values"].device) for k, t in tensors.items()}
    tensors |= {k: images[k] for k in ("pixel_values", "image_grid_thw")}
    longest = max(len(target) for _, target, *_ in examples)
    # an unset field would come from the checkpoint
    settings = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=2 * longest, min_new_tokens=0,
                                repetition_penalty=1.0, no_repeat_ngram_size=0, use_cache=True,
                                eos_token_id=inputs.stop_ids, pad_token_id=inputs.pad_id)
    out = module.generate(tensors, settings)
    return inputs.tokenizer.batch_decode(out[:, ids.shape[1]:], skip_special_tokens=True)


# ------------------------------------------------------------------------------------------------------- main
def autocast(cfg: Config, world):
    return torch.autocast(torch.device(world.device).type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")


def main(cfg: Config) -> None:
    # what is missing is said before anything is written
    cfg = with_models(cfg, "model")
    need_model(cfg.model)
    load_prompts(cfg.prompts)
    trajectories.read_meta(cfg.meta)
    if cfg.use_plan or cfg.role == "decomposer":
        trajectories.need_decompositions(cfg.decompositions)
    with process_group() as world, open_run(cfg.run_dir, cfg, world, free=FREE) as run:
        if not (run / "hf" / "config.json").exists():
            train(cfg, world, run)
        if world.main:
            print(f"{run / 'hf'} is the {cfg.role} after SFT")


def dry_run(cfg: Config) -> None:
    """What a run would do, and the memory of its state; the data is read once, into a directory that goes."""
    cfg = with_models(cfg, "model")
    size = parameter_count(cfg.model)
    trajectories.read_meta(cfg.meta)
    with process_group() as world, tempfile.TemporaryDirectory() as scratch:
        if world.main:
            rows, held = (s.rows for s in datasets(cfg, Inputs(cfg.model), World(), Path(scratch)))
            per_epoch = math.ceil(len(rows) / cfg.global_batch)
            print(f"{cfg.role}: {len(rows):,} examples, {len(held)} more held out; "
                  f"{cfg.max_steps or cfg.epochs * per_epoch:,} optimizer steps of {cfg.global_batch}\n"
                  f"{cfg.model}: {size / 1e6:,.1f} M parameters; weights, gradients and AdamW's state take "
                  f"{16 * size / world.size / 1e9:,.2f} GB on each of {world.size} rank(s), activations "
                  f"more (bench/gpu_7b.py sft --dry_run: for 7B)\n"
                  f"{cfg.run_dir}: {latest_checkpoint(Path(cfg.run_dir) / 'checkpoints') or 'new'}; "
                  f"{cfg.keep} checkpoints of {12 * size / 1e9:,.2f} GB on disk\n"
                  f"hours: samples_per_s in log.jsonl after the first steps")


def train(cfg: Config, world, run: Path) -> None:
    inputs = Inputs(cfg.model)
    steps, held = datasets(cfg, inputs, world, run)
    blank = examples.collate([steps.source.blank()], inputs, cfg.packing)
    module = build(cfg, world)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=cfg.lr,
                                  weight_decay=cfg.weight_decay)

    # 1 · schedule: step k takes the next global_batch examples of the epoch's order
    total = cfg.max_steps or cfg.epochs * len(steps)
    checkpoints = Checkpoints(run / "checkpoints", module, inputs, optimizer, world, cfg.keep)
    done = checkpoints.restore()
    if world.main:
        for name in ("log.jsonl", "eval.jsonl"):
            rewrite_jsonl(run / name, lambda line: line["step"] <= done)
        quarantine = trajectories.Quarantine(run / "quarantine.jsonl")
    rate = flops.matrix_rate(world.device, getattr(torch, cfg.dtype))
    bar = tqdm(total=total, initial=done, unit="step", desc=f"SFT {cfg.role}", disable=not world.main)
    start = time.monotonic()
    for step, item in enumerate(timed(steps.load(done, total, cfg.workers, world.device)), done):
        # 2 · forward and backward (Eqs. 3, 4), clip, step
        lr = learning_rate(step, total, cfg)
        line, left_out = train_step(item, module, optimizer, lr, blank, cfg, world)

        # 3 · log, evaluate, checkpoint
        seconds = time.monotonic() - start
        if world.main:
            for where, reason in left_out:
                quarantine.leave_out(where, reason)
            append_jsonl(run / "log.jsonl", [{
                "step": step + 1, "of": total, **line, "data_wait": line["data_wait"] / seconds,
                "samples_per_s": line["records"] / seconds,
                "tokens_per_s": line["positions"] * (1 - line["padding"]) / seconds,
                "mfu": line["flops"] / seconds / rate / world.size}])
            bar.set_postfix(loss=f"{line['loss']:.3f}")
            bar.update()
        checkpoints.finish(wait=False)
        if len(held) and ((step + 1) % cfg.eval_every == 0 or step + 1 == total):
            result = evaluate(module, held, cfg, world, blank)
            if world.main:
                append_jsonl(run / "eval.jsonl", [{"step": step + 1, **result}])
        if (step + 1) % cfg.save_every == 0 or step + 1 == total:
            checkpoints.save(step + 1)
        start = time.monotonic()
    checkpoints.finish()
    write_hf(module, inputs, run / "hf", cfg.dtype, world)


def train_step(item: dict, module, optimizer, lr, blank, cfg: Config, world) -> tuple[dict, list]:
    """One optimizer step on every rank's share `item`; returns (log line, what was left out on any rank).
    The line's `data_wait` is in seconds."""
    batches = item.pop("batches")
    every = gather_objects(item | {"rounds": len(batches)}, world)
    n_tokens = max(1, sum(e["targets"] for e in every))
    # all ranks run the same number of micro-batches, FSDP2's collectives demand it; blank ones have weight 0
    rounds = max(1, *(e["rounds"] for e in every))
    total, counted = torch.zeros((), device=world.device), 0.0
    for i in range(rounds):
        batch, weight = (batches[i], 1.0) if i < len(batches) else (blank, 0.0)
        with autocast(cfg, world):
            loss = loss_sft(module(on_device(batch, world.device)), n_tokens) * weight
        (loss * world.size).backward()                 # FSDP2 averages the gradients over the ranks
        total += loss.detach()
        counted += weight * flops.training_flops(module.model.config, batch["lengths"], batch["grids"],
                                                 len(batch["y"]), cfg.freeze_vision)
    norm = step_(module, optimizer, lr, cfg.max_norm)
    sums = gather_objects((float(total), counted, peak_memory(world)), world)
    size = blank["inputs"]["input_ids"].numel()        # a blank micro-batch is padding altogether
    shown = sum(e["positions"] + (rounds - e["rounds"]) * size for e in every)
    return {"loss": sum(s[0] for s in sums), "lr": lr, "grad_norm": norm, "tokens": n_tokens,
            "records": sum(e["records"] for e in every), "too_long": sum(e["too_long"] for e in every),
            "unreadable": sum(len(e["left_out"]) - e["too_long"] for e in every), "rounds": rounds,
            "positions": shown, "padding": 1 - sum(e["tokens"] for e in every) / shown,
            "flops": sum(s[1] for s in sums), "peak_gb": max(s[2] for s in sums),
            "data_wait": max(e["waited"] for e in every)}, [x for e in every for x in e["left_out"]]


def timed(items):
    """The items, each with the seconds that were spent waiting for it."""
    start = time.monotonic()
    for item in items:
        yield item | {"waited": time.monotonic() - start}
        start = time.monotonic()


def peak_memory(world) -> float:
    """Largest memory of this process so far, in GB: of the GPU, where there is one."""
    if world.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


# ----------------------------------------------------------------------------------------------------- export
@dataclass(frozen=True)
class ExportConfig:
    run_dir: str                         # run directory, whose newest checkpoint is taken
    out: str = "{run_dir}/hf_so_far"         # directory to write; RUN/hf is what a finished run writes


def export(cfg: ExportConfig) -> None:
    run = Path(cfg.run_dir)
    written = read_settings(run)
    if os.path.realpath(cfg.out) == os.path.realpath(run / "hf"):
        raise UserError(f"--out {cfg.out} would mark the run as finished; give another directory")
    need_room(cfg.out)
    newest = latest_checkpoint(run / "checkpoints")
    if newest is None:
        raise UserError(f"{run} has no complete checkpoint yet; one is written every --save_every steps")
    try:
        settings = Config(**written)
    except TypeError as e:
        raise UserError(f"{run} is no run of stage 2: {e}; give the --run_dir of one") from None
    with process_group() as world:
        module = build(settings, world)
        load_sharded({"model": get_model_state_dict(module)}, newest, world)    # into the weights themselves
        write_hf(module, Inputs(settings.model), Path(cfg.out), settings.dtype, world)
        if world.main:
            print(f"{cfg.out} is the {settings.role} after {int(newest.name)} steps")


if __name__ == "__main__":
    launch(main, export, dry_run=dry_run, words={"export": ("run_dir",)})
