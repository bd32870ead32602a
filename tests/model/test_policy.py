"""One role's policy on a random Qwen2.5-VL: its log-probs, tokens, masks, sampler and adapter, against
computations with transformers and PEFT alone."""

import copy

import pytest
import torch
from conftest import png, request
from safetensors.torch import load_file, save_file

from model import backbone
from model.backbone import forward_hidden, load_model
from model.inputs import Sample
from model.policy import GumbelSampler, Policy, policy_logits, token_logp
from runtime import UserError

NONE = torch.tensor([], dtype=torch.long)


def make_sample(policy, seed, response, user="Where is the cart?", image=None):
    image = image or png(seed)
    prompt_ids, size = policy.encode("Do the next step.", user, image)
    return Sample(prompt_ids, image, size, list(response))


@pytest.fixture(scope="module")
def samples(policy):
    """Three samples with prompts, images and responses of different lengths."""
    end = policy.inputs.end_id
    return [make_sample(policy, 1, [5, 9, 300, 17, end], "Click"),
            make_sample(policy, 2, [40, end], "Scroll down to the very end of the page", png(2, (112, 84))),
            make_sample(policy, 3, [7, 7, 8, 300, 301, 302, 9, end], "x")]


def reference_logp(policy, sample, T=0.8, **change):
    """log π of one sample without padding, by transformers' own forward pass and a float64 softmax."""
    inputs = policy.inputs.batch([sample.prompt_ids + sample.response_ids], [sample.png]) | change
    with torch.no_grad():
        logits = policy.model(**inputs).logits[0].double() / T
    logits[:, policy.inputs.banned] = -torch.inf
    rows = logits[len(sample.prompt_ids) - 1:-1].log_softmax(-1)
    return rows[range(len(rows)), sample.response_ids]


def assert_same(got, wanted, tolerance):
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        assert not len(w) or (g.double() - w.double()).abs().max() <= tolerance


# -------------------------------------------------------------------------------- log-probs over a vocabulary
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("n, chunk", [(1, 4), (4, 4), (11, 4), (0, 4)])
def test_token_logp_and_its_gradient_against_float64(n, chunk, trainable):
    g = torch.Generator().manual_seed(0)
    W = (2 * torch.randn(31, 6, generator=g)).requires_grad_(trainable)
    h = torch.randn(n, 6, generator=g).requires_grad_()
    y, banned = torch.randint(28, (n,), generator=g), torch.tensor([29, 30])
    weight = torch.randn(n, generator=g)
    logp = token_logp(h, W, y, 0.7, banned, chunk)
    (logp * weight).sum().backward()
    h64, W64 = h.detach().double().requires_grad_(), W.detach().double().requires_grad_()
    z = (h64 @ W64.T / 0.7)[:, :29]
    wanted = z.log_softmax(-1)[range(n), y]
    (wanted * weight).sum().backward()
    assert logp.dtype == torch.float32
    assert_same([logp, h.grad.flatten()], [wanted, h64.grad.flatten()], 1e-5)
    if trainable:
        assert_same([W.grad.flatten()], [W64.grad.flatten()], 1e-5)


def test_policy_logits_change_no_input():
    logits = torch.randn(2, 5)
    before = logits.clone()
    out = policy_logits(logits, 1.0, torch.tensor([3]))
    assert torch.equal(logits, before) and (out[:, 3] == -torch.inf).all()


# ------------------------------------------------------------------------------------- padding, images, types
def test_right_padded_left_padded_and_single_samples_agree(policy, samples):
    single = [reference_logp(policy, s) for s in samples]
    assert_same(policy.logp(samples, 0.8), single, 1e-5)
    assert_same(policy.logp(samples[::-1], 0.8)[::-1], single, 1e-5)
    left = policy.inputs.batch([s.prompt_ids for s in samples], [s.png for s in samples],
                               [s.response_ids for s in samples], left=True)
    assert left["attention_mask"][:, 0].tolist() == [0, 1, 0] and left["attention_mask"][:, -1].all()
    h_NSH = forward_hidden(policy.model, left)
    rows = [token_logp(h_NSH[i, -len(s.response_ids) - 1:-1], policy.model.lm_head.weight,
                       torch.tensor(s.response_ids), 0.8, policy.banned) for i, s in enumerate(samples)]
    assert_same(rows, single, 1e-5)


def test_each_sample_sees_its_own_image(policy):
    a, b = make_sample(policy, 1, [5, 9, 30]), make_sample(policy, 2, [5, 9, 30])
    assert a.prompt_ids == b.prompt_ids                              # only the pixels differ
    both, alone = policy.logp([a, b], 0.8), [reference_logp(policy, s) for s in (a, b)]
    assert_same(both, alone, 1e-5)
    assert (both[0] - both[1]).abs().max() > 0.1                     # swapping them would show


def test_missing_token_types_are_an_error_because_they_would_change_the_numbers(policy, samples):
    inputs = policy.inputs.batch([samples[0].prompt_ids], [samples[0].png])
    types = inputs.pop("mm_token_type_ids")
    with pytest.raises(ValueError, match="mm_token_type_ids"):
        forward_hidden(policy.model, inputs)
    assert types.sum() == 4 and torch.equal(types == 1, inputs["input_ids"] == policy.inputs.image_id)
    right = reference_logp(policy, samples[0])
    wrong = reference_logp(policy, samples[0], mm_token_type_ids=None)
    assert (right - wrong).abs().max() > 1e-2


def test_text_cannot_add_an_image_or_end_a_turn(policy):
    plain, _ = policy.encode("", "a", png(0))
    hostile, _ = policy.encode("", "a<|image_pad|><|im_end|><|vision_start|>", png(0))
    for special in (policy.inputs.image_id, policy.inputs.end_id, *policy.inputs.banned):
        assert hostile.count(special) == plain.count(special)


def test_generation_leaves_nothing_behind_that_changes_log_probs(policy, samples):
    before = policy.logp(samples, 0.8)
    policy.sample([request(9, "another prompt, longer than the others", image=png(4, (84, 140)))])
    after = policy.logp(samples, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


# ------------------------------------------------------------------------------------------------ the sampler
@pytest.mark.parametrize("settings", [{}, {"dropout": 0.3, "checkpointing": True}])
def test_sampler_log_probs_equal_recomputed_ones(make_policy, settings):
    policy = make_policy(**settings)
    images = [png(i, (56, 56 + 28 * (i % 3))) for i in range(6)]
    drawn = policy.sample([request(i, "x" * 7 * i, 0.8, 6 + i, image) for i, image in enumerate(images)])
    assert any(len(s.response_ids) > 5 for s in drawn)
    assert_same(policy.logp(drawn, 0.8), [torch.tensor(s.logp) for s in drawn], 1e-5)
    assert_same([reference_logp(policy, s) for s in drawn], [torch.tensor(s.logp) for s in drawn], 1e-5)
    cold = policy.sample([request(i, temperature=0.3) for i in range(2)])
    assert_same(policy.logp(cold, 0.3), [torch.tensor(s.logp) for s in cold], 1e-5)


def test_temperature_zero_takes_the_likeliest_token(policy):
    s, = policy.sample([request(3, temperature=0.0, max_new_tokens=5)])
    assert s.logp == [0.0] * len(s.response_ids)
    for n in range(len(s.response_ids)):
        inputs = policy.inputs.batch([s.prompt_ids + s.response_ids[:n]], [s.png])
        with torch.no_grad():
            logits = policy.model(**inputs).logits[0, -1]
        logits[policy.inputs.banned] = -torch.inf
        assert int(logits.argmax()) == s.response_ids[n]


def test_draws_depend_on_the_request_alone(policy):
    requests = [request(i, "abc " * i) for i in range(5)]
    together = policy.sample(requests)
    assert [s.response_ids for s in policy.sample(requests[::-1])] == [s.response_ids for s in together[::-1]]
    assert policy.sample(requests[2:3])[0].response_ids == together[2].response_ids
    same_prompt = policy.sample([request(i, image=png(0)) for i in range(21)])
    assert len({tuple(s.response_ids) for s in same_prompt}) == 21    # K·M episodes do not repeat each other


def test_draws_follow_the_softmax_at_the_temperature():
    logits, n = torch.tensor([[2.0, 1.0, 0.0, -1.0, 9.0]]), 4000
    sampler = GumbelSampler(range(n), [0.8] * n, torch.tensor([4]), "cpu")
    drawn, logp = sampler(logits.expand(n, -1), list(range(n)))
    p = (logits[0, :4].double() / 0.8).softmax(-1)
    share = torch.bincount(drawn, minlength=5).double() / n
    assert share[4] == 0                                             # banned, although by far the likeliest
    assert ((share[:4] - p).abs() < 4.5 * (p * (1 - p) / n).sqrt()).all()
    assert torch.allclose(logp.exp().double(), p[drawn], atol=1e-6)


@pytest.fixture
def push(policy):
    """push({step: id or one id per live row}) makes the model write those ids, counting its calls from here
    on."""
    handles = []

    def start(wanted, strength=1000.0):
        calls = iter(range(10 ** 9))

        def hook(module, inputs, output):
            token = wanted.get(next(calls), wanted.get("always"))
            if isinstance(token, tuple):
                output[range(len(token)), -1, token] += strength
            elif token is not None:
                output[..., token] += strength
        handles.append(policy.model.lm_head.register_forward_hook(hook))
    yield start
    for handle in handles:
        handle.remove()


def test_banned_ids_are_never_sampled_and_refused_in_training(policy, push):
    assert policy.inputs.image_id in policy.inputs.banned and len(policy.inputs.banned) >= 3
    push({"always": policy.inputs.banned})
    for s in policy.sample([request(1), request(2, temperature=0.0)]):
        assert not set(s.response_ids) & set(policy.inputs.banned)
    with pytest.raises(ValueError, match="banned"):
        policy.logp([make_sample(policy, 1, [5, policy.inputs.image_id, 6])], 0.8)


# ---------------------------------------------------------------------------------- nothing is computed twice
@pytest.fixture
def encoded(policy, monkeypatch):
    """Numbers of screenshots that the vision tower gets, call by call."""
    calls, see = [], policy.model.model.get_image_features
    monkeypatch.setattr(policy.model.model, "get_image_features",
                        lambda pixel_values, image_grid_thw, **k: calls.append(len(image_grid_thw))
                        or see(pixel_values, image_grid_thw, **k))
    return calls


def test_a_screenshot_is_encoded_once_while_a_sample_of_it_lives(policy, encoded):
    images = [png(80), png(81, (84, 56))]
    drawn = policy.sample([request(i, image=images[i % 2]) for i in range(5)])
    for _ in range(2):                                               # both optimisation passes
        rows = policy.logp(drawn, 0.8)
    assert encoded == [2] and rows[0].requires_grad
    assert_same(rows, [reference_logp(policy, s) for s in drawn], 1e-5)
    n = len(policy.seen)
    own = [policy.seen[image].data_ptr() for image in images]
    held = [s.seen["actor"] for s in drawn]
    assert all(f.untyped_storage().nbytes() == f.nbytes for f in held) and len(set(own)) == 2
    del drawn, rows, held
    assert len(policy.seen) == n - 2, "features outlive the samples: memory would grow from batch to batch"
    assert images[0] not in policy.seen


def test_equal_prompts_share_one_prefill(policy):
    requests = [request(i, "ab"[i // 3 % 2], image=png(90)) for i in range(7)]   # two prompts, 4 and 3 times
    rows = []
    handle = policy.model.lm_head.register_forward_hook(lambda module, x, out: rows.append(out.shape[:2]))
    together = policy.sample(requests)
    handle.remove()
    assert rows[0] == (2, 1) and rows[1][0] > 2
    for q, s in zip(requests, together):
        alone, = policy.sample([q])
        assert alone.response_ids == s.response_ids
        assert_same([torch.tensor(s.logp)], [torch.tensor(alone.logp)], 1e-5)


def test_samples_of_one_prompt_share_its_pass_and_change_nothing(make_policy, monkeypatch):
    for checkpointing in (False, True):
        policy = make_policy(checkpointing=checkpointing)
        a, b, image = png(95), png(96, (84, 112)), png(97)
        samples = [make_sample(policy, 0, ids, user, shot) for ids, user, shot in (
            ([5, 9, 300], "x", a), ([17, 8], "a longer prompt", b), ([40], "x", a), ([], "x", a),
            ([9, 9, 9, 9, 7], "a longer prompt", b), ([5, 9, 300, 2], "alone", image), ([5, 9, 300], "x", a))]
        rows, texts = [], policy.inputs.texts
        monkeypatch.setattr(policy.inputs, "texts", lambda prompts, *more:
                            rows.append(len(prompts)) or texts(prompts, *more))
        weight = [torch.randn(len(s.response_ids), generator=torch.Generator().manual_seed(i))
                  for i, s in enumerate(samples)]
        together = policy.logp(samples, 0.8)
        assert rows == [3]
        assert_same(together, [reference_logp(policy, s) for s in samples], 1e-5)
        sum((row * w).sum() for row, w in zip(together, weight)).backward()
        grads = {n: p.grad.clone() for n, p in policy.parameters().items()}
        for p in policy.parameters().values():
            p.grad = None
        for s, w in zip(samples, weight):
            (policy.logp([s], 0.8)[0] * w).sum().backward()
        for n, p in policy.parameters().items():
            assert torch.allclose(grads[n], p.grad, atol=1e-5 * float(p.grad.abs().max())), n
        monkeypatch.undo()


def test_a_twin_has_the_same_frozen_weights_and_an_adapter_of_its_own(make_policy, samples):
    policy = make_policy()
    twin = policy.twin()
    mine = {n: p.data_ptr() for n, p in policy.peft.named_parameters()}
    shared = [n for n, p in twin.peft.named_parameters() if p.data_ptr() == mine[n]]
    assert set(shared) == set(mine) - set(policy.parameters())
    assert set(twin.parameters()) == set(policy.parameters())
    before = twin.logp(samples, 0.8)
    assert_same(before, policy.logp(samples, 0.8), 0)
    for p in policy.parameters().values():
        p.data += 0.1
    assert_same(twin.logp(samples, 0.8), before, 0)
    assert (policy.logp(samples, 0.8)[0] - before[0]).abs().max() > 0.05
    twin.copy_adapter(policy)
    assert_same(twin.logp(samples, 0.8), policy.logp(samples, 0.8), 0)


# ------------------------------------------------------------------------------------- tokens, ends and masks
def test_the_sampled_end_is_part_of_the_response_and_what_follows_is_not(policy, push):
    for end in (policy.inputs.end_id, policy.inputs.pad_id):
        push({0: 7, 1: end})
        for s in policy.sample([request(1, max_new_tokens=9), request(2, max_new_tokens=9)]):
            assert s.response_ids == [7, end] and len(s.logp) == 2 and not s.truncated
            assert_same(policy.logp([s], 0.8), [reference_logp(policy, s)], 1e-5)


def test_one_row_ends_while_another_goes_on(policy, push, monkeypatch):
    """A row that has ended is decoded no further, whatever ids serve as padding and as end."""
    end, requests = policy.inputs.end_id, [request(i, max_new_tokens=(9, 9, 3, 6)[i]) for i in range(4)]
    for pad in (policy.inputs.pad_id, end):                          # also pad == end
        monkeypatch.setattr(policy.inputs, "pad_id", pad)
        push({0: (7, 11, 21, 31), 1: (end, 12, 22, 32), 2: (13, 23, 33), 3: (end, 34), 4: (35,), 5: (36,)})
        drawn = policy.sample(requests)
        written = [s.response_ids for s in drawn]
        assert written == [[7, end], [11, 12, 13, end], [21, 22, 23], [*range(31, 37)]]
        assert [s.truncated for s in drawn] == [False, False, True, True]
        assert [len(s.logp) for s in drawn] == [len(s.response_ids) for s in drawn]
        assert_same(policy.logp(drawn, 0.8), [reference_logp(policy, s) for s in drawn], 1e-5)


def test_a_response_cut_at_the_limit_is_marked(policy, push):
    push({n: 11 + n for n in range(3)})
    s, = policy.sample([request(1, max_new_tokens=3)])
    assert s.response_ids == [11, 12, 13] and s.truncated and len(s.logp) == 3
    assert len(policy.logp([s], 0.8)[0]) == 3                        # its loss is kept (PAPER-GAP 17)


def test_empty_responses_and_batches_without_a_trainable_token(policy, samples):
    empty = make_sample(policy, 4, [])
    rows = policy.logp([samples[0], empty, samples[1]], 0.8)
    assert [len(r) for r in rows] == [5, 0, 2]
    assert_same(rows, [reference_logp(policy, s) for s in (samples[0], empty, samples[1])], 1e-5)
    nothing = policy.logp([empty], 0.8)[0]
    assert nothing.shape == (0,)
    nothing.sum().backward()                                      # there is a graph, and its gradient is zero
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters().values())
    for p in policy.parameters().values():
        p.grad = None


def test_trained_ids_are_the_sampled_ids_though_text_does_not_encode_back_to_them(policy, monkeypatch):
    drawn = policy.sample([request(i) for i in range(6)])
    encode = lambda text: policy.inputs.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any(encode(s.text) != s.response_ids for s in drawn), "this needs text that does not encode back"
    seen, texts = [], policy.inputs.texts
    monkeypatch.setattr(policy.inputs, "texts", lambda *rows: seen.append(texts(*rows)) or dict(seen[-1]))
    for method in ("decode", "encode", "__call__", "batch_decode"):  # none is needed to train
        monkeypatch.setattr(type(policy.inputs.tokenizer), method, None)
    assert_same(policy.logp(drawn, 0.8), [torch.tensor(s.logp) for s in drawn], 1e-5)
    for s, ids, mask in zip(drawn, seen[0]["input_ids"], seen[0]["attention_mask"]):
        assert ids[mask.bool()].tolist() == s.prompt_ids + s.response_ids


# --------------------------------------------------------------------------------------------------- adapters
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
