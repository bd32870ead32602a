"""LoRA adapters on a frozen Qwen2.5-VL: where they are, what they change, saved and loaded as PEFT does; what
does not fit is refused."""

import copy

import pytest
import torch
from reference import assert_same, reference_logp, three_samples
from safetensors.torch import load_file, save_file

from model import backbone
from model.backbone import load_model
from model.policy import Policy
from runtime import UserError


@pytest.fixture(scope="module")
def samples(policy):
    return three_samples(policy)


def test_lora_is_on_the_language_model_s_linear_layers_only(policy):
    layers = {n.split(".lora_")[0] for n in policy.parameters()}
    assert len(layers) == 7 * 2 and len(policy.parameters()) == 2 * len(layers)
    assert all(".language_model.layers." in n for n in layers) and not any("visual" in n for n in layers)
    trainable = {n for n, p in policy.peft.named_parameters() if p.requires_grad}
    assert trainable == set(policy.parameters())


def test_a_new_adapter_changes_nothing_and_a_moved_one_does(make_policy, policy, samples):
    fresh = make_policy(moved=0)
    assert_same(fresh.logp(samples, 0.8), fresh.logp(samples, 0.8, reference=True), 0)
    moved = policy.logp(samples, 0.8)
    assert_same(policy.logp(samples, 0.8, reference=True), fresh.logp(samples, 0.8), 1e-6)
    assert (moved[0] - fresh.logp(samples, 0.8)[0]).abs().max() > 0.05


def test_dropout_never_acts(make_policy, samples):
    policy = make_policy(dropout=0.5, checkpointing=True)
    first, second = policy.logp(samples, 0.8), policy.logp(samples, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    without = make_policy(dropout=0.0)
    assert_same(first, without.logp(samples, 0.8), 0)


def test_gradient_checkpointing_gives_every_adapter_tensor_the_same_gradient(make_policy, samples):
    grads = []
    for checkpointing in (False, True):
        policy = make_policy(checkpointing=checkpointing)
        sum(r.sum() for r in policy.logp(samples, 0.8)).backward()
        grads.append({n: p.grad for n, p in policy.parameters().items()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0 and torch.allclose(grad, grads[1][name], atol=1e-6), name


def test_adapters_save_and_load_bit_equal_here_and_in_peft(make_policy, samples, tiny_model, tmp_path):
    from peft import PeftModel
    for role in ("actor", "decomposer"):
        policy = make_policy(role, moved=3)
        policy.save(tmp_path / role)
        saved = load_file(tmp_path / role / "adapter_model.safetensors")
        assert len(saved) == len(policy.parameters()) == 28
        other = make_policy(role, moved=4)
        other.load(tmp_path / role)
        for (n, a), b in zip(policy.parameters().items(), other.parameters().values()):
            assert torch.equal(a, b) and torch.equal(a, saved[n.replace(f".{role}.", ".")]), n
        assert all(torch.equal(a, b) for a, b in zip(policy.logp(samples, 0.8), other.logp(samples, 0.8)))
        theirs = copy.copy(policy)
        loaded = PeftModel.from_pretrained(load_model(tiny_model), tmp_path / role)
        theirs.model = loaded.get_base_model().eval()
        assert_same([reference_logp(theirs, s) for s in samples], policy.logp(samples, 0.8), 1e-5)


@pytest.mark.parametrize("change", ["missing", "extra", "absent"])
def test_an_adapter_that_does_not_fit_is_refused(make_policy, tmp_path, change):
    policy = make_policy()
    policy.save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    if change == "missing":
        del state[min(state)]
    else:
        state["base_model.model.other.lora_A.weight"] = torch.zeros(1)
    save_file(state, file)
    if change == "absent":
        file.unlink()
    with pytest.raises(UserError, match="adapter"):
        policy.load(tmp_path)


@pytest.mark.parametrize("settings", [{"r": 8}, {"alpha": 64}])
def test_an_adapter_of_another_rank_or_scale_is_refused(make_policy, tmp_path, settings):
    make_policy().save(tmp_path)
    with pytest.raises(UserError, match="r 4 and α 8"):
        make_policy(**settings).load(tmp_path)


@pytest.mark.parametrize("name", ["mlp", "visual", "language_model", "q_proj", "lm_head"])
def test_adapter_names_that_are_module_names_are_refused(tiny_model, name):
    with pytest.raises(UserError, match=name):
        Policy(tiny_model, name, r=4)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="llama"):
        load_model(tmp_path)


def test_a_large_model_without_a_gpu_is_warned_of(tiny_model, monkeypatch, capsys):
    backbone.need_model(tiny_model)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(backbone, "parameter_count", lambda path: 8.29e9)
    backbone.need_model(tiny_model)
    assert "8.3 G parameters, and torch sees no GPU" in capsys.readouterr().err
