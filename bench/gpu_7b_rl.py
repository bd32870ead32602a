"""Stage 3 at the paper's size on one GPU: two random-weight 7B policies, LoRA r = 32, 1,196 image tokens.

    python bench/gpu_7b_rl.py                 # minutes on an 80 GB GPU; writes bench/gpu_7b_rl.json
    python bench/gpu_7b_rl.py --tiny          # the same on the demo's model, on a CPU: does it run?

Both roles stay on the GPU, as in training. Measured, each after a turn that is not counted: tokens per second
of generation by batch size (prompts of about 2,500 tokens with a 1280 x 720 screenshot; every answer has
`tokens` tokens), samples per second of the update (two passes, activations recomputed, the screenshot encoded
once), the share of the GPU's dense bf16 peak that both reach, and peak memory of the whole.

The last line is JSON; its `costs` are what bench/simulate.py --gpu takes in place of its assumptions.
"""

import io
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_hier  # noqa: E402  (the project root is not a package)
import policy as policy_module  # noqa: E402
import runtime  # noqa: E402
from demo import tiny_model  # noqa: E402
from policy import Policy  # noqa: E402

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}      # dense bf16 FLOP/s, by part of its name
FLOP = {"prompt": 40.6e12, "pass": 107e12}                   # of a sample: vision + prefill; LoRA, recomputed


@dataclass
class Config:
    batches: str = "1,8,32,64"           # sizes of generation batches, by commas
    prompt: int = 2500                   # tokens of a prompt
    tokens: int = 128                    # tokens of an answer
    samples: int = 32                    # of an update
    micro_batch: int = 8                 # samples per forward and backward
    tiny: bool = False                   # the demo's model and small sizes
    out: str = "bench/gpu_7b_rl.json"    # where the result goes; "" for nowhere


def config_7b():
    """Qwen2.5-VL-7B's architecture: transformers' defaults are those of another size."""
    from transformers import Qwen2_5_VLConfig
    ids = {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
    text = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False,
            "max_window_layers": 28, "layer_types": ["full_attention"] * 28, "use_cache": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            **ids}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
              "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
              "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu"}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False,
                            image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
                            vision_end_token_id=151653, **ids)


def random_7b(path, device="cpu", dtype="float32"):
    """In place of policy.load_model: random weights, made where they are used."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            return Qwen2_5_VLForConditionalGeneration(config_7b())
    finally:
        torch.set_default_dtype(before)


def prepare(directory: Path, cfg: Config):
    """Both policies, and the tiny model's tokenizer for prompts of the right length."""
    tiny_model.build(tiny_model.Config(
        str(directory), str(ROOT / "demo" / "prompts.json"), max_pixels=16500 if cfg.tiny else 1003520))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not cfg.tiny and device == "cpu":
        raise runtime.UserError("no GPU here; --tiny tries the bench itself on a CPU")
    load = policy_module.load_model
    policy_module.load_model = load if cfg.tiny else random_7b
    try:
        return {role: Policy(directory, role, device=device, dtype="float32" if cfg.tiny else "bfloat16",
                             checkpointing=not cfg.tiny) for role in ("actor", "decomposer")}
    finally:
        policy_module.load_model = load


def adapt(policy: Policy) -> None:
    """The tiny model's tokenizer, its special tokens moved to the ids that the 7B knows them by."""
    inputs, encode = policy.inputs, policy.inputs.encode
    text = policy.model.config
    old, inputs.image_id = inputs.image_id, text.image_token_id

    def moved(system, user, png):
        ids, size = encode(system, user, png)
        return [text.image_token_id if i == old else i for i in ids], size
    inputs.encode = moved
    inputs.banned = [text.image_token_id, text.video_token_id]
    policy.banned = torch.tensor(inputs.banned, device=policy.device)


def png(i: int, size) -> bytes:
    pixels = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(i),
                           dtype=torch.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()


def requests(n: int, policy: Policy, cfg: Config) -> list:
    size = (160, 210) if cfg.tiny else (1280, 720)
    short = len(policy.encode("", "", png(0, size))[0])
    word = " the" * max(0, cfg.prompt - short)
    return [SimpleNamespace(system="", user=word + str(i), png=png(i, size), seed=i, temperature=0.8,
                            max_new_tokens=cfg.tokens) for i in range(n)]


def seconds(work) -> float:
    """Of the second of two calls, the device's work included."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - start


def main(cfg: Config) -> None:
    import tempfile
    if cfg.tiny:
        cfg = replace(cfg, batches="1,2,4", prompt=200, tokens=8, samples=4, micro_batch=2, out="")
    with tempfile.TemporaryDirectory() as name:
        policies = prepare(Path(name) / "model", cfg)
    for policy in policies.values():
        policy.inputs.stop_ids = []
        if not cfg.tiny:
            adapt(policy)
    actor = policies["actor"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((flops for name, flops in PEAK.items() if name in device), None)
    sizes, took, drawn = [int(n) for n in cfg.batches.split(",")], [], []
    for n in sizes:
        asked = requests(n, actor, cfg)
        took.append(seconds(lambda: drawn.append(actor.sample(asked))))
        print(f"generation, batch {n:3}: {took[-1]:7.2f} s, {n * cfg.tokens / took[-1]:8.1f} tokens/s",
              flush=True)
    one = replace(cfg, tokens=1)
    first = [seconds(lambda: actor.sample(requests(n, actor, one))) for n in (sizes[0], sizes[-1])]
    samples = (drawn[-1] * cfg.samples)[:cfg.samples]
    settings = replace(grpo_hier.Config(), K=1, M=cfg.samples, micro_batch=cfg.micro_batch)
    optimizer = torch.optim.AdamW(actor.parameters().values(), lr=1e-5, eps=1e-12)
    data = grpo_hier.Batch(samples, [(-1.0) ** i for i in range(cfg.samples)], [1] * cfg.samples)
    update = seconds(lambda: grpo_hier.update(actor, optimizer, data, 1, settings, runtime.World()))
    per_pass = update / settings.passes / cfg.samples
    # a batch of n takes prefill * n + tokens * (step + row * n)
    prefill = (first[1] - first[0]) / (sizes[-1] - sizes[0])
    row, step = np.polyfit(sizes, [(t - prefill * n) / cfg.tokens for t, n in zip(took, sizes)], 1)
    memory = torch.cuda.max_memory_allocated() / 2 ** 30 if torch.cuda.is_available() else None
    result = {"device": device, "prompt_tokens": len(samples[0].prompt_ids),
              "image_tokens": samples[0].prompt_ids.count(actor.inputs.image_id),
              "tokens_per_s": {n: round(n * cfg.tokens / t, 1) for n, t in zip(sizes, took)},
              "update_samples_per_s": round(1 / per_pass / settings.passes, 3),
              "peak_GiB": memory and round(memory, 1), "fits_80_GB": memory and memory * 2 ** 30 < 80e9,
              "of_peak": peak and {"prefill": round(FLOP["prompt"] / prefill / peak, 3),
                                   "update": round(FLOP["pass"] / per_pass / peak, 3)},
              "costs": {"prefill_s": round(prefill, 4), "decode_s": round(max(step, 0.0), 5),
                        "decode_row_s": round(max(row, 0.0), 6), "train_s": round(per_pass, 4)}}
    if cfg.out:
        runtime.write_atomic(cfg.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    runtime.launch(main)
