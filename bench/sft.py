"""Fine-tuning of a small Qwen2.5-VL: our stage 2 beside transformers' Trainer and TRL's SFTTrainer.

    python bench/sft.py                  # a few minutes on 2 cores

All get the same checkpoint, the same records (screenshots of three sizes whose areas are to each other as
those of ScaleCUA's desktops, web pages and phones, or with --mixed false all of 640x360; texts of very
different lengths), the same encoding, optimizer, schedule and examples per optimizer step, in float32.
`ours` is what sft.train runs: packed rows, windows grouped, logits of target positions only. `trainer` is the
usual set-up: the model of transformers with "sdpa", micro-batches padded on the right with a mask, labels of
-100, the loss of the model's own forward. `trl` is SFTTrainer with the same collator, in the environment that
bench/loss.py makes (.venv-trl); where that is missing or it refuses the model, its ratios are null and the
reason is printed.

Each contender runs in a process of its own, in turns; the best of `repeats` counts. Time is that of optimizer
steps after the first two. Peak memory is the largest growth of the training process's resident memory after
the imports (the kernel's high-water mark): weights, optimizer, activations.

The last line is JSON: records_per_s_vs_trainer, peak_vs_trainer, records_per_s_vs_trl, peak_vs_trl.
"""

import io
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime
import sft
from demo import tiny_model
from model.inputs import Inputs
from model.sharded import build
from records import examples, recordings

TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@dataclass
class Config:
    records: int = 128                   # examples; each is learnt once
    global_batch: int = 16               # examples per optimizer step
    batch_size: int = 8                  # examples per micro-batch of the Trainers
    row_tokens: int = 4096               # positions of our packed rows
    workers: int = 1                     # processes that encode ahead, for all contenders
    mixed: bool = True                   # screenshots of three sizes; false: all are 640x360
    repeats: int = 2                     # runs of each contender
    contender: str = ""                  # run only this one: ours, trainer or trl (for the bench itself)
    work: str = ""                       # directory with model and records (for the bench itself)


# ----------------------------------------------------------------------------------------------- the material
def prepare(work: Path, cfg: Config) -> None:
    """A random model of 1.3 M parameters and records in ScaleCUA's form."""
    dice = random.Random(0)
    words = "open the page with all recent orders and click on first blue link below search field".split()
    (work / "images").mkdir()
    lines = []
    for i in range(cfg.records):
        noise = np.random.default_rng(i).integers(0, 256, (18, 32, 3), dtype=np.uint8)
        png = io.BytesIO()
        width, height = dice.choice([(640, 360), (427, 240), (240, 427)]) if cfg.mixed else (640, 360)
        Image.fromarray(noise).resize((width, height)).save(png, "PNG")
        (work / f"images/{i}.png").write_bytes(png.getvalue())
        say = lambda most: " ".join(dice.choices(words, k=dice.randint(3, most)))
        past = "\n".join(f'Step {k + 1}: "{say(12)}"' for k in range(dice.choice([1, 2, 4, 30])))
        answer = (f"<operation>\n{say(30)}\n</operation>\n<action>\n"
                  f"click(x=0.{dice.randint(10, 99)}, y=0.5)\n</action>")
        human = "<image>\nPlease generate the next move according to the UI screenshot, task and previous " \
                f"operations.\n\nTask: {i} {say(60)}\n\nPrevious operations:\n{past}"
        lines.append({"image": f"{i}.png", "width": width, "height": height, "conversations": [
            {"from": "human", "value": human}, {"from": "gpt", "value": answer}]})
    runtime.write_atomic(work / "a.jsonl", "".join(json.dumps(o) + "\n" for o in lines))
    runtime.write_atomic(work / "meta.json", json.dumps({"web": {"root": "images", "annotation": "a.jsonl"}}))
    texts = f"{ROOT / 'demo/prompts.json'},{work / 'a.jsonl'}"
    tiny_model.build(tiny_model.Config(str(work / "model"), texts, max_pixels=260_000))


def settings(cfg: Config) -> sft.Config:
    work = Path(cfg.work)
    return sft.Config("actor", str(work / "model"), str(work / "meta.json"), run_dir=str(work / "run"),
                      use_plan=False, prompts=str(ROOT / "demo/prompts.json"), lr=1e-4, dtype="float32",
                      global_batch=cfg.global_batch, row_tokens=cfg.row_tokens, checkpointing=False,
                      workers=cfg.workers)


# ------------------------------------------------------------------------------------------------- contenders
def ours(cfg: Config) -> list[float]:
    """The loop of sft.train without its files; returns the time at the end of every optimizer step."""
    stage, world = settings(cfg), runtime.World()
    inputs = Inputs(stage.model)
    steps, _ = sft.datasets(stage, inputs, world, Path(stage.run_dir))
    blank = examples.collate([steps.source.blank()], inputs, True)
    module = build(stage, world)
    optimizer = torch.optim.AdamW(module.parameters(), lr=stage.lr, weight_decay=0.0)
    ends = []
    for k, item in enumerate(sft.timed(steps.load(0, len(steps), cfg.workers, "cpu"))):
        lr = sft.learning_rate(k, len(steps), stage)
        line, _ = sft.train_step(item, module, optimizer, lr, blank, stage, world)
        ends.append(time.perf_counter())
        print(f"ours     step {k + 1} loss {line['loss']:.4f}", file=sys.stderr)
    return ends


class Records(torch.utils.data.Dataset):
    """The same examples for the Trainers."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source.table)

    def __getitem__(self, i):
        return self.source[i]


def padded(examples: list) -> dict:
    """The usual collator: padding on the right, a mask, labels of -100 outside the targets."""
    ids = [torch.tensor(e.prompt_ids + e.target_ids) for e in examples]
    labels = [torch.tensor([-100] * len(e.prompt_ids) + e.target_ids) for e in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(ids, True)
    return {"input_ids": input_ids, "labels": pad(labels, True, -100),
            "attention_mask": pad([torch.ones_like(i) for i in ids], True),
            "mm_token_type_ids": pad([(i == IMAGE_ID[0]).long() for i in ids], True),
            "pixel_values": torch.cat([e.pixels for e in examples]),
            "image_grid_thw": torch.cat([e.grid for e in examples])}


IMAGE_ID = [0]                           # set before the collator runs; its processes are forks


def trainer(cfg: Config, trl: bool = False) -> list[float]:
    """The same by transformers' Trainer, or by TRL's."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments
    stage = settings(cfg)
    inputs = Inputs(stage.model)
    IMAGE_ID[0] = inputs.image_id
    steps, _ = sft.datasets(stage, inputs, runtime.World(), Path(stage.run_dir))
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())
    given = {"output_dir": str(Path(cfg.work) / "trainer"), "per_device_train_batch_size": cfg.batch_size,
             "gradient_accumulation_steps": cfg.global_batch // cfg.batch_size, "num_train_epochs": 1,
             "learning_rate": stage.lr, "lr_scheduler_type": "cosine", "max_grad_norm": 1.0,
             "weight_decay": 0.0, "optim": "adamw_torch", "save_strategy": "no", "logging_strategy": "no",
             "report_to": "none", "use_cpu": True, "remove_unused_columns": False, "disable_tqdm": True,
             "dataloader_num_workers": cfg.workers, "gradient_checkpointing": False, "bf16": False,
             "dataloader_pin_memory": False}
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(stage.model, dtype=torch.float32)
    rest = {"model": model, "train_dataset": Records(steps.source), "data_collator": padded,
            "callbacks": [Clock()]}
    if trl:                              # it takes data sets of its own kind only: numbers, looked up later
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer
        rest |= {"train_dataset": Dataset.from_dict({"i": list(range(len(steps.source.table)))}),
                 "data_collator": lambda rows: padded([steps.source[row["i"]] for row in rows])}
        given |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        run = SFTTrainer(args=SFTConfig(**given), processing_class=inputs.tokenizer, **rest)
    else:
        run = Trainer(args=TrainingArguments(**given), **rest)
    run.train()
    return ends


def resident(key: str) -> int:
    """A number of the kernel's report on this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def one(cfg: Config) -> None:
    """One contender in this process; prints {"records_per_s", "peak"}."""
    import transformers.trainer  # noqa: F401  (its imports are nobody's peak)
    torch.set_num_threads(1)
    before = resident("VmRSS")
    contenders = {"ours": ours, "trainer": trainer, "trl": lambda cfg: trainer(cfg, trl=True)}
    ends = contenders[cfg.contender](cfg)
    print(json.dumps({"records_per_s": (len(ends) - 2) * cfg.global_batch / (ends[-1] - ends[1]),
                      "peak": resident("VmHWM") - before}))


# ------------------------------------------------------------------------------------------------------- main
def main(cfg: Config) -> None:
    if cfg.contender:
        return one(cfg)
    best: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as work:
        prepare(Path(work), cfg)
        stage = settings(cfg.__class__(**{**vars(cfg), "work": work}))
        Path(stage.run_dir).mkdir()
        examples.write_index(Path(stage.run_dir) / "index.npy", stage.learns, stage.meta, {},
                             Inputs(stage.model), recordings.Quarantine())
        names = ["ours", "trainer", "trl"]
        for _ in range(cfg.repeats):
            for name in list(names):
                if result := run(name, work, cfg):
                    print(f"{name:8} {result['records_per_s']:6.1f} records/s   "
                          f"peak {result['peak'] / 2**20:6.0f} MiB", flush=True)
                    old = best.setdefault(name, result)
                    best[name] = {"records_per_s": max(old["records_per_s"], result["records_per_s"]),
                                  "peak": max(old["peak"], result["peak"])}
                else:
                    names.remove(name)
    compare = lambda key, name: round(best["ours"][key] / best[name][key], 3) if name in best else None
    print(json.dumps({f"{key}_vs_{name}": compare(key, name)
                      for name in ("trainer", "trl") for key in ("records_per_s", "peak")}))


def run(name: str, work: str, cfg: Config) -> dict | None:
    """One contender in a process of its own; None, with the reason printed, where TRL cannot."""
    python = TRL_PYTHON if name == "trl" else sys.executable
    if not Path(python).exists():
        return print(f"without TRL: no {TRL_PYTHON.parent.parent.name}; bench/loss.py makes it")
    flags = [f"--{k}={v}" for k, v in (vars(cfg) | {"contender": name, "work": work}).items()]
    process = subprocess.run([str(python), __file__, *flags], capture_output=True, encoding="utf-8", cwd=ROOT)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    reason = process.stderr.strip().splitlines()[-1]
    if name != "trl":
        raise runtime.UserError(f"{name} failed: {reason}")
    return print(f"without TRL: {reason}")


if __name__ == "__main__":
    runtime.launch(main)
