"""The losses of Eqs. 7, 7', 10 and 10' on whole rollout batches, and what they add up to in expectation.

Oracles: a loop in Python floats, written from the printed formula; appendix B without sampling, as a tabular
decomposer and actor are small enough to enumerate every outcome of a rollout batch; TRL's loss, live where
TRL is installed (.venv-trl, see bench/loss.py), and as numbers frozen from such a run everywhere. """

import pytest
import torch
from exact import Rollouts, Toy, TrlCase, close, config, everyone, t

from grpo_hier import advantage_A, loss_A, loss_A_printed, loss_D, loss_D_printed

# ----------------------------------------------------------------- a rollout batch for Eqs. 7, 7', 10 and 10'
# a token's weight: T_ij actions in its episode, n tokens in its response, B·K·M = 12 episodes, B·K = 6 plans
WEIGHTS = {("actor", "printed"): lambda T, n: 1 / T / n / 12,
           ("actor", "drgrpo"): lambda T, n: 1 / 12 / (4 * 8),
           ("decomposer", "printed"): lambda T, n: 1 / n / 6,
           ("decomposer", "drgrpo"): lambda T, n: 1 / 6 / 16}


def check_oracle(role, norm, beta):
    rollouts, cfg = Rollouts(), config(norm=norm, beta=beta)
    loss = rollouts.loss(cfg, role)
    loss.backward()
    total, slopes = rollouts.oracle(cfg, WEIGHTS[role, norm])
    close(loss.detach(), total)
    close(torch.cat([x.grad for x in rollouts.logp]), slopes)
    assert 0 < sum(s == 0 for s in slopes) < len(slopes) or beta      # some tokens are clipped, some are not


def check_shares(role, norm):
    """Micro-batches and ranks: any split and order of the samples, and any padding, add up to the same."""
    rollouts, cfg = Rollouts(), config(norm=norm, beta=0.1)
    whole = rollouts.loss(cfg, role).detach()
    order = torch.randperm(len(rollouts.logp), generator=torch.Generator().manual_seed(3)).tolist()
    for size in (1, 2, 5, len(order)):
        shares = [rollouts.loss(cfg, role, order[i:i + size], extra=i) for i in range(0, len(order), size)]
        close(sum(shares).detach(), whole)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_eq_7_loop_oracle(beta):
    check_oracle("actor", "printed", beta)


def test_eq_7_by_hand():
    term, mask = t([[1, 1, 1], [3, 5, 9]]), t([[1, 1, 1], [1, 0, 0]])
    # one task, two plans, two episodes: one of two actions (with 3 tokens and 1 token), the others lost
    close(loss_A_printed(term, mask, t([2, 2]), 1, 2, 2), -(3 / 3 / 2 + 3 / 1 / 2) / 4)
    close(loss_A_printed(t([[7, 7]]), t([[0, 0]]), t([1]), 1, 1, 1), 0.0)          # an action without a token


def test_eq_7_shares_add_up():
    check_shares("actor", "printed")


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_eq_7p_loop_oracle(beta):
    check_oracle("actor", "drgrpo", beta)


def test_eq_7p_by_hand():
    term, mask = t([[1, 2, 100], [3, 100, 100]]), t([[1, 1, 0], [1, 0, 0]])
    close(loss_A(term, mask, 1, 2, 2, 10), -6 / (2 * 2 * 10))
    close(loss_A(term, mask, 3, 2, 2, 10), -6 / (3 * 2 * 2 * 10))                   # mean over the tasks


def test_eq_7p_shares_add_up():
    check_shares("actor", "drgrpo")


@pytest.mark.parametrize("role, norm", WEIGHTS)
def test_eq_7p_at_ratio_one_is_reinforce(role, norm):
    """The gradient of each token is -A times its weight; in the primed forms that weight is one constant."""
    rollouts, cfg = Rollouts(equal=True), config(norm=norm)
    rollouts.loss(cfg, role).backward()
    for i, logp in enumerate(rollouts.logp):
        weight = WEIGHTS[role, norm](rollouts.T[rollouts.episode[i]], len(logp))
        close(logp.grad, [-weight * rollouts.adv[rollouts.episode[i]]] * len(logp))


def test_eq_7p_a_longer_answer_or_episode_changes_no_other_token_s_weight():
    cfg = config(norm="drgrpo")
    for part, longer in (("logp", lambda r: r.logp.__setitem__(0, t([-1.0] * 9).requires_grad_())),
                         ("T", lambda r: r.T.__setitem__(0, 50))):
        a, b = Rollouts(equal=True), Rollouts(equal=True)
        longer(b), b.old.__setitem__(0, b.logp[0].detach()), b.ref.__setitem__(0, b.logp[0].detach())
        a.loss(cfg).backward(), b.loss(cfg).backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(a.logp[1:], b.logp[1:])), part
        close(b.logp[0].grad, [float(a.logp[0].grad[0])] * len(b.logp[0]))


def test_eq_7p_without_a_plan_there_is_one_group():
    rollouts = Rollouts(B=2, K=1, M=6)
    close(rollouts.loss(config(K=3, M=6, use_plan=False)).detach(), rollouts.loss(config(K=1, M=6)).detach())


# -------------------------------------------------------------------------------------------- Eqs. 10 and 10'
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_eq_10_loop_oracle(beta):
    check_oracle("decomposer", "printed", beta)


def test_eq_10_by_hand():
    close(loss_D_printed(t([[1, 2, 100], [3, 100, 100]]), t([[1, 1, 0], [1, 0, 0]]), 1, 2), -(3 / 2 + 3) / 2)


def test_eq_10_shares_add_up():
    check_shares("decomposer", "printed")


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_eq_10p_loop_oracle(beta):
    check_oracle("decomposer", "drgrpo", beta)


def test_eq_10p_by_hand():
    close(loss_D(t([[1, 2, 100], [3, 100, 100]]), t([[1, 1, 0], [1, 0, 0]]), 2, 3, 10), -6 / (2 * 3 * 10))


def test_eq_10p_shares_add_up():
    check_shares("decomposer", "drgrpo")


# --------------------------------------------------------------------------------- Appendix B, by enumeration
@pytest.mark.parametrize("K, M, L", [(2, 2, 2), (2, 3, 1), (3, 2, 1), (1, 2, 1), (2, 1, 2)])
def test_appendix_B_expected_gradients_are_the_policy_gradient_times_known_factors(K, M, L):
    toy = Toy(K, M, L)
    close(toy.p.sum(), 1.0, 1e-12)
    true_D, true_A = torch.autograd.grad(toy.J(), (toy.theta_D, toy.theta_A), retain_graph=True)
    got_D, got_A = toy.expected()
    assert true_D.abs().max() > 0.01 and true_A.abs().max() > 0.001
    close(-got_D, true_D * (K - 1) / K, 1e-10)              # the loss is minimised: its gradient is minus J's
    close(-got_A, true_A * (M - 1) / M, 1e-10)


def test_appendix_B_dividing_by_the_std_breaks_it():
    toy = Toy(2, 2, 2)
    truth = torch.autograd.grad(toy.J(), (toy.theta_D, toy.theta_A), retain_graph=True)
    for got, true in zip(toy.expected(std=True), truth):
        best = -(got * true).sum() / (true * true).sum()              # whatever positive factor one allows
        assert (-got - best * true).abs().max() > 1e-3 * got.abs().max(), "still proportional to the gradient"


def test_appendix_B_conditioning_the_actor_s_baseline_on_the_plan_removes_variance():
    """Exact variance of the actor's gradient, each estimator scaled to be unbiased: Eq. 5's baseline against
    one mean over all K·M episodes of the task."""
    toy = Toy(2, 3, 1)
    B, K, M = toy.R_BKM.shape
    score = torch.stack([torch.autograd.grad(lp, toy.theta_A, retain_graph=True)[0].flatten()
                         for lp in toy.logp_A.sum(-1).flatten()])
    score = score.view(*toy.logp_A.shape[:2], -1)[toy.d[..., None], toy.e]

    def mean_and_variance(adv_BKM, factor):
        g = torch.einsum("bkm,bkmn->bn", adv_BKM, score) / (K * M * factor)
        mean = (toy.p[:, None] * g).sum(0)
        return mean, (toy.p * (g - mean).square().sum(-1)).sum()
    mean, conditioned = mean_and_variance(advantage_A(toy.R_BKM, everyone(toy.R_BKM)), (M - 1) / M)
    R = toy.R_BKM.reshape(B, 1, K * M)
    other, pooled = mean_and_variance(advantage_A(R, everyone(R)).reshape(B, K, M), (K * M - 1) / (K * M))
    close(mean, other, 1e-10)                                         # the same gradient in expectation
    assert conditioned / pooled < 0.5, f"variance ratio {conditioned / pooled:.3f}"


# --------------------------------------------------------------------------------------- TRL as second oracle
# Eqs. 7', 7, 10', 10 on the tensors of `TrlCase`: loss and two checksums of its gradient, from TRL 1.16.0
FROZEN = {"7'": (-0.025107194, -0.006982193, 0.019499414),
          "7": (0.092546627, 0.131879942, 0.182877815),
          "10'": (-0.01673813, -0.004654796, 0.01299961),
          "10": (0.02606887, 0.052068848, 0.11554875)}


@pytest.mark.parametrize("equation", FROZEN)
def test_trl_frozen_numbers(equation):
    case = TrlCase()
    close(t(case.numbers(case.ours(equation))), t(FROZEN[equation]), 1e-7)


@pytest.mark.parametrize("equation", FROZEN)
def test_trl_live(equation):
    pytest.importorskip("trl", reason="TRL is not installed; bench/loss.py makes a .venv-trl that has it")
    case = TrlCase()
    ours, theirs = case.ours(equation), case.trl(equation)
    close(ours.detach(), theirs.detach(), 1e-6)
    for a, b in zip(torch.autograd.grad(ours, case.logp), torch.autograd.grad(theirs, case.logp)):
        close(a, b, 1e-6)
    close(t(case.numbers(case.trl(equation))), t(FROZEN[equation]), 1e-7)
