"""One rollout batch and its update on the tiny model: ours beside TRL's GRPOTrainer, our switches one by one.

    python bench/rl.py               # minutes on two idle cores; the first time also makes .venv-rl (4 GB)
    python bench/rl.py --trl false   # the switches only

The form is TRL's: flat GRPO (K = 1) with the policy's own loss (dr_grpo, no KL, no std), `prompts` prompts
with a screenshot each, `group` completions of exactly `tokens` tokens at T = 0.8, the same rewards (from a
completion's sum of ids), LoRA r = 32, two optimizer steps on each rollout batch. Both sides run in a process
of their own, in the environment .venv-rl (torch and torchvision of one release: TRL's processor needs them),
one thread each, `turns` rollout batches after one that is not counted; medians are compared. Seconds are CPU
seconds of the process, so that other work on the machine does not count (pipeline: wall clock). Peak is the
growth of the process's resident memory above what it was after loading.

    samples_per_s_vs_trl, peak_vs_trl   ours / TRL's (null where TRL is not there, and why)
    switches                            seconds without / with each of our optimisations, medians of turns
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_hier
import runtime
from demo import tiny_model
from model import update
from model.policy import Policy
from runtime.batches import drawn_batches

PACKAGES = ("torch==2.14.1", "torchvision==0.29.1", "trl==1.16.0", "transformers==5.24.0", "peft==0.21.2")
VENV = ROOT / ".venv-rl"
TEXT = ("Task: in the calendar, choose the day of the appointment, then press the button.\n"
        "Plan:\n1. open the calendar: show the month\n2. choose the day: click on it\nEarlier steps: none\n")


@dataclass
class Config:
    prompts: int = 4                     # of one rollout batch
    group: int = 8                       # completions per prompt
    tokens: int = 32                     # of every completion
    micro_batch: int = 8                 # samples per forward and backward, both sides
    turns: int = 5                       # measured rollout batches of each side, after one more
    trl: bool = True                     # compare with TRL
    side: str = ""                       # internal: ours or trl, in a process of its own
    model: str = ""                      # internal: the checkpoint


def screenshot(i: int) -> Image.Image:
    """Noise of MiniWoB++'s size."""
    pixels = torch.randint(256, (210, 160, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def png(i: int) -> bytes:
    out = io.BytesIO()
    screenshot(i).save(out, "PNG")
    return out.getvalue()


def reward(ids) -> float:
    """Mixed in every group: the update has all samples to learn from."""
    return float(sum(map(int, ids)) % 10 >= 5)


# ---------------------------------------------------------------------------------------------- memory, sides
def memory_start() -> int:
    Path("/proc/self/clear_refs").write_bytes(b"5")         # the high-water mark becomes what is resident now
    return status("VmRSS")


def status(key: str) -> int:
    """A number of the kernel's report on this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


class Ours:
    """The actor of grpo_hier.py, without stop ids, so that every completion has its full length."""

    def __init__(self, cfg: Config):
        self.cfg, self.batch = cfg, 0
        self.policy = Policy(cfg.model, "actor", r=32, alpha=64)
        self.policy.inputs.stop_ids = []
        self.optimizer = torch.optim.AdamW(self.policy.parameters().values(), lr=1e-5, eps=1e-12)
        self.settings = replace(grpo_hier.Config(), K=1, M=cfg.group, use_plan=False, max_steps=1,
                                max_tokens_A=cfg.tokens, micro_batch=cfg.micro_batch)

    def requests(self, cfg: Config, limit=lambda i: None) -> list:
        self.batch += 1
        return [SimpleNamespace(system="", user=TEXT + str(p), png=png(p), seed=1000 * self.batch + i,
                                temperature=0.8, max_new_tokens=limit(i) or cfg.tokens)
                for i, p in enumerate(p for p in range(cfg.prompts) for _ in range(cfg.group))]

    def learn(self, samples, adv=None) -> None:
        R_BKM = torch.tensor([reward(s.response_ids) for s in samples], dtype=torch.float64)
        R_BKM = R_BKM.view(self.cfg.prompts, 1, self.cfg.group)
        adv = adv or grpo_hier.advantage_A(R_BKM, torch.ones_like(R_BKM, dtype=torch.bool)).flatten().tolist()
        rows = [update.Row(s, a) for s, a in zip(samples, adv) if a]
        role = grpo_hier.roles(self.settings)[0]
        objective = partial(grpo_hier.loss, role.name, B=self.cfg.prompts, cfg=self.settings)
        update.update(role, self.policy, self.optimizer, rows, objective, self.settings, runtime.World())

    def turn(self) -> float:
        start = time.process_time()
        self.learn(self.policy.sample(self.requests(self.cfg)))
        return time.process_time() - start


class Trl:
    """GRPOTrainer on the same prompts; `turns` + 1 rollout batches are one call of `train`."""

    def __init__(self, cfg: Config):
        import transformers
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import Qwen2_5_VLForConditionalGeneration
        from trl import GRPOConfig, GRPOTrainer

        from model.backbone import LORA_TARGETS
        rows = [{"prompt": [{"role": "user", "content": TEXT + str(p)}], "image": screenshot(p)}
                for p in range(cfg.prompts)]
        n, self.times = cfg.prompts * cfg.group, []
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=cfg.micro_batch,
            gradient_accumulation_steps=n // cfg.micro_batch, steps_per_generation=n // cfg.micro_batch,
            num_generations=cfg.group, num_iterations=2, max_steps=2 * (cfg.turns + 1), temperature=0.8,
            top_k=0, top_p=1.0, max_completion_length=cfg.tokens, beta=0.0, loss_type="dr_grpo",
            scale_rewards="none", learning_rate=1e-5, lr_scheduler_type="constant",
            generation_kwargs={"min_new_tokens": cfg.tokens},
            use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
        trainer = self

        class Clock(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                trainer.times.append(time.process_time())
        self.trainer = GRPOTrainer(
            Qwen2_5_VLForConditionalGeneration.from_pretrained(cfg.model, dtype=torch.float32),
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            args=arguments, train_dataset=Dataset.from_list(rows * 64), processing_class=processor(cfg.model),
            peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=LORA_TARGETS), callbacks=[Clock()])


def processor(path: str):
    import transformers as t
    tokenizer = t.AutoTokenizer.from_pretrained(path)
    images = t.Qwen2VLImageProcessor.from_pretrained(path)
    return t.Qwen2_5_VLProcessor(images, tokenizer, t.Qwen2VLVideoProcessor(),
                                 chat_template=tokenizer.chat_template)


def one_side(cfg: Config) -> None:
    """In a process of its own: seconds of each rollout batch and peak bytes, as JSON on the last line."""
    torch.set_num_threads(1)
    side = Ours(cfg) if cfg.side == "ours" else Trl(cfg)
    before = memory_start()
    if cfg.side == "ours":
        seconds = [side.turn() for _ in range(cfg.turns + 1)][1:]
    else:
        side.trainer.train()
        ends = side.times[1::2]                           # every second optimizer step ends a rollout batch
        seconds = [b - a for a, b in zip(ends, ends[1:])]
    print(json.dumps({"seconds": seconds, "peak": status("VmHWM") - before}))


# ----------------------------------------------------------------------------------------------- the switches
@contextlib.contextmanager
def patched(thing, **values):
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def see_each_time(policy: Policy):
    """`Policy.see` without memory: every screenshot of every request goes through the tower."""
    def see(pngs):
        with torch.inference_mode(False), torch.no_grad():
            return list(policy.model.model.get_image_features(**policy.inputs.pixels(pngs),
                                                              return_dict=True).pooler_output)
    return see


def compared(cfg: Config, without, with_) -> float:
    """Median seconds without / with, the two taking turns; one turn of each is not counted."""
    seconds = {without: [], with_: []}
    for turn in range(cfg.turns + 1):
        for run in (without, with_):
            start = time.process_time()
            run()
            if turn:
                seconds[run].append(time.process_time() - start)
    return round(statistics.median(seconds[without]) / statistics.median(seconds[with_]), 3)


def switches(cfg: Config) -> dict:
    """Every optimisation of the local engine and the update, off against on."""
    ours, out = Ours(cfg), {}
    policy = ours.policy
    apart = lambda: [replace_user(q, f" {i}") for i, q in enumerate(ours.requests(cfg))]
    out["equal prompts share a prefill"] = compared(
        cfg, lambda: policy.sample(apart()), lambda: policy.sample(ours.requests(cfg)))

    def whole_again():
        with patched(policy, see=see_each_time(policy)):
            ours.turn()
    out["a screenshot is encoded once"] = compared(cfg, whole_again, lambda: ours.turn())

    short = lambda i: cfg.tokens if i % 4 == 0 else cfg.tokens // 4       # most end early
    out["who has ended leaves the batch"] = compared(
        cfg, lambda: policy.sample(ours.requests(cfg)), lambda: policy.sample(ours.requests(cfg, short)))

    drawn = policy.sample(ours.requests(cfg))
    some = [(-1.0) ** i if i % 5 < 2 else 0.0 for i in range(len(drawn))]  # 60 % of the advantages are zero
    tiny = [a or 1e-9 for a in some]     # small, but no subnormal numbers, which CPUs are slow at
    out["zero advantages are skipped (60 %)"] = compared(
        cfg, lambda: ours.learn(drawn, tiny), lambda: ours.learn(drawn, some))

    def with_old_pass():
        with torch.no_grad():
            for i in range(0, len(drawn), cfg.micro_batch):
                policy.logp(drawn[i:i + cfg.micro_batch], 0.8)
        ours.learn(drawn)
    out["no separate pass for old log-probs"] = compared(cfg, with_old_pass, lambda: ours.learn(drawn))

    alone = [replace(s, png=s.png + i.to_bytes(2), seen={}) for i, s in enumerate(drawn)]  # not equal
    out["equal prompts share a training pass"] = compared(
        cfg, lambda: ours.learn(alone), lambda: ours.learn(drawn))

    out |= of_micro_batches(cfg, ours)
    out["pipeline, browsers as slow as the update"] = pipelined(cfg, ours, ours.settings)
    return out


def of_micro_batches(cfg: Config, ours: "Ours") -> dict:
    """How rows of mixed lengths are cut: by length against as they come, by tokens against by number."""
    mixed = ours.policy.sample([replace_user(q, " word" * (150 * (i % 4 == 0))) for i, q in
                                enumerate(ours.requests(cfg))])
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in mixed]
    budget = replace(ours.settings, micro_batch=10 ** 6, micro_tokens=cfg.micro_batch * max(lengths))

    def unsorted():
        def as_they_come(rows, settings):
            numbers = list(range(len(rows)))
            return [numbers[i:i + cfg.micro_batch] for i in range(0, len(rows), cfg.micro_batch)]
        with patched(update, micro_batches=as_they_come):
            ours.learn(mixed)

    def by_tokens():
        with patched(ours, settings=budget):
            ours.learn(mixed)
    return {"micro-batches by length": compared(cfg, unsorted, lambda: ours.learn(mixed)),
            "micro-batches by a token budget": compared(cfg, lambda: ours.learn(mixed), by_tokens)}


def replace_user(q, more: str):
    return SimpleNamespace(**vars(q) | {"user": q.user + more})


def pipelined(cfg: Config, ours: Ours, settings) -> float:
    """Four rollout batches whose pages take as long as an update, one after another / one ahead."""
    drawn = ours.policy.sample(ours.requests(cfg))
    start = time.perf_counter()
    ours.learn(drawn)
    pages, twin = time.perf_counter() - start, ours.policy.twin()

    def run(ahead):
        def draw(batch):
            time.sleep(pages)
            return (twin if ahead else ours.policy).sample(ours.requests(cfg))
        settings_ = replace(settings, pipeline=ahead)
        start = time.perf_counter()
        for _, _, samples in drawn_batches(range(4), draw, lambda batch: {}, settings_):
            with patched(ours, settings=settings_):
                ours.learn(samples)
        return time.perf_counter() - start
    return round(run(0) / run(1), 3)


# ------------------------------------------------------------------------------------------------------- main
def find_trl() -> str:
    """Make .venv-rl where it is missing; returns why it is not there, "" when it is."""
    if (VENV / "ready").exists():
        return ""
    print(f"making {VENV.name} with {', '.join(PACKAGES)}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    # torchvision is compiled for the index's own torch, not for another build of the same release
    own = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    requirements = [line for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
                    if line.split("==")[0] not in {p.split("==")[0] for p in PACKAGES}]
    pip = subprocess.run([VENV / "bin" / "python", "-m", "pip", "install", "-q", *PACKAGES, *requirements],
                         capture_output=True, encoding="utf-8", env=own)
    if pip.returncode:
        return f"pip could not install {PACKAGES}: {pip.stderr.strip().splitlines()[-1]}"
    (VENV / "ready").touch()
    return ""


def measured(side: str, model: str, cfg: Config) -> dict:
    command = [VENV / "bin" / "python", __file__, "--side", side, "--model", model,
               *(f"--{k}={getattr(cfg, k)}" for k in ("prompts", "group", "tokens", "micro_batch", "turns"))]
    out = subprocess.run(command, capture_output=True, encoding="utf-8", check=False,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    if out.returncode:
        raise runtime.UserError(f"the side {side} failed: {out.stderr.strip()[-500:]}")
    result = json.loads(out.stdout.splitlines()[-1])
    print(f"{side:5} {statistics.median(result['seconds']):7.2f} CPU s per rollout batch and update, "
          f"peak {result['peak'] / 2 ** 20:.0f} MiB")
    return result


def main(cfg: Config) -> None:
    if cfg.side:
        return one_side(cfg)
    torch.set_num_threads(1)
    result = {"samples_per_s_vs_trl": None, "peak_vs_trl": None, "switches": {}}
    with tempfile.TemporaryDirectory() as directory:
        cfg.model = directory + "/model"
        tiny_model.build(tiny_model.Config(cfg.model, str(ROOT / "demo" / "prompts.json")))
        why = find_trl() if cfg.trl else "not asked for"
        if why:
            result["why"] = why
        else:
            trl, ours = (measured(side, cfg.model, cfg) for side in ("trl", "ours"))
            result["samples_per_s_vs_trl"] = round(
                statistics.median(trl["seconds"]) / statistics.median(ours["seconds"]), 3)
            result["peak_vs_trl"] = round(ours["peak"] / trl["peak"], 3)
        result["switches"] = switches(cfg)
    for name, factor in result["switches"].items():
        print(f"{name:45} {factor:6.2f} times as fast")
    print(json.dumps(result))


if __name__ == "__main__":
    runtime.launch(main)
