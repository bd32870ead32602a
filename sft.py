"""Stage 2: supervised fine-tuning of one role (sections 3.3, 4.3; Eqs. 3 and 4).

    python sft.py --preset demo --role decomposer      # CPU, tiny model: 1 minute, the actor 2
    torchrun --nproc_per_node=8 sft.py --role decomposer --model QWEN --meta M.json --decompositions D.jsonl
    torchrun --nproc_per_node=8 sft.py --role actor --model QWEN --meta M.json --decompositions D.jsonl
    --use_plan false trains the actor without subtasks, which two rows of table 2 start from
    python sft.py export RUN                        # RUN/hf_so_far from an unfinished run's newest checkpoint
    --system NAME --role ROLE trains a role of systems/NAME.py on what its EXAMPLES say of it

In:  GUI records in ScaleCUA's form (records/recordings.py) and the decompositions.jsonl of stage 1.
Out: RUN/hf, a plain Hugging Face directory; RUN/log.jsonl (one object per optimizer step) and RUN/eval.jsonl;
RUN/quarantine.jsonl (what was left out, and why); RUN/checkpoints/N; RUN/index.npy (records/examples.py).
Decomposer: (x, o_0) -> d, one example per trajectory. Actor: (x, o_t, h_t, d) -> a_t, one per record.

A 7B takes 16 bytes a parameter while it trains (133 GB): eight GPUs of 80 GB, 44 GB each (`--dry_run`).
On several ranks FSDP2 (the paper's ZeRO-3) shards the model: see model/sharded.py. The loss is the mean over
all target tokens of an optimizer step, which takes the next `global_batch` examples; ranks, packing and
micro-batches change nothing but rounding. PAPER-GAP 9: everything trains; `--freeze_vision` freezes the
vision blocks. PAPER-GAP 10: the decomposer writes the numbered list that the actor reads. PAPER-GAP 11: the
history holds operation texts, else action calls.
"""

import math
import os
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from tqdm import tqdm

from language.plans import Subtask, format_plan
from language.prompts import Prompts, load_prompts
from model import flops
from model.backbone import need_model, parameter_count
from model.inputs import Inputs
from model.paths import load_sharded, need_room, with_models
from model.sharded import Checkpoints, answers, build, clip_and_step, gathered, on_device, write_hf
from records import examples, recordings, trajectories
from records.answers import score, target
from records.examples import Examples
from records.recordings import Record
from runtime import (
    DTYPES,
    UserError,
    World,
    append_jsonl,
    check,
    gather_objects,
    latest_checkpoint,
    launch,
    open_run,
    process_group,
    read_settings,
    rewrite_jsonl,
)
from runtime.systems import load_system

# N rows of a micro-batch, S positions of a row, n target tokens of all examples


@dataclass(frozen=True)
class Config:
    role: str                            # decomposer or actor; of another system, one of its own
    model: str = "Qwen2.5-VL-7B-Instruct"  # checkpoint to start from, or a stage-2 run, sec. 3.3
    meta: str = "meta.json"              # ScaleCUA meta file, or several separated by commas
    decompositions: str = "decompositions.jsonl"  # stage 1's output
    run_dir: str = "runs/sft_{role}"     # run directory; the same one again goes on where it stopped
    system: str = "grpo_hier"            # whose role: the paper's, or that of systems/NAME.py
    prompts: str = ""                    # JSON file that replaces texts of language/prompts.py
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
              "save_every", role=tuple(examples_of(self.system)), dtype=DTYPES)

    @property
    def learns(self) -> Examples:
        """What the role learns."""
        return examples_of(self.system)[self.role]

    @property
    def needs_plans(self) -> bool:
        """Whether the examples are made with stage 1's decompositions."""
        return self.use_plan or self.learns.one_a_trajectory


# what a run may change when it goes on: these touch memory, speed and what is looked at, never the weights
FREE = ("eval_every", "packing", "row_tokens", "batch_size", "checkpointing", "workers", "save_every", "keep")


# -------------------------------------------------------------------------------------------------- equations
def loss_sft(logp_n, n_tokens: int):
    """Eqs. 3, 4: L^SFT = -Σ log π(target | context), here per token: divided by the step's n_tokens.

    The decomposer's targets are plans d given (x, o_0); the actor's are actions a_t given (x, o_t, h_t, d).
    """
    assert logp_n.dim() == 1
    return -logp_n.sum() / n_tokens


# ------------------------------------------------------------------------------------------- what roles learn
def decomposer_texts(record: Record, plan: str, prompts: Prompts, thinking: Prompts) -> tuple[str, str]:
    """(system, user) of the decomposer's example."""
    return prompts.decomposer(record.instruction)


def decomposer_target(record: Record, plan: str, size: tuple[int, int]) -> str:
    """The plan as the actor reads it (PAPER-GAP 10)."""
    return plan


def actor_texts(record: Record, plan: str, prompts: Prompts, thinking: Prompts) -> tuple[str, str]:
    """(system, user) of the actor's example. A record with a thought is asked for one."""
    if record.box:
        return "", record.instruction
    if record.kind == "grounding":
        return prompts.grounder(record.instruction)
    asks = thinking if record.think else prompts
    return asks.actor(record.instruction, record.history, plan)


EXAMPLES = {"decomposer": Examples(decomposer_texts, decomposer_target, one_a_trajectory=True),
            "actor": Examples(actor_texts, target, scored=True)}


def examples_of(system: str) -> dict[str, Examples]:
    """What each role of a system learns: of the paper's here, of another in its module. UserError for one
    that says nothing about it."""
    if system == "grpo_hier":
        return EXAMPLES
    module = load_system(system)
    found = getattr(module, "EXAMPLES", {})
    if not found:
        raise UserError(f"--system {system}: {module.__file__} has no EXAMPLES; define there what each role "
                        f"learns, {{name: records.examples.Examples(...)}}, as sft.py does for the paper's")
    return found


# ------------------------------------------------------------------------------------------------------- data
def datasets(cfg: Config, inputs: Inputs, world, run: Path) -> tuple[examples.Steps, examples.Steps]:
    """(optimizer steps, held-out ones) of this rank. Raises UserError when there is nothing to learn from."""
    plans = {}
    if cfg.needs_plans:
        decompositions = trajectories.load_decompositions(cfg.decompositions)
        plans = {id: format_plan([Subtask(*s) for s in subtasks]) for id, subtasks in decompositions.items()}
    if world.main and not (run / "index.npy").exists():
        examples.write_index(run / "index.npy", cfg.learns, cfg.meta, plans, inputs,
                             recordings.Quarantine(run / "quarantine.jsonl"))
    gather_objects(None, world)
    table = examples.read_index(run / "index.npy", plans)
    rows, held = examples.split(table, cfg.held_out, cfg.seed)
    if not len(rows):
        raise UserError(f"no examples for the {cfg.role}: {cfg.meta} and {cfg.decompositions} have no "
                        f"trajectory in common, or --held_out {cfg.held_out} left none; "
                        f"run annotate.py on this data first (and remove {run})")
    source = examples.Source(table, cfg.learns, cfg.meta, list(plans.values()), load_prompts(cfg.prompts),
                         load_prompts(cfg.prompts, think=True), inputs, cfg.max_length,
                         getattr(torch, cfg.dtype))
    shape = examples.Shape(cfg.packing, cfg.row_tokens, cfg.batch_size)
    return (examples.Steps(source, rows, cfg.global_batch, shape, world.rank, world.size, cfg.seed),
            examples.Steps(source, held, cfg.global_batch, shape, world.rank, world.size, None))


# ----------------------------------------------------------------------------------------------- the schedule
def learning_rate(step: int, steps: int, cfg: Config) -> float:
    """Linear warm-up over warmup_ratio of the steps, then cosine to 0."""
    warmup = max(1, round(cfg.warmup_ratio * steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    return cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


# ------------------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(module, held: examples.Steps, cfg: Config, world, blank: dict) -> dict:
    """Held-out loss (Eqs. 3, 4); where the role's answers are actions, also how its greedy ones score."""
    loss = 0.0
    n = 0
    scores = defaultdict(list)
    inputs = held.source.inputs
    with gathered(module), autocast(cfg, world):
        for item in held.load(0, len(held), cfg.workers, world.device):
            rounds = max(gather_objects(len(item["batches"]), world))
            for batch in item["batches"] + [blank] * (rounds - len(item["batches"])):
                tensors = on_device(batch, world.device)
                logp_n = module(tensors)
                texts = []
                if cfg.learns.scored:
                    prompts = [prompt for prompt, *_ in batch["examples"]]
                    longest = max(len(answer) for _, answer, *_ in batch["examples"])
                    texts = answers(module, prompts, tensors["inputs"], 2 * longest, inputs)
                if batch["examples"][0][-1] is None:                       # the blank one
                    continue
                loss -= float(logp_n.sum())
                n += len(logp_n)
                for text, (_, _, size, record) in zip(texts, batch["examples"]):
                    for name, value in score(text, record, size).items():
                        scores[record.kind, name].append(value)
    every = gather_objects((loss, n, dict(scores)), world)
    kinds: dict = defaultdict(dict)
    for kind, name in sorted({key for _, _, part in every for key in part}):
        values = [v for _, _, part in every for v in part.get((kind, name), [])]
        kinds[kind] |= {name: sum(values) / len(values), f"n_{name}": len(values)}
    return {"loss": sum(e[0] for e in every) / max(1, sum(e[1] for e in every)), "kinds": kinds}


# ------------------------------------------------------------------------------------------------------- main
def autocast(cfg: Config, world):
    """Compute in bfloat16, where that is asked for."""
    return torch.autocast(torch.device(world.device).type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")


def main(cfg: Config) -> None:
    # what is missing is said before anything is written
    cfg = with_models(cfg, "model")
    need_model(cfg.model)
    load_prompts(cfg.prompts)
    recordings.read_meta(cfg.meta)
    if cfg.needs_plans:
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
    recordings.read_meta(cfg.meta)
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
        quarantine = recordings.Quarantine(run / "quarantine.jsonl")
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
    total = torch.zeros((), device=world.device)
    counted = 0.0
    shares = [(batch, 1.0) for batch in batches] + [(blank, 0.0)] * (rounds - len(batches))
    for batch, weight in shares:
        with autocast(cfg, world):
            loss = loss_sft(module(on_device(batch, world.device)), n_tokens) * weight
        (loss * world.size).backward()                 # FSDP2 averages the gradients over the ranks
        total += loss.detach()
        counted += weight * flops.training_flops(module.model.config, batch["lengths"], batch["grids"],
                                                 len(batch["y"]), cfg.freeze_vision)
    norm = clip_and_step(module, optimizer, lr, cfg.max_norm)
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
    """A plain Hugging Face directory from the newest checkpoint of a run that has not ended."""
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
