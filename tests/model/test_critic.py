"""The critic on random Qwen2.5-VLs of two sizes: its values against transformers and PEFT alone, what they
may depend on, what learns, and what is saved."""

import json
import shutil

import pytest
import torch
from conftest import png, random_checkpoint
from safetensors.torch import load_file, save_file

from model.critic import Critic, need_critic
from model.inputs import Inputs, Sample
from runtime import UserError
from runtime.checkpoints import load_checkpoint, save_checkpoint

HEADS = ("high", "keep", "low")


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A checkpoint of another size than the policy's, with the same tokenizer."""
    return random_checkpoint(tmp_path_factory.mktemp("larger"), hidden=96, layers=3, vision_hidden=48,
                             vocabulary=704, seed=5)


@pytest.fixture(scope="module")
def make_critic(tiny_model, larger):
    """make_critic(...) -> Critic on the larger model, adapter and heads moved (with seed `moved`)."""
    def make(path=None, moved=1, heads=HEADS, **settings):
        settings = {"r": 4, "alpha": 8} | settings
        critic = Critic(path or larger, "critic", heads, Inputs(tiny_model), **settings)
        generator = torch.Generator().manual_seed(moved)
        for p in critic.parameters().values() if moved else ():
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        return critic
    return make


@pytest.fixture(scope="module")
def critic(make_critic):
    """A critic that no test may change."""
    return make_critic()


def make_sample(reader, seed, response, user="Where is the cart?", image=None):
    image = image or png(seed)
    prompt_ids, size = reader.inputs.encode("Do the next step.", user, image)
    return Sample(prompt_ids, image, size, list(response))


def last(sample):
    """The last token of the prompt."""
    return len(sample.prompt_ids) - 1


@pytest.fixture(scope="module")
def asked(policy):
    """Samples of different prompts, images and lengths, as the policy reads them, and places in them."""
    end = policy.inputs.end_id
    samples = [make_sample(policy, 1, [5, 9, 300, 17, end], "Click"),
               make_sample(policy, 2, [40, end], "Scroll down to the end of the page", png(2, (112, 84))),
               make_sample(policy, 3, [7, 7, 8, 300, 301, 302, 9, end], "x"),
               make_sample(policy, 4, [], "an answer of no tokens", png(4, (84, 140)))]
    P = [last(s) for s in samples]
    return samples, [{"high": [P[0]], "keep": [P[0]], "low": [P[0] + 3]}, {"low": [P[1] + 2, 0, P[1]]},
                     {"high": [P[2]], "low": [P[2] + 8]}, {"keep": [P[3]], "high": []}]


def reference(critic, sample, places):
    """Values of one sample without padding, by transformers' own forward pass over all of it."""
    inputs = critic.inputs.batch([sample.prompt_ids + sample.response_ids], [sample.png])
    with torch.no_grad():
        h_SH = critic.model.model(**inputs).last_hidden_state[0].double()
    head64 = {name: p.detach().double() for name, p in critic.heads.items()}
    return {head: h_SH[where] @ head64[f"{head}.weight"] + head64[f"{head}.bias"]
            for head, where in places.items()}


def assert_same(got, wanted, tolerance=1e-5):
    for g, w in zip(got, wanted, strict=True):
        assert list(g) == list(w)
        for head in g:
            assert g[head].dtype == torch.float32 and g[head].shape == w[head].shape
            assert not len(g[head]) or (g[head].double() - w[head].double()).abs().max() <= tolerance, head


def flat(rows):
    return torch.cat([v for row in rows for v in row.values()])


# ------------------------------------------------------------------------------------------------- the values
@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_equal_transformers_own_alone_together_and_in_another_order(make_critic, asked, checkpointing):
    critic = make_critic(checkpointing=checkpointing)
    samples, at = asked
    wanted = [reference(critic, s, places) for s, places in zip(samples, at)]
    assert flat(wanted).std() > 0.1                                  # these values are not all alike
    assert_same(critic.values(samples, at), wanted)
    assert_same(critic.values(samples[::-1], at[::-1])[::-1], wanted)
    assert_same([critic.values([s], [places])[0] for s, places in zip(samples, at)], wanted)
    assert critic.values([], []) == []


def test_the_base_may_be_the_policy_s_own_or_of_another_size(make_critic, policy, tiny_model, asked):
    samples, at = asked
    same = make_critic(tiny_model)
    assert_same(same.values(samples, at), [reference(same, s, places) for s, places in zip(samples, at)])
    other = make_critic()
    assert other.heads["high.weight"].shape == (96,) and same.heads["high.weight"].shape == (64,)


def test_samples_of_one_prompt_share_its_pass_and_change_nothing(critic, policy, monkeypatch):
    samples = [make_sample(policy, 0, ids, user, png(90)) for ids, user in (
        ([5, 9, 300], "x"), ([17, 8], "a longer prompt"), ([40], "x"), ([], "x"), ([9, 9, 9, 7], "x"))]
    at = [{"high": [last(s)], "low": [last(s) + len(s.response_ids)]} for s in samples]
    rows, texts = [], critic.inputs.texts
    monkeypatch.setattr(critic.inputs, "texts", lambda prompts, *more:
                        rows.append(len(prompts)) or texts(prompts, *more))
    together = critic.values(samples, at)
    assert rows == [2]
    assert_same(together, [reference(critic, s, places) for s, places in zip(samples, at)])


def test_what_comes_later_cannot_change_a_value(critic, policy):
    """Also where the pass reaches further, as another head is read there."""
    short, long = [make_sample(policy, 1, ids) for ids in ([5, 9, 300], [5, 9, 17, 8, 40])]
    P = last(short)
    rows = critic.values([short, long, short], [{"high": [P, P + 2], "low": [P + 3]},
                                                {"high": [P, P + 2], "low": [P + 5]}, {"high": [P]}])
    assert (rows[0]["high"] - rows[1]["high"]).abs().max() < 1e-5
    assert (rows[0]["high"][0] - rows[2]["high"][0]).abs() < 1e-5
    every = [{"high": [P, P + 1, P + 2, P + 3]}]
    other = critic.values([make_sample(policy, 1, [5, 8, 300])], every)[0]["high"]
    this = critic.values([short], every)[0]["high"]
    changed = (this - other).abs()
    assert changed[:2].max() < 1e-5 and changed[2:].min() > 1e-3     # a value knows the token it stands on


def test_a_value_sees_its_own_screenshot_and_prompt(critic, policy):
    a, b = make_sample(policy, 1, [5]), make_sample(policy, 2, [5])
    c = make_sample(policy, 1, [5], "Where is the shop?")
    assert a.prompt_ids == b.prompt_ids and a.png == c.png
    at = [{"high": [last(s)]} for s in (a, c, b)]
    rows = critic.values([a, c, b], at)
    values = flat(rows)
    assert (values[0] - values[1]).abs() > 1e-2 and (values[0] - values[2]).abs() > 1e-2
    assert_same(rows, [reference(critic, s, places) for s, places in zip((a, c, b), at)])


def test_an_id_that_only_the_policy_s_matrix_has_is_read_as_padding(critic, policy):
    beyond = critic.model.config.text_config.vocab_size + 3
    odd, plain = make_sample(policy, 1, [5, beyond, 9]), make_sample(policy, 1, [5, critic.inputs.pad_id, 9])
    at = [{"low": [last(odd) + 1, last(odd) + 3]}]
    assert_same(critic.values([odd], at), critic.values([plain], at), 0)
    assert odd.response_ids == [5, beyond, 9]


def test_places_that_do_not_exist_are_refused(critic, policy):
    s = make_sample(policy, 1, [5, 9])
    for wrong in (-1, last(s) + 3, 10 ** 6):
        with pytest.raises(ValueError, match="positions"):
            critic.values([s], [{"low": [last(s), wrong]}])
    with pytest.raises(KeyError, match="middle"):
        critic.values([s], [{"middle": [0]}])
    s.image_size = (84, 84)
    with pytest.raises(ValueError, match="screenshot"):
        critic.values([s], [{"low": [0]}])
    image = make_sample(policy, 1, [policy.inputs.image_id, 5])
    with pytest.raises(ValueError, match="banned"):
        critic.values([image], [{"low": [last(image) + 2]}])


def test_an_estimate_is_the_values_without_gradient_a_few_at_a_time(make_critic, asked, monkeypatch):
    critic = make_critic(checkpointing=True)
    samples, at = asked
    many, places = [*samples, *samples[::-1], samples[1]], [*at, *at[::-1], at[1]]
    passes, values = [], critic.values
    monkeypatch.setattr(critic, "values", lambda part, at: passes.append(len(part)) or values(part, at))
    rows = critic.estimate(many, places, micro_batch=4)
    assert passes == [4, 4, 1] and not any(v.requires_grad for row in rows for v in row.values())
    assert_same(rows, [reference(critic, s, where) for s, where in zip(many, places)])
    assert critic.estimate([], []) == []


def test_policy_and_critic_each_encode_a_screenshot_once(critic, policy, monkeypatch):
    calls = []
    for role in (policy, critic):
        see = role.model.model.get_image_features
        monkeypatch.setattr(role.model.model, "get_image_features", lambda see=see, role=role, **given:
                            calls.append((role.role, len(given["image_grid_thw"]))) or see(**given))
    samples = [make_sample(policy, i, [5, 9], image=png(120 + i % 2)) for i in range(4)]
    at = [{"high": [last(s)]} for s in samples]
    for _ in range(2):
        policy.logp(samples, 0.8)
        critic.values(samples, at)
    critic.estimate(samples, at, 1)
    assert calls == [("actor", 2), ("critic", 2)]
    assert samples[0].seen["critic"].shape == (4, 96) and samples[0].seen["actor"].shape == (4, 64)
    del samples
    assert png(120) not in critic.seen


# ------------------------------------------------------------------------------------------------ what learns
def backward(critic, samples, at, target=1.0):
    """The gradients of the mean squared distance to `target`, by parameter."""
    for p in critic.parameters().values():
        p.grad = torch.zeros_like(p)
    (flat(critic.values(samples, at)) - target).square().mean().backward()
    return {n: p.grad.clone() for n, p in critic.parameters().items()}


def test_zero_heads_give_zero_and_learn_first_then_the_adapter(make_critic, asked):
    samples, at = asked
    critic = make_critic(moved=0)
    assert not flat(critic.values(samples, at)).any()
    before = {n: p.clone() for n, p in critic.peft.named_parameters()}
    grads = backward(critic, samples, at)
    assert set(grads) == set(critic.parameters()) and len(grads) == 3 * 7 * 2 + 6
    assert all(grads[f"heads.{name}.{part}"].any() for name in HEADS for part in ("weight", "bias"))
    assert not any(grads[n].any() for n in critic.adapter())
    optimizer = torch.optim.SGD(critic.parameters().values(), lr=1e-2)
    optimizer.step()
    grads = backward(critic, samples, at)
    assert all(grads[n].any() for n in grads if ".lora_B." in n)
    optimizer.step()
    assert all(g.any() for g in backward(critic, samples, at).values())
    for name, p in critic.peft.named_parameters():                   # the base has no gradient and stands
        assert name in critic.adapter() or p.grad is None and torch.equal(p, before[name]), name


def test_recomputed_activations_give_the_same_gradient(make_critic, asked):
    once, again = (backward(make_critic(checkpointing=c), *asked) for c in (False, True))
    for name, grad in once.items():
        assert grad.any() and torch.allclose(grad, again[name], atol=1e-6), name


def test_a_head_that_is_not_read_gets_no_gradient(make_critic, policy):
    critic = make_critic(heads=("value", "potential"))
    s = make_sample(policy, 1, [5])
    grads = backward(critic, [s], [{"potential": [last(s)]}])
    assert grads["heads.potential.weight"].any() and not grads["heads.value.weight"].any()


def test_a_bfloat16_base_gives_float32_values_near_those_of_float32(make_critic, asked):
    samples, at = asked
    wanted, got = (flat(make_critic(dtype=dtype).values(samples, at)) for dtype in ("float32", "bfloat16"))
    assert got.dtype == torch.float32 and 0 < (wanted - got).abs().max() < 0.1 * wanted.abs().max()
    critic = make_critic(dtype="bfloat16")
    assert all(p.dtype == torch.float32 for p in critic.parameters().values())
    assert all(g.isfinite().all() and g.any() for g in backward(critic, samples, at).values())


@pytest.mark.parametrize("by", ["screenshot", "prompt", "response"])
def test_a_few_steps_fit_what_depends_on(make_critic, policy, by):
    """Targets of 1 and -1 that nothing but the screenshot, the prompt or the response tells apart."""
    critic = make_critic(moved=0)
    images = [png(150), png(151)] if by == "screenshot" else [png(150)]
    users = ["Where is the cart?", "Where is the shop?"] if by == "prompt" else ["Go."]
    tails = [[5, 9], [5, 300]] if by == "response" else [[5, 9]]
    samples = [make_sample(policy, 0, ids, user, image)
               for image in images for user in users for ids in tails]
    at = [{"low": [last(s) + 2 * (by == "response")]} for s in samples]
    target, optimizer = torch.tensor([1.0, -1.0]), torch.optim.Adam(critic.parameters().values(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (flat(critic.values(samples, at)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == 1 and losses[-1] < 0.01, losses


# --------------------------------------------------------------------------------------------------- on disk
def test_a_critic_saves_and_loads_bit_equal(make_critic, asked, tmp_path):
    critic, other = make_critic(moved=3), make_critic(moved=4)
    critic.save(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json",
                                                     "heads.safetensors"}
    other.load(tmp_path)
    for (name, a), b in zip(critic.parameters().items(), other.parameters().values(), strict=True):
        assert torch.equal(a, b), name
    assert_same(other.values(*asked), critic.values(*asked), 0)
    other.save(tmp_path / "again")
    for name in ("adapter_model.safetensors", "heads.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_resumed_critic_takes_the_step_that_the_first_one_would_have_taken(make_critic, asked, tmp_path):
    def step(critic, optimizer):
        backward(critic, *asked)
        optimizer.step()
    critics = [make_critic(moved=m) for m in (3, 4)]
    optimizers = [torch.optim.AdamW(c.parameters().values(), lr=1e-3) for c in critics]
    step(critics[0], optimizers[0])
    save_checkpoint(tmp_path, 1, {"critic": critics[0]}, {"critic": optimizers[0]}, keep=2)
    assert load_checkpoint(tmp_path, {"critic": critics[1]}, {"critic": optimizers[1]}) == 1
    for critic, optimizer in zip(critics, optimizers):
        step(critic, optimizer)
    assert all(map(torch.equal, critics[0].parameters().values(), critics[1].parameters().values()))


def damage(directory, file, change):
    state = load_file(directory / file)
    change(state)
    save_file(state, directory / file)


@pytest.mark.parametrize("change, says", [
    (lambda s: s.update({"middle.weight": s.pop("low.weight")}), "heads"),
    (lambda s: (s.pop("low.weight"), s.pop("low.bias")), r"heads \['high', 'keep'\]"),
    (lambda s: s.update({"more.weight": s["low.weight"].clone()}), "heads"),
    (lambda s: s.update({"low.weight": s["low.weight"][:64].clone()}), r"low.weight.*\(64,\).*\(96,\)"),
    (lambda s: s["keep.weight"].__setitem__(7, torch.nan), "NaN or infinite.*keep.weight"),
    (lambda s: s["high.bias"].fill_(-torch.inf), "NaN or infinite.*high.bias")])
def test_heads_that_do_not_fit_are_refused_and_nothing_changes(make_critic, asked, tmp_path, change, says):
    make_critic(moved=3).save(tmp_path)
    damage(tmp_path, "heads.safetensors", change)
    refused_and_unchanged(make_critic(moved=4), asked, tmp_path, says)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_adapter_with_numbers_that_are_none_is_refused(make_critic, asked, tmp_path, value):
    make_critic(moved=3).save(tmp_path)
    damage(tmp_path, "adapter_model.safetensors", lambda s: s[max(s)].fill_(value))
    refused_and_unchanged(make_critic(moved=4), asked, tmp_path, "NaN or infinite")


@pytest.mark.parametrize("bytes_left", [0, 7, 200])
def test_heads_that_cannot_be_read_are_refused(make_critic, asked, tmp_path, bytes_left):
    make_critic(moved=3).save(tmp_path)
    file = tmp_path / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    refused_and_unchanged(make_critic(moved=4), asked, tmp_path, "cannot be read")


def refused_and_unchanged(critic, asked, directory, says):
    before = critic.values(*asked)
    with pytest.raises(UserError, match=says) as error:
        critic.load(directory)
    assert "\n" not in str(error.value) and str(directory) in str(error.value)
    assert_same(critic.values(*asked), before, 0)


def test_an_adapter_of_another_base_or_rank_or_of_a_policy_is_refused(make_critic, make_policy, asked,
                                                                      tiny_model, tmp_path):
    def widen(state):
        for name in [n for n in state if "q_proj.lora_A" in n]:
            state[name] = torch.ones(5, *state[name].shape[1:])
    make_critic().save(tmp_path / "shape")
    damage(tmp_path / "shape", "adapter_model.safetensors", widen)
    refused_and_unchanged(make_critic(), asked, tmp_path / "shape", r"q_proj.*\(5, 96\) and not \(4, 96\)")
    make_critic(tiny_model).save(tmp_path / "base")                  # with heads of the right width
    make_critic().save(tmp_path / "heads")
    shutil.copy(tmp_path / "heads" / "heads.safetensors", tmp_path / "base")
    refused_and_unchanged(make_critic(), asked, tmp_path / "base", "adapter .* does not fit")
    make_critic(r=8).save(tmp_path / "rank")
    refused_and_unchanged(make_critic(), asked, tmp_path / "rank", "r 8")
    make_policy().save(tmp_path / "policy")
    refused_and_unchanged(make_critic(tiny_model), asked, tmp_path / "policy", "no heads.safetensors")


# --------------------------------------------------------------------------------------------- what it reads
def test_a_base_that_makes_other_ids_is_refused(larger, tiny_model, tmp_path):
    need_critic(larger, tiny_model)
    shutil.copytree(larger, tmp_path / "cut")
    file = tmp_path / "cut" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] *= 2
    file.write_text(json.dumps(settings))
    words = random_checkpoint(tmp_path / "words", hidden=64, layers=1, vision_hidden=32, vocabulary=680)
    for path, says in ((tmp_path / "cut", "screenshots"), (words, "tokenizer")):
        with pytest.raises(UserError, match=f"{path}.*{says}.*{tiny_model}"):
            need_critic(path, tiny_model)
        with pytest.raises(UserError, match=says):
            Critic(path, "critic", HEADS, Inputs(tiny_model), r=4)


@pytest.mark.parametrize("kind", ["llama", "qwen2_vl", "clip"])
def test_a_base_that_is_no_qwen2_5_vl_is_refused(tiny_model, tmp_path, kind):
    shutil.copytree(tiny_model, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": kind}))
    for make in (lambda: need_critic(tmp_path / "other", tiny_model),
                 lambda: Critic(tmp_path / "other", "critic", HEADS, Inputs(tiny_model))):
        with pytest.raises(UserError, match=f"other is a {kind} model.*Qwen2.5-VL") as error:
            make()
        assert "\n" not in str(error.value)
