"""grpo_hier.py from groups to both roles' updates: what each role learns from, two processes against one, the
order of rollout batches, a resumed run against an uninterrupted one. Run as a program (`two_ranks` does), it
is one of two gloo ranks. """

import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import draw as samples_of
from conftest import learn, small_config

import grpo_hier
from grpo_hier import credit
from model.policy import Policy
from records.episode import Episode, Group, Plan, Step, all_episodes
from records.training_log import batch_line, count, total
from rollout import request_seed
from runtime import UserError, World, process_group
from runtime.batches import drawn_batches, schedule
from runtime.checkpoints import load_checkpoint, save_checkpoint
from web.environment import Task

ROLES = ("actor", "decomposer")


# ---------------------------------------------------------------------------- episodes -> both roles' updates
def groups(policy, B, seed=0, K=2, M=3):
    """B tasks with K plans of M episodes of 1-3 steps, with real samples; one episode is lost."""
    dice, out = torch.Generator().manual_seed(seed), []
    drawn = iter(samples_of(policy, B * K * (1 + 3 * M), 100 * seed))
    for b in range(B):
        group = Group(Task(f"task{b}", "site"))
        group.plans = [Plan(k, sample=next(drawn)) for k in range(K)]
        for plan in group.plans:
            plan.sample.role = "decomposer"
        for plan in group.plans:
            group.episodes.append([])
            for m in range(M):
                reward = float(torch.randint(2, (), generator=dice)) if (b, plan.k, m) != (0, 1, 1) else None
                steps = [Step(b"", [next(drawn)]) for _ in range(1 + (b + plan.k + m) % 3)]
                group.episodes[-1].append(Episode(group, plan, m, 0, steps, reward=reward))
        out.append(group)
    return out


def learn_both(policies, optimizers, mine, B, cfg, world=World()):
    """What `train` does with a rank's groups."""
    rows = credit(mine, cfg).rows
    return {role: learn(policies[role], optimizers[role], rows[role], B, cfg, world) for role in ROLES}


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
    data = credit(g, small_config()).rows
    assert data["actor"] and data["decomposer"]
    for trained in ROLES:
        start = weights(policies)
        learn(policies[trained], adam(policies)[trained], data[trained], 2, small_config())
        for (role, name), now in weights(policies).items():
            same = torch.equal(now, start[role, name])
            assert same == (role != trained), f"{name} of the {role} after a step of the {trained}"
    assert all(torch.equal(dict(policies[r].peft.named_parameters())[n], p) for (r, n), p in frozen.items())
    assert len(before) == len(weights(policies)) == 56


def line_of(parts, cfg):
    """The logged object of groups that are spread over ranks."""
    ranks = []
    for mine in parts:
        shares, faults = count(mine, grpo_hier.roles(cfg))
        ranks.append((shares | credit(mine, cfg).shares, faults))
    return batch_line(*total(ranks), {})


def test_statistics_are_over_episodes_and_the_log_line_over_all_ranks(policy):
    g, cfg = groups(policy, 3), small_config()
    line, alone = line_of((g[:1], [], g[1:]), cfg), line_of([g], cfg)      # the second rank has no task
    assert line.pop("faults") == alone.pop("faults")
    assert line == pytest.approx(alone, rel=1e-12)
    rewards = [e.reward for group in g for row in group.episodes for e in row if e.reward is not None]
    assert line["reward_mean"] == sum(rewards) / len(rewards) and len(rewards) == 17
    assert line["infra_rate"] == pytest.approx(1 / 18)
    assert line["steps_mean"] == sum(len(e.steps) for group in g for row in group.episodes for e in row) / 18
    lengths = [len(s.sample.response_ids) for e in all_episodes(g) for s in e.steps]
    assert line["len_A"] == sum(lengths) / len(lengths) and line["len_D"] > 0


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
            mine = all_groups[world.rank::world.size]
            stats = learn_both(pair, adam(pair), mine, len(all_groups), cfg, world)
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
    cases = {name: (groups(policy, B, seed=4), small_config(**settings))
             for name, (B, settings) in CASES.items()}
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
        alone[name] = learn_both(pair, adam(pair), all_groups, len(all_groups), cfg), weights(pair)
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
    for i, told, drawn in drawn_batches(range(3), draw, sync, small_config(pipeline=pipeline)):
        under_way[i].set()
        assert not pipeline or i == 2 or begun[i + 1].wait(10), "the draw waits for the update"
        assert (told["version"], drawn) == (i, f"groups {i}") and told["seconds_sync"] >= 0
        events.append(f"train {i}")
    assert events == wanted


def test_schedule_and_seeds_do_not_depend_on_ranks():
    tasks = [Task(f"task{i}", "site", seed=i % 3) for i in range(10)]
    one, four = schedule(tasks, 2, 1, seed=3), schedule(tasks, 2, 4, seed=3)
    flat = [t for b in one for t in b]
    assert [t for b in four for t in b] == flat and list(map(len, four)) == [4, 4, 2] * 2
    assert sorted(t.id for t in flat[:10]) == sorted(t.id for t in tasks) and flat[:10] != flat[10:]
    assert schedule(tasks, 2, 1, seed=4) != one and schedule(tasks, 2, 1, seed=3) == one
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
        learn_both(straight, optimizers, g, 1, small_config())
        if i == 1:
            torch.manual_seed(42)
            save_checkpoint(tmp_path, i + 1, straight, optimizers, keep=2)
    resumed = fresh()
    optimizers = adam(resumed, 1e-3)
    torch.manual_seed(0)
    assert load_checkpoint(tmp_path, resumed, optimizers) == 2
    assert torch.initial_seed() == 42                                # the generator's state is part of it
    for g in data[2:]:
        learn_both(resumed, optimizers, g, 1, small_config())
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



def test_a_plan_without_a_verdict_has_no_return(policy):
    """It is not one of the returns whose spread is logged."""
    cfg = small_config()
    _, group = groups(policy, 2)
    for e in group.episodes[0]:
        e.reward = None
    S = [sum(e.reward for e in row) / len(row) for row in group.episodes[1:]]
    assert line_of([[group]], cfg)["S_std"] == pytest.approx(torch.tensor(S).std(correction=0).item())


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
