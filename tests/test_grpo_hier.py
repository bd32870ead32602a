"""grpo_hier.update through the real policy: against a plain loop over samples, two processes against one,
a resumed run against an uninterrupted one. Run as a program (`two_ranks` does), it is one of two gloo ranks.
"""

import dataclasses
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import request

import grpo_hier
from bookkeeping import load_checkpoint, save_checkpoint, statistics, total
from grpo_hier import Batch, batches, credit, drawn_batches, log_line, micro_batches, schedule, update
from model.policy import Policy
from rollout import Episode, Group, Plan, Step, Task, request_seed
from runtime import UserError, World, process_group

ROLES = ("actor", "decomposer")


def config(**settings):
    small = {"K": 2, "M": 3, "max_steps": 3, "max_tokens_A": 8, "max_tokens_D": 12, "temperature_A": 0.8,
             "temperature_D": 0.7, "micro_batch": 3, "max_norm": 1e9}
    return dataclasses.replace(grpo_hier.Config(), **small | settings)


def draw(policy, n, seed=0):
    return policy.sample([request(seed + i, "word " * (i % 3), max_new_tokens=3 + i % 4) for i in range(n)])


@pytest.fixture(scope="module")
def batch(policy):
    """Nine samples of different lengths, three of them with advantage 0."""
    adv = [0.5, -0.5, 0.0, 1.0, -1.0, 0.0, 0.25, -0.75, 0.0]
    return Batch(draw(policy, 9), adv, [1, 2, 2, 3, 3, 3, 1, 2, 2])


def gradients(policy, batch, cfg, B=2):
    """The gradient of each pass, none of which moves the weights; and the statistics."""
    seen = []
    optimizer = SimpleNamespace(step=lambda: seen.append(
        torch.cat([p.grad.flatten() for p in policy.parameters().values()])))
    return seen, update(policy, optimizer, batch, B, cfg, World())


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters().values()])


def chosen(batch, rows):
    """The samples of these rows, in this order."""
    return Batch(*([x[i] for i in rows] for x in (batch.samples, batch.adv, batch.T)))


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
    old = [[x.item() for x in response_logp(policy, s, T)] for s in batch.samples]
    ref = [[x.item() for x in response_logp(policy, s, T, True)] for s in batch.samples]
    for _ in range(cfg.passes):
        loss, clips, tokens, kl = 0.0, 0, 0, 0.0
        for s, A, T_ij, o, f in zip(batch.samples, batch.adv, batch.T, old, ref):
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
    cfg = config(norm=norm, beta=beta)
    policy, plain = make_policy(role, moved=5), make_policy(role, moved=5)
    lr = {"actor": 0.1, "decomposer": 0.02}[role] * {"drgrpo": 1.0, "printed": 0.5}[norm]
    before = flat(policy).clone()
    wanted = plain_loop(plain, batch, 2, cfg, lr)
    got = update(policy, torch.optim.SGD(policy.parameters().values(), lr=lr), batch, 2, cfg, World())
    assert_close(flat(policy) - before, flat(plain) - before, 1e-3)
    assert got["clip"] == pytest.approx(wanted["clip"]) and 0 < got["clip"] < 1 and got["ratio_max"] > 1.2
    assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-6)
    assert got["kl"] == pytest.approx(wanted["kl"], rel=1e-3) and (got["kl"] > 0) == (beta > 0)
    assert got["trained"] == (9 if beta else 6)


# -------------------------------------------------------------- what the gradient must and must not depend on
@pytest.mark.parametrize("norm", ["drgrpo", "printed"])
def test_micro_batches_and_order_are_no_part_of_the_objective(make_policy, batch, norm):
    policy = make_policy()
    (wanted, _), stats = gradients(policy, batch, config(norm=norm, micro_batch=9))
    assert wanted.abs().max() > 0 and stats["ratio_max"] == 1.0
    shuffled = chosen(batch, torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist())
    for data, size in ((batch, 1), (batch, 2), (batch, 4), (shuffled, 9), (shuffled, 2)):
        for grad in gradients(policy, data, config(norm=norm, micro_batch=size))[0]:
            assert_close(grad, wanted)


def test_a_micro_batch_has_so_many_samples_and_so_many_tokens_at_most():
    lengths = [5, 1, 9, 2, 3, 30]
    order = sorted(range(6), key=lengths.__getitem__)
    cut = lambda **settings: micro_batches(order, lengths, config(**settings))
    assert cut(micro_batch=4) == [[1, 3, 4, 0], [2, 5]]
    assert cut(micro_batch=4, micro_tokens=10) == [[1, 3, 4], [0], [2], [5]]   # 3 x 3 tokens; 30 come alone
    assert cut(micro_batch=2, micro_tokens=10) == [[1, 3], [4, 0], [2], [5]]
    assert micro_batches([], lengths, config()) == []


def test_a_token_budget_is_no_part_of_the_objective(make_policy, batch):
    policy = make_policy()
    wanted = gradients(policy, batch, config(micro_batch=9))[0][0]
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in batch.samples)
    assert_close(gradients(policy, batch, config(micro_batch=9, micro_tokens=2 * longest))[0][0], wanted)


def elsewhere(batch, shift):
    """The same samples as if a sampler had given every token `shift` nats more."""
    return Batch([dataclasses.replace(s, logp=[x + shift for x in s.logp]) for s in batch.samples], batch.adv,
                 batch.T)


def test_the_mismatch_of_sampler_and_trainer_is_logged_and_may_weight_the_terms(make_policy, batch):
    policy = make_policy()
    drawn = Batch(draw(policy, 9), batch.adv, batch.T)               # by this very policy
    (plain, _), stats = gradients(policy, drawn, config())
    assert stats["mismatch"] < 1e-5
    (same, _), stats = gradients(policy, elsewhere(drawn, -0.5), config())
    assert torch.equal(same, plain) and stats["mismatch"] == pytest.approx(0.5, abs=1e-5)
    weighted = lambda shift, cap: gradients(policy, elsewhere(drawn, shift), config(is_cap=cap))[0]
    for grad in weighted(-0.5, 9.0):                                 # in both passes
        assert_close(grad, math.exp(0.5) * plain)
    assert_close(weighted(-0.5, 1.2)[0], 1.2 * plain)                # cut at the cap
    assert_close(weighted(0.5, 1.2)[0], math.exp(-0.5) * plain)      # never from below


def test_drawn_ahead_of_an_update_the_ratio_is_to_the_sampler(make_policy, batch):
    policy = make_policy()
    drawn = Batch(draw(policy, 9), batch.adv, batch.T)
    (fresh, _), _ = gradients(policy, drawn, config())
    assert_close(gradients(policy, drawn, config(pipeline=1))[0][0], fresh)      # sampler and trainer are one
    (stale, _), stats = gradients(policy, elsewhere(drawn, -0.1), config(pipeline=1))
    assert_close(stale, math.exp(0.1) * fresh)                       # all ratios exp(0.1), within the clip
    assert stats["ratio_max"] == pytest.approx(math.exp(0.1), rel=1e-4)
    (cut, _), stats = gradients(policy, elsewhere(drawn, -0.5), config(pipeline=1))
    gains = Batch(drawn.samples, [min(a, 0.0) for a in drawn.adv], drawn.T)      # the clip acts in pass 1
    assert_close(cut, math.exp(0.5) * gradients(policy, gains, config())[0][0])
    assert 0 < stats["clip"] < 1


def test_samples_of_advantage_zero_are_not_run_and_change_no_bit(make_policy, batch, monkeypatch):
    policy, run = make_policy(), []
    logp = policy.logp
    monkeypatch.setattr(policy, "logp", lambda samples, T, **k: run.extend(samples) or logp(samples, T, **k))
    with_zeros, stats = gradients(policy, batch, config())
    assert len(run) == 2 * stats["trained"] == 2 * 6
    without, _ = gradients(policy, chosen(batch, [i for i, a in enumerate(batch.adv) if a]), config())
    assert all(torch.equal(a, b) for a, b in zip(with_zeros, without))
    # and that is what running them would give: a KL term of weight zero runs them all
    assert_close(gradients(policy, batch, config(beta=1e-30))[0][0], with_zeros[0])


def test_ratio_is_one_in_pass_1_with_dropout_configured(make_policy, batch):
    policy = make_policy(dropout=0.5, checkpointing=True)
    stats = gradients(policy, batch, config(passes=2))[1]   # pass 2 recomputes: the weights did not move here
    assert abs(stats["ratio_max"] - 1) < 1e-6 and stats["clip"] == 0
    plain = gradients(make_policy(), batch, config(passes=1))[0][0]
    assert_close(gradients(policy, batch, config(passes=1))[0][0], plain)


def test_each_role_has_its_own_temperature(make_policy, batch):
    for role in ROLES:
        policy = make_policy(role)
        base, warm_A, warm_D = (gradients(policy, batch, config(temperature_A=a, temperature_D=d))[0][0]
                                for a, d in ((0.8, 0.8), (1.6, 0.8), (0.8, 1.6)))
        mine, other = (warm_A, warm_D) if role == "actor" else (warm_D, warm_A)
        assert torch.equal(other, base) and (mine - base).abs().max() > 0.1 * base.abs().max()


def test_the_gradient_is_clipped_per_role_to_max_norm(make_policy, batch):
    policy = make_policy()
    free, stats = gradients(policy, batch, config(passes=1))
    assert stats["grad"] == pytest.approx(float(free[0].norm()), rel=1e-5)
    (bound,), stats = gradients(policy, batch, config(passes=1, max_norm=stats["grad"] / 4))
    assert_close(bound, free[0] / 4, 1e-4)
    assert stats["grad"] == pytest.approx(float(free[0].norm()), rel=1e-5)            # logged before the clip


def test_nothing_to_learn_is_a_step_with_a_zero_gradient(make_policy, batch):
    policy = make_policy()
    empty = dataclasses.replace(batch.samples[0], response_ids=[], logp=[])
    for data in (Batch([], [], []), Batch([batch.samples[0]], [0.0], [1]), Batch([empty], [1.0], [1])):
        before = {n: p.detach().clone() for n, p in policy.parameters().items()}
        optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-2, weight_decay=0.0)
        stats = update(policy, optimizer, data, 1, config(), World())
        assert all(not p.grad.any() and torch.equal(p, before[n]) for n, p in policy.parameters().items())
        assert stats["grad"] == stats["loss"] == stats["clip"] == 0 and stats["ratio_max"] == 1
    mixed = Batch([empty, batch.samples[1]], [1.0, -0.5], [1, 2])     # an empty answer adds nothing to others
    alone = Batch([batch.samples[1]], [-0.5], [2])
    assert_close(gradients(policy, mixed, config(norm="printed"))[0][0],
                 gradients(policy, alone, config(norm="printed"))[0][0])


# ---------------------------------------------------------------------------- episodes -> both roles' updates
def groups(policy, B, seed=0, K=2, M=3):
    """B tasks with K plans of M episodes of 1-3 steps, with real samples; one episode is lost."""
    dice, out = torch.Generator().manual_seed(seed), []
    drawn = iter(draw(policy, B * K * (1 + 3 * M), 100 * seed))
    for b in range(B):
        group = Group(Task(f"task{b}", "site"))
        group.plans = [Plan(k, sample=next(drawn)) for k in range(K)]
        for plan in group.plans:
            group.episodes.append([])
            for m in range(M):
                reward = float(torch.randint(2, (), generator=dice)) if (b, plan.k, m) != (0, 1, 1) else None
                steps = [Step(b"", next(drawn)) for _ in range(1 + (b + plan.k + m) % 3)]
                group.episodes[-1].append(Episode(group, plan, m, 0, steps, reward=reward))
        out.append(group)
    return out


def learn(policies, optimizers, mine, B, cfg, world=World()):
    """What `train` does with a rank's groups."""
    *_, adv_A, adv_D = credit(mine, cfg)
    data = batches(mine, adv_A, adv_D)
    return {role: update(policies[role], optimizers[role], data[role], B, cfg, world) for role in ROLES}


def adam(policies, lr=1e-4):
    return {role: torch.optim.AdamW(policy.parameters().values(), lr=lr, eps=1e-12, weight_decay=0.0)
            for role, policy in policies.items()}


def weights(policies):
    return {(role, n): p.detach().clone()
            for role, policy in policies.items() for n, p in policy.parameters().items()}


def test_one_step_moves_the_trained_role_and_nothing_else(make_policy, policy):
    policies = {role: make_policy(role, moved=0, seed=i) for i, role in enumerate(ROLES)}
    before = weights(policies)
    frozen = {(r, n): p.detach().clone() for r, q in policies.items() for n, p in q.peft.named_parameters()
              if ".lora_" not in n}
    g = groups(policy, 2, seed=4)
    *_, adv_A, adv_D = credit(g, config())
    data = batches(g, adv_A, adv_D)
    assert any(data["actor"].adv) and any(data["decomposer"].adv)
    for trained in ROLES:
        start = weights(policies)
        update(policies[trained], adam(policies)[trained], data[trained], 2, config(), World())
        for (role, name), now in weights(policies).items():
            same = torch.equal(now, start[role, name])
            assert same == (role != trained), f"{name} of the {role} after a step of the {trained}"
    assert all(torch.equal(dict(policies[r].peft.named_parameters())[n], p) for (r, n), p in frozen.items())
    assert len(before) == len(weights(policies)) == 56


def test_statistics_are_over_episodes_and_the_log_line_over_all_ranks(policy):
    g, cfg = groups(policy, 3), config()
    shares = [statistics(p, *credit(p, cfg)) for p in (g[:1], [], g[1:])]  # the second rank has no task
    line, alone = log_line(total(shares), {}), log_line(statistics(g, *credit(g, cfg)), {})
    assert line.pop("faults") == alone.pop("faults")
    assert line == pytest.approx(alone, rel=1e-12)
    rewards = [e.reward for group in g for row in group.episodes for e in row if e.reward is not None]
    assert line["reward_mean"] == sum(rewards) / len(rewards) and len(rewards) == 17
    assert line["infra_rate"] == pytest.approx(1 / 18)
    assert line["steps_mean"] == sum(len(e.steps) for group in g for row in group.episodes for e in row) / 18


def test_eq_11_is_logged_as_the_sum_of_both_losses(policy):
    g = groups(policy, 1)
    s = statistics(g, *credit(g, config()))
    assert log_line(s, {"actor": {"loss": 0.5}, "decomposer": {"loss": -0.2}})["loss"] == pytest.approx(0.3)
    assert log_line(s, {"actor": {"loss": 0.5}})["loss"] == 0.5


# --------------------------------------------------------------------------------- two processes, one process
CASES = {"two tasks and one": (3, {}), "one task, a rank with none": (1, {}),
         "printed, with a KL term": (3, {"norm": "printed", "beta": 0.1})}


def rank_main(directory):
    """One rank: every case on its share of the tasks; rank 0 writes down what it ended with."""
    policies, cases = pickle.loads((directory / "in.pkl").read_bytes()), {}
    with process_group() as world:
        try:
            load_checkpoint(directory / f"node{world.rank}" / "checkpoints", {}, {}, world)
        except UserError as e:
            (directory / f"error{world.rank}").write_text(str(e))
        for name, (all_groups, cfg) in policies["cases"].items():
            pair = rebuild(policies["model"], directory)
            stats = learn(pair, adam(pair), all_groups[world.rank::world.size], len(all_groups), cfg, world)
            cases[name] = (weights(pair), stats)
        if world.main:
            torch.save(cases, directory / "out.pt")


def rebuild(model, directory):
    torch.set_num_threads(1)
    pair = {role: Policy(model, role, r=4, alpha=8) for role in ROLES}
    for role in ROLES:
        pair[role].load(directory / role)
    return pair


@pytest.fixture(scope="module")
def two_ranks(policy, make_policy, tiny_model, tmp_path_factory):
    """What two gloo ranks, each a process of its own, make of the cases, and what this process alone does."""
    directory = tmp_path_factory.mktemp("ranks")
    for role in ROLES:
        make_policy(role, moved=6).save(directory / role)
    cases = {name: (groups(policy, B, seed=4), config(**settings)) for name, (B, settings) in CASES.items()}
    (directory / "in.pkl").write_bytes(pickle.dumps({"model": tiny_model, "cases": cases}))
    save_checkpoint(directory / "node0" / "checkpoints", 3, {}, {}, keep=1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(grpo_hier.__file__).parent)}
    ranks = [subprocess.Popen([sys.executable, __file__, directory], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)})
             for r in range(2)]
    alone = {}
    for name, (all_groups, cfg) in cases.items():
        pair = rebuild(tiny_model, directory)
        alone[name] = learn(pair, adam(pair), all_groups, len(all_groups), cfg), weights(pair)
    for rank in ranks:
        out, _ = rank.communicate(timeout=600)
        assert rank.returncode == 0, out[-3000:]
    errors = [file.read_text() for file in sorted(directory.glob("error*"))]
    return torch.load(directory / "out.pt", weights_only=False), alone, errors


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_where_one_process_does(two_ranks, case):
    together, stats = two_ranks[0][case]
    stats_alone, alone = two_ranks[1][case]
    assert max(float((together[key] - alone[key]).abs().max()) for key in alone) <= 1e-6
    for role in ROLES:
        assert stats[role]["trained"] > 0
        assert stats[role] == pytest.approx(stats_alone[role], rel=1e-4, abs=1e-9), role


def test_ranks_that_do_not_see_one_run_directory_are_refused(two_ranks):
    """Rank 0 has a checkpoint, rank 1 has none in a directory of its own."""
    errors = two_ranks[2]
    assert len(errors) == 2 and all("000003 for rank 0, None for rank 1" in error for error in errors)
    assert all(error.startswith("--run_dir ") and "all nodes share" in error for error in errors)


# ------------------------------------------------------------------------------------------- schedule, resume
@pytest.mark.parametrize("pipeline, wanted", [
    (0, ["sync 0", "draw 0", "train 0", "sync 1", "draw 1", "train 1", "sync 2", "draw 2", "train 2"]),
    (1, ["sync 0", "draw 0", "sync 1", "draw 1", "train 0", "sync 2", "draw 2", "train 1", "train 2"])])
def test_the_next_batch_is_drawn_while_this_one_trains_only_with_pipeline(pipeline, wanted):
    """A draw ahead ends only when the update before it is under way, and that only once the draw began."""
    events, begun, under_way = [], *([threading.Event() for _ in range(3)] for _ in range(2))

    def draw(i):
        events.append(f"draw {i}")
        begun[i].set()
        assert not pipeline or i == 0 or under_way[i - 1].wait(10), "the update waits for the draw"
        return f"groups {i}"

    def sync(i):
        events.append(f"sync {i}")
        return {"version": i}
    for i, told, drawn in drawn_batches(range(3), draw, sync, config(pipeline=pipeline)):
        under_way[i].set()
        assert not pipeline or i == 2 or begun[i + 1].wait(10), "the draw waits for the update"
        assert (told["version"], drawn) == (i, f"groups {i}") and told["seconds_sync"] >= 0
        events.append(f"train {i}")
    assert events == wanted


def test_schedule_and_seeds_do_not_depend_on_ranks():
    tasks = [Task(f"task{i}", "site", seed=i % 3) for i in range(10)]
    cfg = config(epochs=2, seed=3)
    one, four = schedule(tasks, cfg, 1), schedule(tasks, cfg, 4)
    flat = [t for b in one for t in b]
    assert [t for b in four for t in b] == flat and list(map(len, four)) == [4, 4, 2] * 2
    assert sorted(t.id for t in flat[:10]) == sorted(t.id for t in tasks) and flat[:10] != flat[10:]
    assert schedule(tasks, dataclasses.replace(cfg, seed=4), 1) != one and schedule(tasks, cfg, 1) == one
    assert schedule(tasks, dataclasses.replace(cfg, tasks_per_rank=2), 2) == four
    seeds = {request_seed(0, "task", k, m, step) for k in range(3) for m in range(7) for step in range(15)}
    assert len(seeds) == 3 * 7 * 15 and all(0 <= s < 2 ** 63 for s in seeds)
    assert request_seed(0, "task", 1) == 4757332655181960182        # the same in every process


def test_a_resumed_run_ends_with_the_same_bytes(make_policy, policy, tmp_path):
    """Four rollout batches in one go, against two, a checkpoint, and two more in new objects."""
    data = [groups(policy, 1, seed=s) for s in (4, 5, 6, 7)]
    fresh = lambda: {role: make_policy(role, moved=0, seed=i) for i, role in enumerate(ROLES)}
    straight = fresh()
    optimizers = adam(straight, 1e-3)
    for i, g in enumerate(data):
        learn(straight, optimizers, g, 1, config())
        if i == 1:
            torch.manual_seed(42)
            save_checkpoint(tmp_path, i + 1, straight, optimizers, keep=2)
    resumed = fresh()
    optimizers = adam(resumed, 1e-3)
    torch.manual_seed(0)
    assert load_checkpoint(tmp_path, resumed, optimizers) == 2
    assert torch.initial_seed() == 42                                # the generator's state is part of it
    for g in data[2:]:
        learn(resumed, optimizers, g, 1, config())
    a, b = weights(straight), weights(resumed)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], w) for key, w in weights(fresh()).items())


def test_only_complete_checkpoints_count_and_old_ones_go(make_policy, tmp_path):
    policies = {"actor": make_policy(moved=0)}
    assert load_checkpoint(tmp_path / "none", policies, {}) == 0
    for done in (1, 2, 3):
        save_checkpoint(tmp_path, done, policies, adam(policies), keep=2)
    (tmp_path / ".000004.tmp").mkdir()                               # what a killed write leaves behind
    assert sorted(p.name for p in tmp_path.iterdir()) == [".000004.tmp", "000002", "000003"]
    assert load_checkpoint(tmp_path, policies, adam(policies)) == 3


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))


def test_a_plan_without_a_verdict_has_no_return(policy):
    """It is not one of the returns whose spread is logged."""
    cfg = config()
    [group] = groups(policy, 1)
    for e in group.episodes[0]:
        e.reward = None
    *_, S_BK, adv_A, adv_D = credits = credit([group], cfg)
    assert log_line(total([statistics([group], *credits)]), {})["S_std"] == pytest.approx(
        float(S_BK[0, 1:].std(correction=0)))
