"""model/update.py with the paper's objective through the real policy: against a plain loop over samples, and
what the gradient must and must not depend on."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import draw, learn, small_config

from model.update import Row, micro_batches

ROLES = ("actor", "decomposer")


@pytest.fixture(scope="module")
def batch(policy):
    """Nine samples of different lengths, three of them with advantage 0."""
    adv = [0.5, -0.5, 0.0, 1.0, -1.0, 0.0, 0.25, -0.75, 0.0]
    return rows_of(draw(policy, 9), adv, [1, 2, 2, 3, 3, 3, 1, 2, 2])


def rows_of(samples, adv, T):
    return [Row(*of) for of in zip(samples, adv, T, strict=True)]


def samples_of(batch):
    return [row.sample for row in batch]


def gradients(policy, batch, cfg, B=2):
    """The gradient of each pass, none of which moves the weights; and the statistics."""
    seen = []
    optimizer = SimpleNamespace(step=lambda: seen.append(
        torch.cat([p.grad.flatten() for p in policy.parameters().values()])))
    return seen, learn(policy, optimizer, batch, B, cfg)


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters().values()])


def chosen(batch, rows):
    """These rows, in this order."""
    return [batch[i] for i in rows]


def assert_close(a, b, relative=1e-5):
    assert (a - b).abs().max() <= relative * b.abs().max(), float((a - b).abs().max() / b.abs().max())


# ---------------------------------------------------------------------------- the update against a plain loop
def response_logp(policy, s, T, reference=False):
    """log π of one sample by transformers' own forward pass."""
    inputs = policy.inputs.batch([s.prompt_ids + s.response_ids], [s.png])
    if reference:
        with policy.peft.disable_adapter(), torch.no_grad():
            logits = policy.model(**inputs).logits[0]
    else:
        logits = policy.model(**inputs).logits[0]
    logits = logits / T
    logits = logits.index_fill(-1, policy.banned, -torch.inf).log_softmax(-1)
    return [logits[len(s.prompt_ids) - 1 + u, token] for u, token in enumerate(s.response_ids)]


def plain_loop(policy, batch, B, cfg, lr):
    """Two SGD steps of Eqs. 7, 7', 10 or 10', token by token as printed; the second pass's statistics."""
    role_A = policy.role == "actor"
    T, C = (0.8, 3 * 8) if role_A else (0.7, 12)
    old = [[x.item() for x in response_logp(policy, s, T)] for s in samples_of(batch)]
    ref = [[x.item() for x in response_logp(policy, s, T, True)] for s in samples_of(batch)]
    for _ in range(cfg.passes):
        loss, clips, tokens, kl = 0.0, 0, 0, 0.0
        for row, o, f in zip(batch, old, ref):
            s, A, T_ij = row.sample, row.adv, row.T
            if A == 0 and cfg.beta == 0:
                continue
            inner = 0.0
            for lp, lp_old, lp_ref in zip(response_logp(policy, s, T), o, f):
                r = (lp - lp_old).exp()
                surrogate = min(r * A, r.clamp(1 - cfg.eps, 1 + cfg.eps) * A, key=torch.Tensor.item)
                divergence = (lp_ref - lp).exp() - (lp_ref - lp) - 1
                inner = inner + surrogate - cfg.beta * divergence
                clips += (r > 1 + cfg.eps) if A > 0 else (r < 1 - cfg.eps)
                tokens, kl = tokens + 1, kl + divergence.item()
            if cfg.norm == "printed":
                weight = 1 / len(s.response_ids) / (T_ij if role_A else 1)
            else:
                weight = 1 / C
            loss = loss - weight * inner / (B * cfg.K * (cfg.M if role_A else 1))
        parameters = list(policy.parameters().values())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.data -= lr * g
    return {"loss": loss.item(), "clip": int(clips) / tokens, "kl": kl / tokens if cfg.beta else 0.0}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("norm, beta", [("drgrpo", 0.0), ("printed", 0.0), ("drgrpo", 0.2), ("printed", 0.2)])
def test_two_passes_are_the_printed_equations_token_by_token(make_policy, batch, role, norm, beta):
    cfg = small_config(norm=norm, beta=beta)
    policy, plain = make_policy(role, moved=5), make_policy(role, moved=5)
    lr = {"actor": 0.1, "decomposer": 0.02}[role] * {"drgrpo": 1.0, "printed": 0.5}[norm]
    before = flat(policy).clone()
    wanted = plain_loop(plain, batch, 2, cfg, lr)
    got = learn(policy, torch.optim.SGD(policy.parameters().values(), lr=lr), batch, 2, cfg)
    assert_close(flat(policy) - before, flat(plain) - before, 1e-3)
    assert got["clip"] == pytest.approx(wanted["clip"]) and 0 < got["clip"] < 1 and got["ratio_max"] > 1.2
    assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-6)
    assert got["kl"] == pytest.approx(wanted["kl"], rel=1e-3) and (got["kl"] > 0) == (beta > 0)
    assert got["trained"] == (9 if beta else 6)


# -------------------------------------------------------------- what the gradient must and must not depend on
@pytest.mark.parametrize("norm", ["drgrpo", "printed"])
def test_micro_batches_and_order_are_no_part_of_the_objective(make_policy, batch, norm):
    policy = make_policy()
    (wanted, _), stats = gradients(policy, batch, small_config(norm=norm, micro_batch=9))
    assert wanted.abs().max() > 0 and stats["ratio_max"] == 1.0
    shuffled = chosen(batch, torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist())
    for data, size in ((batch, 1), (batch, 2), (batch, 4), (shuffled, 9), (shuffled, 2)):
        for grad in gradients(policy, data, small_config(norm=norm, micro_batch=size))[0]:
            assert_close(grad, wanted)


def test_a_micro_batch_has_so_many_samples_and_so_many_tokens_at_most():
    rows = [Row(SimpleNamespace(prompt_ids=[1] * n, response_ids=[])) for n in (5, 1, 9, 2, 3, 30)]
    cut = lambda **settings: micro_batches(rows, small_config(**settings))
    assert cut(micro_batch=4) == [[1, 3, 4, 0], [2, 5]]
    assert cut(micro_batch=4, micro_tokens=10) == [[1, 3, 4], [0], [2], [5]]   # 3 x 3 tokens; 30 come alone
    assert cut(micro_batch=2, micro_tokens=10) == [[1, 3], [4, 0], [2], [5]]
    assert micro_batches([], small_config()) == []


def test_a_token_budget_is_no_part_of_the_objective(make_policy, batch):
    policy = make_policy()
    wanted = gradients(policy, batch, small_config(micro_batch=9))[0][0]
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples_of(batch))
    cut = small_config(micro_batch=9, micro_tokens=2 * longest)
    assert_close(gradients(policy, batch, cut)[0][0], wanted)


def elsewhere(batch, shift):
    """The same samples as if a sampler had given every token `shift` nats more."""
    moved = [dataclasses.replace(s, logp=[x + shift for x in s.logp]) for s in samples_of(batch)]
    return [dataclasses.replace(row, sample=s) for row, s in zip(batch, moved)]


def test_the_mismatch_of_sampler_and_trainer_is_logged_and_may_weight_the_terms(make_policy, batch):
    policy = make_policy()
    drawn = [dataclasses.replace(row, sample=s) for row, s in zip(batch, draw(policy, 9))]
    (plain, _), stats = gradients(policy, drawn, small_config())
    assert stats["mismatch"] < 1e-5
    (same, _), stats = gradients(policy, elsewhere(drawn, -0.5), small_config())
    assert torch.equal(same, plain) and stats["mismatch"] == pytest.approx(0.5, abs=1e-5)
    weighted = lambda shift, cap: gradients(policy, elsewhere(drawn, shift), small_config(is_cap=cap))[0]
    for grad in weighted(-0.5, 9.0):                                 # in both passes
        assert_close(grad, math.exp(0.5) * plain)
    assert_close(weighted(-0.5, 1.2)[0], 1.2 * plain)                # cut at the cap
    assert_close(weighted(0.5, 1.2)[0], math.exp(-0.5) * plain)      # never from below


def test_drawn_ahead_of_an_update_the_ratio_is_to_the_sampler(make_policy, batch):
    policy = make_policy()
    drawn = [dataclasses.replace(row, sample=s) for row, s in zip(batch, draw(policy, 9))]
    (fresh, _), _ = gradients(policy, drawn, small_config())
    assert_close(gradients(policy, drawn, small_config(pipeline=1))[0][0], fresh)
    (stale, _), stats = gradients(policy, elsewhere(drawn, -0.1), small_config(pipeline=1))
    assert_close(stale, math.exp(0.1) * fresh)                       # all ratios exp(0.1), within the clip
    assert stats["ratio_max"] == pytest.approx(math.exp(0.1), rel=1e-4)
    (cut, _), stats = gradients(policy, elsewhere(drawn, -0.5), small_config(pipeline=1))
    gains = [dataclasses.replace(row, adv=min(row.adv, 0.0)) for row in drawn]      # the clip acts in pass 1
    assert_close(cut, math.exp(0.5) * gradients(policy, gains, small_config())[0][0])
    assert 0 < stats["clip"] < 1


def test_samples_of_advantage_zero_are_not_run_and_change_no_bit(make_policy, batch, monkeypatch):
    policy, run = make_policy(), []
    logp = policy.logp
    monkeypatch.setattr(policy, "logp", lambda samples, T, **k: run.extend(samples) or logp(samples, T, **k))
    with_zeros, stats = gradients(policy, batch, small_config())
    assert len(run) == 2 * stats["trained"] == 2 * 6
    without, _ = gradients(policy, [row for row in batch if row.adv], small_config())
    assert all(torch.equal(a, b) for a, b in zip(with_zeros, without))
    # and that is what running them would give: a KL term of weight zero runs them all
    assert_close(gradients(policy, batch, small_config(beta=1e-30))[0][0], with_zeros[0])


def test_ratio_is_one_in_pass_1_with_dropout_configured(make_policy, batch):
    policy = make_policy(dropout=0.5, checkpointing=True)
    stats = gradients(policy, batch, small_config(passes=2))[1]   # pass 2: the weights did not move
    assert abs(stats["ratio_max"] - 1) < 1e-6 and stats["clip"] == 0
    plain = gradients(make_policy(), batch, small_config(passes=1))[0][0]
    assert_close(gradients(policy, batch, small_config(passes=1))[0][0], plain)


def test_each_role_has_its_own_temperature(make_policy, batch):
    for role in ROLES:
        policy = make_policy(role)
        base, warm_A, warm_D = (gradients(policy, batch, small_config(temperature_A=a, temperature_D=d))[0][0]
                                for a, d in ((0.8, 0.8), (1.6, 0.8), (0.8, 1.6)))
        mine, other = (warm_A, warm_D) if role == "actor" else (warm_D, warm_A)
        assert torch.equal(other, base) and (mine - base).abs().max() > 0.1 * base.abs().max()


def test_the_gradient_is_clipped_per_role_to_max_norm(make_policy, batch):
    policy = make_policy()
    free, stats = gradients(policy, batch, small_config(passes=1))
    assert stats["grad"] == pytest.approx(float(free[0].norm()), rel=1e-5)
    (bound,), stats = gradients(policy, batch, small_config(passes=1, max_norm=stats["grad"] / 4))
    assert_close(bound, free[0] / 4, 1e-4)
    assert stats["grad"] == pytest.approx(float(free[0].norm()), rel=1e-5)            # logged before the clip


def test_nothing_to_learn_is_a_step_with_a_zero_gradient(make_policy, batch):
    policy = make_policy()
    empty = dataclasses.replace(batch[0].sample, response_ids=[], logp=[])
    for data in ([], [Row(batch[0].sample)], [Row(empty, 1.0)]):
        before = {n: p.detach().clone() for n, p in policy.parameters().items()}
        optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-2, weight_decay=0.0)
        stats = learn(policy, optimizer, data, 1, small_config())
        assert all(not p.grad.any() and torch.equal(p, before[n]) for n, p in policy.parameters().items())
        assert stats["grad"] == stats["loss"] == stats["clip"] == 0 and stats["ratio_max"] == 1
    mixed = [Row(empty, 1.0, 1), Row(batch[1].sample, -0.5, 2)]     # an empty answer adds nothing to others
    alone = [Row(batch[1].sample, -0.5, 2)]
    assert_close(gradients(policy, mixed, small_config(norm="printed"))[0][0],
                 gradients(policy, alone, small_config(norm="printed"))[0][0])
