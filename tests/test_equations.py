"""Every equation of the paper, in its order, attacked through the functions that the stages call.

For each: numbers computed by hand, limits, invariances. The losses themselves (Eqs. 7, 7', 10, 10') and
appendix B are test_losses.py.
"""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from exact import close, config, everyone, t

import grpo_hier
from grpo_hier import (
    Agent,
    advantage_A,
    advantage_D,
    clipped,
    kl,
    loss_A,
    loss_A_printed,
    loss_D,
    loss_D_printed,
    loss_joint,
    plan_return,
    ratio,
)
from model.inputs import Sample
from model.policy import token_logp
from records.episode import Episode, Group, Plan, Step
from rollout import Ask
from sft import loss_sft
from web.environment import Task

NONE = torch.tensor([], dtype=torch.long)


# -------------------------------------------------------------------------- Eqs. 1, 2: what is conditioned on
class Models:
    """Stands for the pool, whose models answer at once: keeps the requests."""
    def __init__(self, cfg):
        self.requests = []
        self.roles = {role.name: role for role in grpo_hier.roles(cfg)}

    def submit(self, request):
        self.requests.append(request)
        return SimpleNamespace(text=f"answer {len(self.requests)}", role="")


def asked_of(**settings):
    """An agent, what it may ask with seeds 10, 11, ..., and the requests that come of it."""
    cfg = config(max_tokens_D=5, max_tokens_A=7, temperature_D=0.6, temperature_A=0.9, **settings)
    prompts = SimpleNamespace(decomposer=lambda x: ("D", x),
                              actor=lambda x, h, d: ("A", f"{x}|{';'.join(h)}|{d}"))
    models = Models(cfg)
    browser = SimpleNamespace(answer=lambda sample: sample)
    return Agent(cfg, prompts), Ask(models, browser, itertools.count(10)), models.requests


def test_eq_1_the_plan_depends_on_task_and_first_screenshot_alone():
    agent, ask, requests = asked_of()
    plans = agent.plans("x", b"o_0", ask, K=2)
    assert [(q.role, q.system, q.user, q.png, q.seed, q.temperature, q.max_new_tokens) for q in requests] == [
        ("decomposer", "D", "x", b"o_0", seed, 0.6, 5) for seed in (10, 11)]
    assert [(p.k, p.text, p.malformed) for p in plans] == [(0, "answer 1", True), (1, "answer 2", True)]


def test_eq_1_without_a_decomposer_there_are_empty_plans_and_no_question():
    agent, ask, requests = asked_of(use_plan=False)
    assert [plan.text for plan in agent.plans("x", b"o_0", ask, K=2)] == ["", ""] and not requests


def test_eq_2_the_action_depends_on_task_screenshot_history_and_plan():
    agent, ask, requests = asked_of()
    agent.begin("x", Plan(0, "1. g"))
    for line in ("a_0", "a_1"):
        agent.after(Step(b"", line=line), ask)
    sample, _ = agent.act(b"o_t", ask)
    q = requests[0]
    assert (q.role, q.system, q.user, q.png, q.seed, q.temperature, q.max_new_tokens) == (
        "actor", "A", "x|a_0;a_1|1. g", b"o_t", 10, 0.9, 7)
    assert sample.text == "answer 1" and ask.samples == [sample] and sample.role == "actor"


# --------------------------------------------------------------------------------------------- Eqs. 3, 4: SFT
def head(n=7, V=23, H=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, W = torch.randn(n, H, generator=g), torch.randn(V, H, generator=g)
    return h.requires_grad_(), W.requires_grad_(), torch.randint(V, (n,), generator=g)


def test_eq_3_by_hand():
    close(loss_sft(t([-1.0, -2.0, -3.0]), 6), 1.0)
    close(loss_sft(t([]), 6), 0.0)
    with pytest.raises(AssertionError):
        loss_sft(torch.zeros(2, 3), 6)


def test_eq_3_is_the_cross_entropy_of_the_targets_with_its_gradients():
    h, W, y = head()
    loss_sft(token_logp(h, W, y, 1.0, NONE, chunk=3), len(y)).backward()
    h64, W64 = h.detach().double().requires_grad_(), W.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(h64 @ W64.T, y).backward()
    close(h.grad, h64.grad, 1e-6)
    close(W.grad, W64.grad, 1e-6)


def test_eq_4_is_one_mean_over_the_tokens_of_all_micro_batches_and_ranks():
    logp = t([-0.5, -1.5, -2.5, -4.0, -0.1])
    for cut in range(6):                                              # a share may be empty
        close(loss_sft(logp[:cut], 5) + loss_sft(logp[cut:], 5), -logp.mean())
    close(loss_sft(logp, 5) + 0.0 * loss_sft(logp, 5), -logp.mean())  # a rank's padding has weight 0


# ----------------------------------------------------------------------------------- Eq. 5: actor's advantage
def advantage_oracle(R, valid, std, std_eps):
    """Eqs. 5 and 9 for one group, as loops over Python floats."""
    kept = [r for r, v in zip(R, valid) if v]
    if len(kept) < 2 or len(set(kept)) == 1:
        return [0.0] * len(R)
    mean = sum(kept) / len(kept)
    scale = math.sqrt(sum((r - mean) ** 2 for r in kept) / (len(kept) - 1)) + std_eps if std else 1.0
    return [(r - mean) / scale if v else 0.0 for r, v in zip(R, valid)]


def test_eq_5_by_hand():
    R = t([[[1, 0, 0, 1, 0, 0, 0]]])
    close(advantage_A(R, everyone(R)), [[[5 / 7, -2 / 7, -2 / 7, 5 / 7, -2 / 7, -2 / 7, -2 / 7]]])
    R = t([[[1, 0, 0, 0]]])                              # unbiased std: 1/2 (the population's would be 0.433)
    close(advantage_A(R, everyone(R), std=True), t([[[0.75, -0.25, -0.25, -0.25]]]) / 0.5001)


@pytest.mark.parametrize("std", [False, True])
def test_eq_5_loop_oracle(std):
    g = torch.Generator().manual_seed(5)
    R = torch.rand(6, 3, 5, generator=g, dtype=torch.float64)
    valid = torch.rand(6, 3, 5, generator=g) < 0.5
    R[~valid] = math.nan                                              # as `credit` hands them over
    before = R.clone(), valid.clone()
    got = advantage_A(R, valid, std, 1e-4)
    for b, k in itertools.product(range(6), range(3)):
        close(got[b, k], advantage_oracle(R[b, k].tolist(), valid[b, k].tolist(), std, 1e-4))
    assert torch.equal(R.nan_to_num(-1), before[0].nan_to_num(-1)) and torch.equal(valid, before[1])
    assert {int(v.sum()) for v in valid.reshape(-1, 5)} >= {1, 2, 4}  # the cases that matter did occur


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_eq_5_equal_rewards_give_exactly_zero(reward, std):
    for dtype, M in itertools.product((torch.float32, torch.float64), (1, 2, 7)):
        R = torch.full((2, 3, M), reward, dtype=dtype)
        assert torch.equal(advantage_A(R, everyone(R), std), torch.zeros_like(R))


def test_eq_5_a_plan_s_episodes_are_compared_with_each_other_only():
    R = t([[[1, 1], [0, 0]], [[0, 0], [1, 1]]])           # two tasks, two plans: nothing varies within a plan
    assert not advantage_A(R, everyone(R)).any()
    R = t([[[1, 0], [0, 0]], [[1, 1], [1, 1]]])
    close(advantage_A(R, everyone(R)), [[[0.5, -0.5], [0, 0]], [[0, 0], [0, 0]]])


def test_eq_5_lost_episodes_are_no_failures():
    R = t([[[1, 1, 0, 0, math.nan, math.nan, math.nan]]])
    close(advantage_A(R, ~R.isnan()), [[[0.5, 0.5, -0.5, -0.5, 0, 0, 0]]])
    R = t([[[1, math.nan, math.nan]]])                                # one valid episode is no group
    assert not advantage_A(R, ~R.isnan()).any()


def test_eq_5_order_of_episodes_does_not_matter():
    R = torch.rand(1, 1, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    close(advantage_A(R[..., p], everyone(R), True), advantage_A(R, everyone(R), True)[..., p])


# ------------------------------------------------------------------------------------------- Eq. 6: the ratio
def test_eq_6_by_hand():
    close(ratio(t([[math.log(0.5), -2.0]]), t([[math.log(0.25), -2.0]])), [[2.0, 1.0]])
    with pytest.raises(AssertionError):
        ratio(torch.zeros(1, 2), torch.zeros(1, 1))


def test_eq_6_gradient_is_ratio_times_score():
    logp = t([[-1.0, -2.0]]).requires_grad_()
    r = ratio(logp, t([[-1.5, -1.0]]))
    r.sum().backward()
    close(logp.grad, r.detach())


# ----------------------------------------------------------------------------------- ℓ, the clipped surrogate
@pytest.mark.parametrize("r, A, value, slope", [                      # slope: dℓ/dr
    (1.0, 2.0, 2.0, 2.0), (1.0, -2.0, -2.0, -2.0), (1.1, 1.0, 1.1, 1.0), (0.9, -1.0, -0.9, -1.0),
    (1.5, 1.0, 1.2, 0.0), (0.5, -1.0, -0.8, 0.0),                    # gone too far the right way: no gradient
    (1.5, -1.0, -1.5, -1.0), (0.5, 1.0, 0.5, 1.0),                    # gone the wrong way: never clipped
    (1.5, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.0)])
def test_clip_by_hand(r, A, value, slope):
    r_NT = t([[r]]).requires_grad_()
    out = clipped(r_NT, t([[A]]).expand_as(r_NT), 0.2)
    out.sum().backward()
    close(out.detach(), [[value]])
    assert r_NT.grad.item() == slope                                  # exactly


def test_clip_gives_every_token_its_own_advantage():
    close(clipped(t([[1.0, 1.0], [1.0, 1.0]]), t([[3.0, 3.0], [-1.0, -1.0]]), 0.2), [[3, 3], [-1, -1]])
    close(clipped(t([[1.0, 1.5], [1.0, 0.5]]), t([[3.0, 2.0], [-1.0, 0.5]]), 0.2), [[3, 2.4], [-1, 0.25]])


# --------------------------------------------------------------------------------------------- D_KL, β's term
def test_kl_by_hand():
    close(kl(t([[math.log(0.5), -1.0]]), t([[math.log(0.25), -1.0]])), [[0.5 + math.log(2) - 1, 0.0]])


def test_kl_is_never_negative_and_its_mean_is_the_divergence():
    g = torch.Generator().manual_seed(2)
    p, q = (torch.randn(1, 50, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    assert (kl(p, q) >= 0).all()
    close((p.exp() * kl(p, q)).sum(), (p.exp() * (p - q)).sum())


# ------------------------------------------------------------------------------------- Eq. 8: a plan's return
def test_eq_8_by_hand():
    R = t([[[1, 0, 1, 0], [1, math.nan, 0, math.nan], [math.nan] * 4]])
    S, valid = plan_return(R, ~R.isnan())
    close(S, [[0.5, 0.5, 0.0]])
    assert valid.tolist() == [[True, True, False]]
    S, valid = plan_return(t([[[1, math.nan]]]), torch.tensor([[[True, False]]]))   # one is enough
    assert S.item() == 1 and valid.item()


def test_eq_8_loop_oracle():
    R = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    valid = R > 0.3
    S, _ = plan_return(R, valid)
    for b, k in itertools.product(range(4), range(3)):
        kept = R[b, k][valid[b, k]].tolist()
        close(S[b, k], sum(kept) / max(1, len(kept)))


# ------------------------------------------------------------------------------ Eq. 9: decomposer's advantage
def test_eq_9_by_hand():
    S = t([[3 / 7, 0.0, 0.0]])
    close(advantage_D(S, everyone(S)), [[2 / 7, -1 / 7, -1 / 7]])
    S = t([[1.0, 0.0]])
    close(advantage_D(S, everyone(S), std=True, std_eps=0.1), t([[0.5, -0.5]]) / (math.sqrt(0.5) + 0.1))


@pytest.mark.parametrize("std", [False, True])
def test_eq_9_loop_oracle(std):
    g = torch.Generator().manual_seed(9)
    S, valid = torch.rand(40, 3, generator=g, dtype=torch.float64), torch.rand(40, 3, generator=g) < 0.7
    got = advantage_D(S, valid, std, 1e-4)
    for b in range(40):
        close(got[b], advantage_oracle(S[b].tolist(), valid[b].tolist(), std, 1e-4))


@pytest.mark.parametrize("std", [False, True])
def test_eq_9_limits(std):
    for S in (t([[0.1, 0.1, 0.1]]), t([[0.7]]), t([[1 / 7 + 2 / 7] * 7])):          # equal plans; K = 1
        assert torch.equal(advantage_D(S, everyone(S), std), torch.zeros_like(S))
    S = t([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])                         # a plan without a return is in no mean
    valid = torch.tensor([[True, True, False], [False, False, True]])
    close(advantage_D(S, valid), [[0.5, -0.5, 0], [0, 0, 0]])


# ----------------------------------------------------------------------------------------------------- Eq. 11
def test_eq_11_is_two_independent_updates():
    a, d = t([2.0]).requires_grad_(), t([3.0]).requires_grad_()
    loss = loss_joint((a ** 2).sum(), (d ** 3).sum())
    close(loss.detach(), 31.0)
    loss.backward()
    close(torch.cat([a.grad, d.grad]), [4.0, 27.0])                   # each role's gradient is its own loss's


# --------------------------------------------------------------------------- rewards -> advantages -> samples
def sample(name):
    return Sample([1], b"", (56, 56), [2], [0.0], name)


def groups(rewards, steps):
    """Nested lists (tasks, plans, episodes) of rewards and numbers of steps -> what a rollout returns."""
    out = []
    for b, (plans, lengths) in enumerate(zip(rewards, steps)):
        group = Group(Task(f"task{b}", "site"))
        group.plans = [Plan(k, sample=sample(f"plan {b}{k}")) for k in range(len(plans))]
        group.episodes = [[Episode(group, plan, m, seed=0, reward=r,
                                   steps=[Step(b"", [sample(f"action {b}{plan.k}{m}{s}")]) for s in range(n)])
                           for m, (r, n) in enumerate(zip(*row))]
                          for plan, row in zip(group.plans, zip(plans, lengths))]
        out.append(group)
    return out


def test_eq_5_eq_9_reach_the_samples_they_belong_to():
    """One advantage per episode, whatever its steps; the actor's for actions, the decomposer's for plans."""
    g = groups([[[1, 0], [0, 0]], [[1, None], [1, 0]]], [[[3, 1], [1, 2]], [[1, 1], [2, 1]]])
    rows = grpo_hier.credit(g, config(K=2, M=2, beta=0.1)).rows   # a KL term keeps those of advantage 0
    got = {row.sample.text.split()[1]: (row.adv, row.T) for row in rows["actor"]}
    assert got == {"0000": (0.5, 3), "0001": (0.5, 3), "0002": (0.5, 3), "0010": (-0.5, 1),
                   "0100": (0, 1), "0110": (0, 2), "0111": (0, 2),
                   "1000": (0, 1), "1100": (0.5, 2), "1101": (0.5, 2), "1110": (-0.5, 1)}  # not the lost one
    assert len(rows["actor"]) == len(got)
    assert [(row.sample.text, row.adv, row.T) for row in rows["decomposer"]] == [
        ("plan 00", 0.25, 1), ("plan 01", -0.25, 1), ("plan 10", 0.25, 1), ("plan 11", -0.25, 1)]
    without = grpo_hier.credit(g, config(K=2, M=2)).rows["actor"]
    assert [row.sample.text for row in without] == [row.sample.text for row in rows["actor"] if row.adv]


def test_equations_change_none_of_their_inputs():
    draw = lambda *shape: torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    R, S, lp, old, mask = draw(2, 3, 4), draw(2, 3), -draw(3, 5), -2 * draw(3, 5), (draw(3, 5) > 0.3).double()
    for function, *args in (
            (advantage_A, R, R > 0.2, True), (advantage_D, S, S > 0.2, True), (plan_return, R, R > 0.2),
            (ratio, lp, old), (clipped, lp.exp(), old, 0.2), (kl, lp, old), (loss_sft, lp[0], 5),
            (loss_A, lp, mask, 1, 3, 4, 5), (loss_A_printed, lp, mask, t([1, 2, 3]), 1, 3, 4),
            (loss_D, lp, mask, 1, 3, 5), (loss_D_printed, lp, mask, 1, 3)):
        before = copy.deepcopy(args)
        function(*args)
        changed = [not torch.equal(a, b) for a, b in zip(args, before) if isinstance(a, torch.Tensor)]
        assert not any(changed), function.__name__
