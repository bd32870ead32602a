"""The 7B configuration on this machine's GPU: what a training step needs and takes, extrapolated to eight.

    python bench/gpu_7b.py sft              # stage 2 on packed rows; a few minutes on one GPU of 80 GB
    python bench/gpu_7b.py sft --dry_run    # the arithmetic only; so does a machine without a GPU
    python bench/gpu_7b.py rl               # stage 3: generation and update; minutes on one GPU of 80 GB
    python bench/gpu_7b.py rl --rehearse    # at small sizes on any device: does it run?

Qwen2.5-VL-7B's dimensions are set explicitly and its weights are random: nothing is downloaded. One GPU
cannot hold the training state of all 28 decoder layers (16 bytes a parameter: 133 GB), so `sft` measures the
whole vision tower, embedding and head with two depths of the decoder, on the code that trains
(model/sharded.py, AdamW), and extends time and memory along the straight line through them. What eight GPUs
add is not measured: the transfers between them, which FSDP2 hides behind the computation as far as it can.

`rl` keeps both roles on the GPU, with adapters of r = 32, as training does. Every generation batch has new
screenshots, as nearly every step of a run has: image processing, vision tower and prefill are in its time.
The update's screenshots are those of generation, whose features samples carry, so the tower is in neither
its time nor its operations. `costs` is what bench/simulate.py --gpu takes in place of its assumptions.

The result goes to bench/results/NAME_7b_DEVICE.json and, as JSON, to the last line.
"""

import io
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_hier
import runtime
import sft as stage_2
from demo import tiny_model
from model import backbone as room
from model import flops, update
from model.attention import group_windows, separate_records
from model.policy import Policy
from model.sharded import TargetLogp, shard
from records import examples

IMAGE_ID, LAYERS = 151655, 28


# ---------------------------------------------------------------------------------------------- the 7B model
def config_7b(layers: int = LAYERS, narrow: int = 1):
    """Qwen2.5-VL-7B's configuration with this many decoder layers; widths divided by `narrow` to rehearse."""
    from transformers import Qwen2_5_VLConfig
    text = {"vocab_size": 152064 // narrow, "hidden_size": 3584 // narrow, "num_hidden_layers": layers,
            "intermediate_size": 18944 // narrow, "num_attention_heads": 28, "num_key_value_heads": 4,
            "max_window_layers": layers, "layer_types": ["full_attention"] * layers, "rms_norm_eps": 1e-6,
            "use_sliding_window": False, "tie_word_embeddings": False, "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                "mrope_section": [n // narrow for n in (16, 24, 24)]}}
    vision = {"depth": 32, "hidden_size": 1280 // narrow, "intermediate_size": 3420 // narrow,
              "num_heads": 16, "out_hidden_size": 3584 // narrow, "fullatt_block_indexes": [7, 15, 23, 31],
              "window_size": 112, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "in_channels": 3}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID // narrow,
                            video_token_id=(IMAGE_ID + 1) // narrow, tie_word_embeddings=False)


def parameters(config) -> dict[str, int]:
    """Number of parameters by part, from the model itself on the meta device."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    count = lambda m: sum(p.numel() for p in m.parameters())
    parts = {"layers": count(model.model.language_model.layers), "tower": count(model.model.visual.blocks)}
    return parts | {"rest": count(model) - sum(parts.values()), "all": count(model)}


def random_model(config, device: str, dtype: str = "float32"):
    from transformers import Qwen2_5_VLForConditionalGeneration
    with torch.device(device):
        return group_windows(Qwen2_5_VLForConditionalGeneration(config).to(getattr(torch, dtype)))


def device_name() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"\W+", "_", name)


def write_result(name: str, result: dict) -> None:
    """To bench/results, with the GPU's name, and to the last line."""
    if torch.cuda.is_available():                      # a rehearsal is no result
        path = ROOT / f"bench/results/{name}_7b_{device_name()}.json"
        runtime.write_atomic(path, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


# -------------------------------------------------------------------------------------------------------- sft
@dataclass
class SftConfig:
    dry_run: bool = False                # print the arithmetic, measure nothing
    gpus: int = 8                        # that the state is sharded over, for the extrapolation
    gpu_gb: float = 80.0                 # memory of each of them
    row_tokens: int = 30720              # positions of a packed row
    records: int = 12                    # records in it
    image_height: int = 728              # pixels of a screenshot as the model sees it
    image_width: int = 1288              # 1280x720 becomes 1288x728: 1196 image tokens
    targets: int = 130                   # target tokens of a record
    freeze_vision: bool = False          # train merger and language model only (PAPER-GAP 9)
    depths: str = "2,6"                  # two numbers of decoder layers to measure
    steps: int = 3                       # optimizer steps measured at each depth, after one that is not
    rehearse: bool = False               # a quarter of the widths, two short records, on any device


def sft(cfg: SftConfig) -> None:
    """Stage 2: memory and utilisation of packed rows."""
    needed = sft_arithmetic(cfg)
    if cfg.dry_run or not (torch.cuda.is_available() or cfg.rehearse):
        print("measured would be: "
              f"{cfg.steps} optimizer steps on one packed row of {cfg.row_tokens} tokens at {cfg.depths} "
              f"decoder layers; {'this was a dry run' if cfg.dry_run else 'no GPU here'}")
        return print(json.dumps(needed))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if cfg.rehearse:
        cfg.row_tokens, cfg.records, cfg.targets, cfg.image_height, cfg.image_width = 256, 2, 5, 112, 168
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device != "cpu" else "gloo",
                                         store=torch.distributed.HashStore(), rank=0, world_size=1)
    rate = flops.matrix_rate(device, torch.bfloat16)
    runs = [sft_measured(int(depth), cfg, device) for depth in cfg.depths.split(",")]
    torch.distributed.destroy_process_group()
    (a, b), full = runs, parameters(config_7b(narrow=4 if cfg.rehearse else 1))

    def at_full_depth(key):
        return a[key] + (b[key] - a[key]) / (b["layers"] - a["layers"]) * (LAYERS - a["layers"])
    activations = at_full_depth("peak_gb") - at_full_depth("state_gb")
    seconds = at_full_depth("seconds")
    write_result("sft", {
        "device": device_name(), "matrix_tflops": rate / 1e12, "runs": runs, "arithmetic": needed,
        "seconds_per_row_28_layers": seconds, "mfu_28_layers": at_full_depth("flops") / seconds / rate,
        "gb_per_gpu": 16 * full["all"] / cfg.gpus / 1e9 + activations})


def sft_arithmetic(cfg: SftConfig) -> dict:
    """GB per GPU, part by part, and FLOPs of a row; printed and returned."""
    config, n = config_7b(), parameters(config_7b())
    text = config.text_config
    frozen = n["tower"] if cfg.freeze_vision else 0
    layer = n["layers"] / LAYERS
    tower = config.vision_config
    patches = cfg.records * cfg.image_height * cfg.image_width // tower.patch_size ** 2
    gb = {"sharded weights, gradients, AdamW (16 B; frozen 4 B)": (16 * n["all"] - 12 * frozen) / cfg.gpus,
          "gathered: two layers and embedding, head, merger (bf16)": 2 * (2 * layer + n["rest"]),
          "gradients of one layer and of the rest before they are reduced (fp32)": 4 * (layer + n["rest"]),
          "inputs of the layers, kept for the backward pass (bf16)":
              2 * text.hidden_size * LAYERS * cfg.row_tokens,
          "inputs of the vision blocks, the same; none where the tower is frozen":
              0 if cfg.freeze_vision else 2 * tower.hidden_size * tower.depth * patches,
          "one layer recomputed (four bf16 and one fp32 of the MLP's width)":
              12 * text.intermediate_size * cfg.row_tokens,
          "logits of 256 targets (fp32, three copies)": 12 * 256 * text.vocab_size}
    gb = {k: v / 1e9 for k, v in gb.items()}
    for what, size in gb.items():
        print(f"{size:6.1f} GB  {what}")
    grid = (1, cfg.image_height // 14, cfg.image_width // 14)
    flop = flops.training_flops(config, [cfg.row_tokens // cfg.records] * cfg.records, [grid] * cfg.records,
                                cfg.records * cfg.targets, cfg.freeze_vision)
    total = sum(gb.values())
    print(f"{total:6.1f} GB  of {cfg.gpu_gb:g} on each of {cfg.gpus} GPUs; {flop / 1e12:.0f} TFLOP per row "
          f"of {cfg.row_tokens} tokens ({cfg.records} records), without recomputation")
    return {"gb_per_gpu": round(total, 1), "fits": total < cfg.gpu_gb, "tflop_per_row": round(flop / 1e12, 1),
            "parameters_b": round(n["all"] / 1e9, 3)}


def packed_row(cfg: SftConfig, image_id: int, vocabulary: int) -> dict:
    """A row of random records, each with a screenshot, as examples.collate makes it."""
    dice = torch.Generator().manual_seed(0)
    h, w = cfg.image_height // 14, cfg.image_width // 14
    length = cfg.row_tokens // cfg.records
    made = []
    for _ in range(cfg.records):
        text = torch.randint(1, image_id, (length - h * w // 4,), generator=dice).tolist()
        prompt = text[:3] + [image_id] * (h * w // 4) + text[3:len(text) - cfg.targets]
        made.append(examples.Encoded(prompt, text[len(text) - cfg.targets:],
                                     torch.randn(h * w, 1176, generator=dice), torch.tensor([[1, h, w]]),
                                     (cfg.image_width, cfg.image_height), None))
    names = SimpleNamespace(pad_id=0, image_id=image_id, images=SimpleNamespace(merge_size=2))
    assert vocabulary > image_id
    return examples.collate(made, names, packing=True)


def sft_measured(layers: int, cfg: SftConfig, device: str) -> dict:
    """Seconds and peak memory of optimizer steps on one row with this many decoder layers."""
    config = config_7b(layers, 4 if cfg.rehearse else 1)
    model = separate_records(random_model(config, device)).train()
    if cfg.freeze_vision:
        model.model.visual.blocks.requires_grad_(False)
        model.model.visual.patch_embed.requires_grad_(False)
    room.recompute_activations(model)
    module = shard(TargetLogp(model), torch.bfloat16)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0)
    batch = packed_row(cfg, config.image_token_id, config.text_config.vocab_size)
    stage = stage_2.Config("actor", freeze_vision=cfg.freeze_vision)
    blank, world = batch, runtime.World(device=device)
    lines, ends = [], []
    for _ in range(cfg.steps + 1):
        item = {"batches": [batch], "left_out": [], "too_long": 0, "records": cfg.records, "waited": 0.0,
                "targets": len(batch["y"]), "tokens": cfg.row_tokens, "positions": cfg.row_tokens}
        lines.append(stage_2.train_step(item, module, optimizer, 1e-5, blank, stage, world)[0])
        ends.append(time.perf_counter())               # the norm's value was read: the device is done
    state = 4 * sum(p.numel() for p in module.parameters()) + 12 * sum(p.numel() for p in trained)
    result = {"layers": layers, "seconds": (ends[-1] - ends[0]) / cfg.steps, "flops": lines[-1]["flops"],
              "peak_gb": stage_2.peak_memory(world), "state_gb": state / 1e9, "loss": lines[-1]["loss"]}
    print(json.dumps(result))
    del module, model, optimizer, trained
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return result


# --------------------------------------------------------------------------------------------------------- rl
@dataclass
class RlConfig:
    batches: str = "1,8,32,64"           # sizes of generation batches, by commas
    prompt: int = 2500                   # tokens of a prompt, its screenshot's among them
    tokens: int = 128                    # tokens of every answer
    micro_batch: int = 8                 # samples per forward and backward; an update has 32 at most
    image_height: int = 720              # pixels of a screenshot: 1196 image tokens
    image_width: int = 1280              # the same
    rehearse: bool = False               # a quarter of the widths, two layers, small sizes, on any device


def rl(cfg: RlConfig) -> None:
    """Stage 3: speed, utilisation and memory of generation and update."""
    if not (torch.cuda.is_available() or cfg.rehearse):
        raise runtime.UserError("no GPU here; --rehearse tries the bench itself on a CPU")
    if cfg.rehearse:
        cfg = replace(cfg, batches="1,2", prompt=60, tokens=3, micro_batch=2, image_height=56,
                      image_width=84)
    world = runtime.World(device="cuda:0" if torch.cuda.is_available() else "cpu")
    policies = random_policies(cfg, world.device)          # the decomposer's memory counts, too
    actor, sizes = policies["actor"], [int(n) for n in cfg.batches.split(",")]
    rate = flops.matrix_rate(world.device, torch.float32 if cfg.rehearse else torch.bfloat16)
    took, first = [], []
    for n in sizes:
        first.append(generation(actor, n, replace(cfg, tokens=1))[0])
        seconds, samples = generation(actor, n, cfg)
        took.append(seconds)
        print(f"generation, batch {n:3}: {seconds:7.2f} s, {n * cfg.tokens / seconds:8.1f} tokens/s")
    samples = samples[:32]
    per_pass = update_seconds(actor, samples, cfg) / grpo_hier.Config.passes / len(samples)
    # a batch of n takes prefill * n + tokens * (step + row * n)
    prefill = np.polyfit(sizes, first, 1)[0]
    row, step = np.polyfit(sizes, [(t - prefill * n) / cfg.tokens for t, n in zip(took, sizes)], 1)
    config, length, (width, height) = actor.model.config, len(samples[0].prompt_ids), samples[0].image_size
    see = sum(flops.vision_flops(config.vision_config, [(1, height // 14, width // 14)]))
    # no gradient is needed of frozen weights: forward and backward are twice a forward pass
    passed = 2 * flops.language_flops(config.text_config, [length + cfg.tokens], cfg.tokens)
    peak = stage_2.peak_memory(world)
    write_result("rl", {
        "device": device_name(), "matrix_tflops": rate / 1e12, "prompt_tokens": length,
        "image_tokens": samples[0].prompt_ids.count(config.image_token_id),
        "tokens_per_s": {n: round(n * cfg.tokens / t, 1) for n, t in zip(sizes, took)},
        "update_samples_per_s": round(1 / per_pass / grpo_hier.Config.passes, 3),
        "peak_gb": round(peak, 1), "fits_80_gb": peak < 80,
        "mfu": {"prefill": (see + flops.language_flops(config.text_config, [length], 1)) / prefill / rate,
                "update": passed / per_pass / rate},
        "costs": {"prefill_s": round(prefill, 4), "decode_s": round(max(step, 0.0), 5),
                  "decode_row_s": round(max(row, 0.0), 6), "train_s": round(per_pass, 4)}})


def random_policies(cfg: RlConfig, device: str) -> dict:
    """Both roles with random weights; the demo's tokenizer makes their prompts."""
    torch.manual_seed(0)
    make, load = lambda: config_7b(2, 4) if cfg.rehearse else config_7b(), room.load_model
    room.load_model = lambda path, device, dtype: random_model(make(), device, dtype)
    try:
        with tempfile.TemporaryDirectory() as model:
            tiny_model.build(tiny_model.Config(model, str(ROOT / "demo/prompts.json"), max_pixels=1003520))
            policies = {role: Policy(model, role, device=device, checkpointing=True,
                                          dtype="float32" if cfg.rehearse else "bfloat16")
                        for role in ("actor", "decomposer")}
    finally:
        room.load_model = load
    config = make()
    for policy in policies.values():
        inputs, encode, old = policy.inputs, policy.inputs.encode, policy.inputs.image_id

        def moved(*prompt, encode=encode, old=old):
            ids, size = encode(*prompt)
            return [config.image_token_id if i == old else i for i in ids], size
        inputs.encode, inputs.image_id, inputs.stop_ids = moved, config.image_token_id, []
        inputs.banned = [config.image_token_id, config.video_token_id]
        policy.banned = torch.tensor(inputs.banned, device=device)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()           # weights are made in float32
    return policies


def requests(policy, n: int, cfg: RlConfig) -> list:
    """Prompts of `cfg.prompt` tokens, each with a screenshot of noise that was not there before."""
    def noise():
        out, shape = io.BytesIO(), (cfg.image_height, cfg.image_width, 3)
        pixels = torch.randint(256, shape, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(out, "PNG", compress_level=1)
        return out.getvalue()
    words = " the" * max(0, cfg.prompt - len(policy.encode("", "", noise())[0]))
    return [SimpleNamespace(system="", user=words, png=noise(), seed=i, temperature=0.8,
                            max_new_tokens=cfg.tokens) for i in range(n)]


def generation(policy, n: int, cfg: RlConfig) -> tuple:
    """Seconds of a batch of n requests, and its samples; a batch before it is not counted."""
    for _ in range(2):
        asked = requests(policy, n, cfg)
        start = now()
        samples = policy.sample(asked)
        seconds = now() - start
    return seconds, samples


def update_seconds(policy, samples: list, cfg: RlConfig) -> float:
    """Seconds of an update; one before it is not counted."""
    settings = replace(grpo_hier.Config(), K=1, M=len(samples), micro_batch=cfg.micro_batch)
    optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-5, eps=1e-12)
    rows = [update.Row(s, (-1.0) ** i) for i, s in enumerate(samples)]
    role = grpo_hier.roles(settings)[0]
    objective = partial(grpo_hier.loss, role.name, B=1, cfg=settings)
    for _ in range(2):
        start = now()
        update.update(role, policy, optimizer, rows, objective, settings, runtime.World())
        seconds = now() - start
    return seconds


def now() -> float:
    """The clock when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------------- main
@dataclass
class Config:
    pass


def main(cfg: Config) -> None:
    raise runtime.UserError("say what to measure: sft or rl")


if __name__ == "__main__":
    runtime.launch(main, sft, rl)
