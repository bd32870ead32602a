"""Stage 2's module: what sharding leaves as it is, and whose loop draws its answers."""

import pytest
import torch
from recorded import config, corpus, encoded, source  # noqa: F401  (fixtures)

from model.attention import separate_records
from model.backbone import load_model
from model.sharded import TargetLogp, answers, build
from records import examples
from runtime import World


@pytest.mark.parametrize("kinds", [("step",), ("box", "point", "grounding")])
def test_answers_are_those_of_transformers_one_by_one(source, tiny_model, kinds):  # noqa: F811
    """In one batch, left-padded, though the model has been told to keep no activations."""
    made = encoded(source, kinds, 4)
    module = TargetLogp(separate_records(load_model(tiny_model)))
    module.train()
    batch = examples.collate(made, source.inputs, True)
    with torch.no_grad():
        got = answers(module, [e.prompt_ids for e in made], batch["inputs"], 9, source.inputs)
    plain = load_model(tiny_model)
    for text, e in zip(got, made, strict=True):
        ids = torch.tensor([e.prompt_ids])
        out = plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=e.pixels,
                             mm_token_type_ids=(ids == source.inputs.image_id).long(), image_grid_thw=e.grid,
                             do_sample=False, max_new_tokens=9, eos_token_id=source.inputs.stop_ids,
                             bad_words_ids=[[i] for i in source.inputs.banned])
        assert text == source.inputs.tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)
    assert len(set(got)) > 1, "one answer to everything would show nothing"


def test_a_sharded_tower_keeps_its_angles_in_float32(corpus, tiny_model, source, tmp_path):
    """FSDP2 would cast the rotary angles to bfloat16 together with the other inputs of a vision block."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = build(config(corpus, tiny_model, tmp_path, dtype="bfloat16"), World(0, 2))
        seen = []
        module.model.model.visual.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args[0].dtype, kwargs["position_embeddings"][0].dtype)),
            with_kwargs=True)
        module(examples.collate(encoded(source), source.inputs, True))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [(torch.bfloat16, torch.float32)]
