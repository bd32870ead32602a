"""Attention inside the pieces of one long row: a screenshot's windows, or the records packed into a row.

No piece sees another, and no mask is made for that: pieces of equal length go through one call of
scaled_dot_product_attention together, each as a row of its own. A 1280x720 screenshot has 84 windows of at
most four lengths, which "sdpa" in transformers attends to in 84 calls per layer; here it is four, with the
same numbers. A packed row of 30,720 tokens would need a mask of 0.9 GB; here it needs none.

Both are attention functions in transformers' sense: `group_windows` and `separate_records` tell a model to
use them.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import functional as F

# S positions of the row, h heads, d width of a head, n pieces of L positions


class Pieces(NamedTuple):
    """A row's pieces, those of equal length together. `order` is None where they lie so already."""
    order: torch.Tensor | None           # (S,) position in the row
    inverse: torch.Tensor | None         # (S,) the way back
    shapes: list[tuple[int, int]]        # (n, L) for every length


def pieces_of(lengths: list[int]) -> Pieces:
    """Lengths of the pieces in their order in the row -> Pieces."""
    starts: dict[int, list[int]] = {}
    for start, L in zip(accumulate(lengths, initial=0), lengths):
        starts.setdefault(L, []).append(start)
    order = torch.cat([(torch.tensor(s)[:, None] + torch.arange(L)).flatten() for L, s in starts.items()])
    shapes = [(len(s), L) for L, s in starts.items()]
    moved = not order.equal(torch.arange(len(order)))
    return Pieces(order if moved else None, order.argsort() if moved else None, shapes)


def pieces_to(pieces: Pieces, device) -> Pieces:
    """The same pieces with their indices on `device`."""
    order, inverse, shapes = pieces
    if order is None or inverse is None:
        return pieces
    return Pieces(order.to(device), inverse.to(device), shapes)


def attend_within(q, k, v, pieces: Pieces, causal: bool, scale: float | None) -> torch.Tensor:
    """Attention (1, h, S, d) -> (1, S, h, d) of every position to its own piece."""
    assert q.shape[0] == 1 and q.shape[2] == sum(n * L for n, L in pieces.shapes)

    def parts(t):
        rows = t[0] if pieces.order is None else t[0].index_select(1, pieces.order)
        return [part.unflatten(1, shape).transpose(0, 1)
                for part, shape in zip(rows.split([n * L for n, L in pieces.shapes], 1), pieces.shapes)]
    grouped = q.shape[1] != k.shape[1]          # several query heads share a key head
    out = [F.scaled_dot_product_attention(*qkv, is_causal=causal, scale=scale, enable_gqa=grouped)
           for qkv in zip(parts(q), parts(k), parts(v))]
    flat = torch.cat([o.transpose(1, 2).flatten(0, 1) for o in out])
    return (flat if pieces.order is None else flat.index_select(0, pieces.inverse))[None]


def windows(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
    """The vision tower's attention: `cu_seq_lens_q` holds the borders of windows or of whole images."""
    cu = cu_seq_lens_q
    if not hasattr(cu, "pieces"):               # one tensor serves all blocks of a forward pass
        cu.pieces = pieces_to(pieces_of(cu.diff().tolist()), query.device)
    return attend_within(query, key, value, cu.pieces, False, scaling), None


def records(module, query, key, value, attention_mask, scaling=None, pieces: Pieces | None = None, **more):
    """The language model's attention: within the records of a packed row, else transformers' "sdpa"."""
    if pieces is not None:
        return attend_within(query, key, value, pieces, True, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)


def group_windows(model):
    """Let the vision tower of a Qwen2.5-VL attend to equal windows together; returns the model."""
    from transformers import AttentionInterface
    # transformers hands the tower's borders over, unsplit, where the name has "flash" in it
    AttentionInterface.register("windows_flash", windows)
    model.model.visual.config._attn_implementation = "windows_flash"
    return model


def separate_records(model):
    """Let the language model take `pieces=` for a packed row; returns the model."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register("records", records)
    AttentionMaskInterface.register("records", sdpa_mask)
    model.model.language_model.config._attn_implementation = "records"
    return model
