"""One role's policy on a random Qwen2.5-VL: its log-probs, tokens, masks and sampler, against computations
with transformers alone."""

import pytest
import torch
from conftest import png, request
from reference import assert_same, make_sample, reference_logp, three_samples

from model.backbone import forward_hidden
from model.policy import GumbelSampler, policy_logits, token_logp


@pytest.fixture(scope="module")
def samples(policy):
    return three_samples(policy)


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
