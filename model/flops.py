"""Counted floating-point operations of a Qwen2.5-VL, and the rate at which this device multiplies matrices.

One multiplication with its addition is two operations. Counted are the matrix products and the attention;
norms, activations and rotary positions are not. Model-FLOP utilisation is what one forward and backward pass
needs (recomputed activations are not counted again) divided by time and by the measured rate.
"""

import time

import torch

# L tokens of a record, P patches of an image, H hidden size, V vocabulary


def language_flops(config, lengths: list[int], targets: int) -> float:
    """One forward pass over records of these lengths, causal attention within each, head on `targets` (0 for
    a critic: its own heads are too small to count)."""
    H, layers = config.hidden_size, config.num_hidden_layers
    keys = H // config.num_attention_heads * config.num_key_value_heads    # width of all keys
    per_token = 2 * (2 * H * H + 2 * H * keys + 3 * H * config.intermediate_size)
    attention = sum(2 * H * L * L for L in lengths)                        # two products, half of each masked
    return layers * (per_token * sum(lengths) + attention) + 2 * config.vocab_size * H * targets


def vision_flops(config, grids: list) -> tuple[float, float]:
    """One forward pass over images of (time, height, width) patches: (blocks and embedding, merger)."""
    H, merge = config.hidden_size, config.spatial_merge_size
    patches = [int(t) * int(h) * int(w) for t, h, w in grids]
    embed = 2 * config.in_channels * config.temporal_patch_size * config.patch_size ** 2 * H
    per_patch = 2 * (4 * H * H + 3 * H * config.intermediate_size)
    window = (config.window_size // config.patch_size) ** 2                # the border's are smaller
    full = len(config.fullatt_block_indexes)
    attention = sum(4 * H * P * (full * P + (config.depth - full) * min(P, window)) for P in patches)
    wide = H * merge ** 2
    merger = 2 * (wide * wide + wide * config.out_hidden_size) / merge ** 2
    P = sum(patches)
    return P * (embed + config.depth * per_patch) + attention, P * merger


def training_flops(config, lengths, grids, targets: int, freeze_vision: bool = False) -> float:
    """Forward and backward (twice the forward where weights train); a frozen tower has no backward."""
    tower, merger = vision_flops(config.vision_config, grids)
    rest = language_flops(config.text_config, lengths, targets) + merger
    return 3 * rest + (1 if freeze_vision else 3) * tower


def matrix_rate(device: str, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of a square matrix product here: the best of those that fit into `seconds`."""
    cuda = device.startswith("cuda")
    n = 8192 if cuda else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best, deadline = float("inf"), time.perf_counter() + seconds
    for turn in range(1000):
        start = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize()
        end = time.perf_counter()
        best = min(best, end - start) if turn else best                    # the first one loads the library
        if turn > 1 and end > deadline:
            break
    return 2 * n ** 3 / best
