"""Rows of many records and grouped windows against transformers, which knows neither; operations counted."""

import pytest
import torch
from conftest import ROOT  # noqa
from recorded import corpus, encoded, source  # noqa: F401  (fixtures)
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from model import attention, flops
from model.backbone import load_model
from model.inputs import Inputs
from model.sharded import TargetLogp
from records import examples


# -------------------------------------------------------------------------------------------------- attention
def test_grouped_windows_are_equal_to_sdpa_bit_for_bit_and_take_fewer_calls(tiny_model, monkeypatch):
    inputs, model = Inputs(tiny_model), load_model(tiny_model)
    vision = inputs.images(images=[torch.randint(256, (3, *side), generator=torch.Generator().manual_seed(1),
                                                 dtype=torch.uint8).permute(1, 2, 0).numpy()
                                   for side in ((252, 364), (140, 196))], size={"shortest_edge": 3136,
                           "longest_edge": 200_000}, return_tensors="pt")
    calls, results = [], []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, **k: calls.append(1) or original(*a, **k))
    for name in ("sdpa", "windows_flash"):
        model.model.visual.config._attn_implementation = name
        model.zero_grad()
        calls.clear()
        out = model.model.visual(vision["pixel_values"], vision["image_grid_thw"]).pooler_output
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.model.visual.parameters()), len(calls)])
    assert all(a.equal(b) for a, b in zip(results[0][:-1], results[1][:-1]))
    assert results[1][-1] <= results[0][-1] / 2, (results[0][-1], results[1][-1])


def test_load_model_groups_windows(tiny_model):
    assert load_model(tiny_model).model.visual.config._attn_implementation == "windows_flash"


def test_attention_within_pieces_is_that_of_a_block_mask():
    lengths, g = [3, 5, 3, 1, 5], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 17, 8, generator=g) for h in (4, 2, 2))
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    block = owner[:, None] == owner
    for causal in (False, True):
        want = F.scaled_dot_product_attention(q, k, v, (block & torch.ones(17, 17).tril().bool()) if causal
                                              else block, enable_gqa=True)
        got = attention.attend_within(q, k, v, attention.pieces_of(lengths), causal, None)
        assert (got.transpose(1, 2) - want).abs().max() < 1e-6
    assert attention.pieces_of([4, 4, 2]).order is None and attention.pieces_of([4, 2, 4]).order is not None


# ---------------------------------------------------------------------------------------------------- packing
def test_positions_are_those_of_transformers(source, tiny_model):
    model = load_model(tiny_model).model
    for e in encoded(source, examples.KINDS, 40)[::3]:
        ids = torch.tensor([e.prompt_ids + e.target_ids])
        want, _ = model.get_rope_index(ids, (ids == source.inputs.image_id).long(), e.grid)
        assert examples.positions(len(e), e.prompt_ids.index(source.inputs.image_id), e.grid[0].tolist(),
                              2).equal(want[:, 0])


def logp_and_gradient(module, batches):
    module.zero_grad()
    logp = [module(b) for b in batches]
    (-torch.cat(logp).sum()).backward()
    return torch.cat(logp).detach(), torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_of_many_records_equals_each_by_transformers_alone(source, tiny_model, packing):
    """Log-probs and gradient of packed and of padded micro-batches against plain transformers, one record at
    a time, with positions and masks of its own making."""
    module = TargetLogp(attention.separate_records(load_model(tiny_model)))
    plain = load_model(tiny_model)
    plain.model.visual.config._attn_implementation = "sdpa"
    made, want = encoded(source), []
    for e in made:
        ids = torch.tensor([e.prompt_ids + e.target_ids])
        logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=e.pixels,
                       mm_token_type_ids=(ids == source.inputs.image_id).long(), image_grid_thw=e.grid).logits
        rows = logits[0, len(e.prompt_ids) - 1:-1].log_softmax(-1)
        want.append(rows[range(len(e.target_ids)), e.target_ids])
    (-torch.cat(want).sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    got, mine = logp_and_gradient(module, [examples.collate(made, source.inputs, packing)])
    assert (got - torch.cat(want)).abs().max() < 2e-5
    assert (mine - gradient).norm() < 2e-5 * gradient.norm()


def test_a_packed_record_does_not_see_its_neighbours(source, tiny_model):
    module = TargetLogp(attention.separate_records(load_model(tiny_model)))
    a, b, *_ = encoded(source)
    other = examples.Encoded([7] * 3 + b.prompt_ids, b.target_ids, b.pixels.flip(0), b.grid, b.size, b.record)
    with torch.no_grad():
        first, second = (module(examples.collate([x, a], source.inputs, True))[-len(a.target_ids):]
                         for x in (b, other))
    assert (first - second).abs().max() < 1e-6


def test_cut_packs_whole_records_and_keeps_the_budget(source):
    made = encoded(source, examples.KINDS, 30)
    budget = 3 * max(map(len, made))
    for shape in (examples.Shape(True, budget, 1), examples.Shape(False, budget, 4),
                  examples.Shape(True, 10, 1)):
        rows = examples.cut(made, shape)
        assert sorted(id(e) for row in rows for e in row) == sorted(map(id, made))
        if shape.packing and shape.row_tokens == budget:
            assert max(sum(map(len, row)) for row in rows) <= budget
            assert len(rows) < len(made) / 2
        elif shape.packing:
            assert all(len(row) == 1 for row in rows)      # longer than a row: alone, never cut
        else:
            assert max(map(len, rows)) == 4


# ------------------------------------------------------------------------------------------------------ FLOPs
def test_flops_are_those_that_torch_counts(source, tiny_model):
    model = attention.separate_records(load_model(tiny_model))
    batch = examples.collate(encoded(source), source.inputs, True)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), \
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        TargetLogp(model)(batch)
    H, layers = model.config.text_config.hidden_size, model.config.text_config.num_hidden_layers
    masked = layers * sum(2 * H * L * L for L in batch["lengths"])     # torch counts the masked half as well
    ours = flops.language_flops(model.config.text_config, batch["lengths"], len(batch["y"])) + \
        sum(flops.vision_flops(model.config.vision_config, batch["grids"])) + masked
    assert abs(ours / counter.get_total_flops() - 1) < 0.02


def test_a_frozen_tower_costs_no_backward():
    from transformers import Qwen2_5_VLConfig
    config = Qwen2_5_VLConfig()
    full, frozen = (flops.training_flops(config, [100], [(1, 4, 4)], 10, f) for f in (False, True))
    assert full - frozen == 2 * flops.vision_flops(config.vision_config, [(1, 4, 4)])[0] > 0
