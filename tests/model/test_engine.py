"""Generation on servers: what is asked of them, checked in their answers, pushed to them, and what happens
when they die. The servers are stand-ins (vllm_stub.py); test_vllm.py has real ones."""

import dataclasses
import threading
import time

import pytest
import torch
from conftest import png
from test_docs import glossary
from test_grpo_log import log_of
from vllm_stub import VllmStub

import grpo_hier
from model import engine
from model.engine import Clock, Fleet, Local, Vllm, load_engine
from model.roles import Request, Role
from runtime import UserError, World
from web.environment import RolloutConfig

CFG = dataclasses.replace(grpo_hier.Config(), engine="vllm", probe_limit=1e-3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine, "RETRY", 0.1)


@pytest.fixture(scope="module")
def stubs(make_policy):
    """Two servers of the actor."""
    pair = [VllmStub(make_policy(moved=0)) for _ in range(2)]
    yield pair
    for stub in pair:
        stub.server.shutdown()
        stub.server.server_close()


@pytest.fixture
def servers(stubs, make_policy, tmp_path):
    """The trainer's actor and its two servers, all of them up and holding its adapter."""
    policy = make_policy(moved=3)
    both = Vllm(policy, [stub.url for stub in stubs], tmp_path / "adapters", CFG, World(), Clock(), 5.0)
    both.push(0)
    for stub in stubs:
        stub.seen.clear()
    yield both
    both.close()
    for stub in stubs:
        stub.change, stub.drift = list, 0.0
        stub.running.set()


def ask(i, user="Where is the cart?", temperature=0.8):
    return Request("actor", "Do the next step.", user, png(i), 10 ** 18 + i, temperature, 6 + i % 3)


def test_a_server_s_sample_is_the_local_one_token_by_token(servers, stubs):
    requests = [ask(i, "word <|im_end|> " * (i % 3)) for i in range(6)]
    remote, local = [servers.submit(q) for q in requests], servers.policy.sample(requests)
    for future, there, q in zip(remote, local, requests):
        sample = future.result(30)
        assert sample.prompt_ids == there.prompt_ids and sample.response_ids == there.response_ids
        assert (sample.text, sample.truncated, sample.png) == (there.text, there.truncated, q.png)
        assert sample.image_size == there.image_size
        assert torch.allclose(torch.tensor(sample.logp), torch.tensor(there.logp), atol=1e-5)
    assert all(len(stub.calls("/v1/chat")) == 3 for stub in stubs), "the less busy server is the next"
    assert servers.submit(ask(1, temperature=0.0)).result(30).logp == [0.0] * 7


def test_each_version_has_a_new_name_and_the_stale_one_goes(servers, stubs, tmp_path):
    before = servers.submit(ask(1)).result(30)
    names = [servers.adapter]
    for version in (1, 2, 3):
        for p in servers.policy.parameters().values():
            p.data += 0.02
        told = servers.push(version)
        assert told["version"] == version and told["servers"] == 2 and 0 < told["probe"] < 1e-5
        names.append(servers.adapter)
        for stub in stubs:
            assert list(stub.adapters) == [servers.adapter]
            assert stub.running.is_set()
    assert len(set(names)) == 4 and names[1].startswith("actor-000001-")
    order = [path for path, _ in stubs[0].seen if "chat" not in path]
    assert order == ["/pause?mode=keep", "/v1/load_lora_adapter", "/resume", "/v1/unload_lora_adapter"] * 3
    assert sorted(p.name for p in (tmp_path / "adapters").iterdir()) == sorted(names[2:])  # one is late
    after = servers.submit(ask(1)).result(30)
    wanted, = servers.policy.sample([ask(1)])
    assert after.response_ids == wanted.response_ids
    assert before.logp[0] != pytest.approx(after.logp[0], abs=1e-4)


def test_a_server_that_dies_in_the_middle_is_left_out_and_comes_back(servers, stubs):
    local = servers.policy.sample([ask(i) for i in range(12)])
    dying, other = stubs
    dying.running.clear()                                            # it holds its requests, then is gone
    futures = [servers.submit(ask(i)) for i in range(12)]
    while len(dying.calls("/v1/chat")) < 3:
        time.sleep(0.01)
    dying.die()
    assert [f.result(30).response_ids for f in futures] == [s.response_ids for s in local]
    assert [s.live for s in servers.servers] == [False, True]
    assert servers.push(1)["servers"] == 1 and list(other.adapters) == [servers.adapter]
    dying.start()
    deadline = time.monotonic() + 10
    while not servers.servers[0].live:
        assert time.monotonic() < deadline, servers.servers[0].fault
        time.sleep(0.02)
    assert list(dying.adapters) == [servers.adapter], "it was given the adapter of now before any request"
    dying.seen.clear()
    assert [f.result(30).response_ids for f in [servers.submit(ask(i)) for i in range(4)]] \
        == [s.response_ids for s in local[:4]]
    assert dying.calls("/v1/chat")


def test_a_server_that_hangs_is_left_in_time_for_the_others(stubs, make_policy, tmp_path, monkeypatch):
    limit = engine.Server("http://127.0.0.1:1/v1").client.timeout
    assert limit.connect <= 10 and 4 * limit.read < RolloutConfig().deadline
    monkeypatch.setattr(engine, "ANSWER", 0.5)
    both = Vllm(make_policy(moved=3), [stub.url for stub in stubs], tmp_path, CFG, World(), Clock())
    both.push(0)
    stubs[0].running.clear()                                         # it takes requests and says nothing
    futures = [both.submit(ask(i)) for i in range(4)]
    assert [f.result(5).response_ids for f in futures] \
        == [s.response_ids for s in both.policy.sample([ask(i) for i in range(4)])]
    assert "Timeout" in both.servers[0].fault and len(stubs[0].calls("/v1/chat")) >= 2
    stubs[0].running.set()
    both.close()


def test_a_push_leaves_servers_that_are_down_to_their_revival(servers, stubs, monkeypatch):
    stubs[0].die()
    assert [f.result(30) for f in [servers.submit(ask(i)) for i in range(4)]]
    monkeypatch.setattr(servers.servers[0], "install", lambda *_: pytest.fail("it was tried again"))
    assert servers.servers[0].being_revived and servers.push(1)["servers"] == 1
    monkeypatch.undo()
    stubs[0].start()


def test_an_answer_that_was_broken_off_is_asked_of_another_server(servers, stubs):
    wanted, = servers.policy.sample([ask(1)])
    stubs[0].finish = "abort"
    servers.servers[1].busy = 9                                      # so that the first one is asked first
    assert servers.submit(ask(1)).result(30).response_ids == wanted.response_ids
    assert "abort" in servers.servers[0].fault and len(stubs[1].calls("/v1/chat")) == 1
    servers.servers[1].busy, stubs[0].finish = 0, ""


def test_a_server_that_lost_its_adapter_gets_it_again(servers, stubs):
    for stub in stubs:
        stub.adapters.clear()                                        # restarted too fast to be missed
    assert servers.submit(ask(2)).result(30).response_ids == servers.policy.sample([ask(2)])[0].response_ids


def test_without_any_server_a_request_is_infrastructure_and_a_push_ends_the_run(make_policy, tmp_path):
    stub = VllmStub(make_policy(moved=0))
    alone = Vllm(make_policy(), [stub.url], tmp_path, CFG, World(), Clock(), 0.5)
    alone.push(0)
    stub.die()
    with pytest.raises(ConnectionError, match="^model server: none answers for the actor.*127.0.0.1"):
        alone.submit(ask(1)).result(30)
    with pytest.raises(UserError, match="start a server"):
        alone.push(1)
    alone.close()


@pytest.mark.parametrize("spoil, message", [
    ({"change": lambda ids: ids[:-1]}, "log-probs"),
    ({"change": lambda ids: [3, *ids[1:]]}, None),
    ({"drift": 0.01}, "--probe_limit")], ids=["fewer ids", "other ids", "other log-probs"])
def test_answers_that_cannot_be_trained_on_end_the_run(servers, stubs, spoil, message):
    for stub in stubs:
        for name, value in spoil.items():
            setattr(stub, name, value)
    with pytest.raises(UserError, match=message):
        servers.push(1)


def test_banned_ids_and_other_prompts_are_refused(servers, stubs, monkeypatch):
    image = servers.policy.inputs.image_id
    for stub in stubs:
        stub.change = lambda ids: [image, *ids[1:]]
    with pytest.raises(UserError, match=f"{image}.*banned"):
        servers.submit(ask(1)).result(30)
    for stub in stubs:
        stub.change = list
    encode = servers.policy.encode
    monkeypatch.setattr(servers.policy, "encode", lambda *a: (encode(*a)[0][1:], encode(*a)[1]))
    with pytest.raises(UserError, match="prompt ids"):
        servers.submit(ask(1)).result(30)


def test_a_server_on_another_base_is_found_by_the_probe(servers, stubs, monkeypatch):
    other = stubs[1].policy.model.lm_head.weight
    with torch.no_grad():
        other.mul_(1.01)
    with pytest.raises(UserError, match=f"{stubs[1].url}.*probe"):
        servers.push(1)
    with torch.no_grad():
        other.div_(1.01)


@pytest.mark.parametrize("url, message", [
    ("", "needs --actor_url"), ("http://h:8000/v1,http://me:secret@g/v1", "--actor_url: no user or password"),
    ("http://token@h:8000/v1", "--actor_url: no user or password")])
def test_servers_that_are_not_named_or_carry_a_secret_are_one_line(url, message, make_policy, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        roles = [Role("actor", urls=url)]
        load_engine(CFG, roles, {"actor": make_policy()}, tmp_path, World())
    assert "secret" not in str(error.value) and "token" not in str(error.value)


def test_generation_of_both_roles_at_a_time_counts_once(stubs, make_policy, tmp_path):
    clock = Clock()
    pair = {role: Vllm(make_policy(moved=3), [stub.url], tmp_path / role, CFG, World(), clock)
            for role, stub in zip(("actor", "decomposer"), stubs)}
    fleet = Fleet(pair, {}, {"actor": "A", "decomposer": "D"}, clock)
    fleet.sync(0)
    for stub in stubs:
        stub.running.clear()
    start = time.monotonic()
    futures = [servers.submit(ask(1)) for servers in pair.values()]
    time.sleep(0.5)
    for stub in stubs:
        stub.running.set()
    assert all(f.result(30) for f in futures)
    assert 0.4 < fleet.clock()["generation"] <= time.monotonic() - start
    fleet.close()


def test_a_local_engine_that_draws_ahead_has_the_weights_of_its_last_sync(make_policy):
    policy = make_policy()
    ahead, now = Local({"actor": policy}, {}, True), Local({"actor": policy}, {}, False)
    draw = lambda engine: engine.models["actor"]([ask(1)])[0].logp
    before = draw(now)
    assert draw(ahead) == before
    for p in policy.parameters().values():
        p.data += 0.02
    assert draw(ahead) == before != draw(now)
    ahead.sync(1)
    assert draw(ahead) == draw(now)


class Answered(dict):
    """`models` for a scripted pool, which asks in lists: each list goes to the servers."""

    def __getitem__(self, role):
        servers = super().__getitem__(role)
        return lambda requests: [f.result(60) for f in [servers.submit(q) for q in requests]]


def with_servers(monkeypatch, kill, hold=lambda: None):
    """Let scripted runs ask servers; `kill` the actor's first one while it has a request of the second
    rollout batch, which `hold` keeps there. Returns a list of how many it then had."""
    load, had = grpo_hier.load_engine, []

    def wrapped(*arguments):
        it = load(*arguments)
        first, sync = it.models["actor"].servers[0], it.sync

        def kill_at_work():
            while not first.busy:
                time.sleep(0.001)
            had.append(first.busy)
            kill()

        def syncing(version):
            told = sync(version)
            if version == 1:
                hold()
                threading.Thread(target=kill_at_work, daemon=True).start()
            return told
        it.models, it.sync = Answered(it.models), syncing
        return it
    monkeypatch.setattr(grpo_hier, "load_engine", wrapped)
    return had


def test_a_run_through_servers_logs_what_a_local_run_logs(tiny_model, make_policy, tmp_path, monkeypatch):
    """Three rollout batches through both engines, the actor's first server killed in the second one."""
    fleet = {role: VllmStub(make_policy(role, moved=0, r=4, alpha=8)) for role in ("actor", "decomposer")}
    fleet["spare"] = VllmStub(make_policy("actor", moved=0))
    local = log_of(tiny_model, tmp_path / "local", monkeypatch)
    had = with_servers(monkeypatch, fleet["actor"].die, fleet["actor"].running.clear)
    remote = log_of(tiny_model, tmp_path / "remote", monkeypatch, engine="vllm", is_cap=2.0, probe_limit=1e-3,
                    actor_url=f"{fleet['actor'].url}, {fleet['spare'].url}",
                    decomposer_url=fleet["decomposer"].url)
    assert [line["version_A"] for line in remote] == [0, 1, 2]
    assert [line["servers_A"] for line in remote] == [2, 2, 1] and had
    assert all(0 < line[key] < 1e-4 for line in remote for key in ("probe_A", "probe_D", "mismatch_A"))
    other = ("seconds", "phases", "mismatch", "ratio", "grad", "faults")
    same = [k for k in local[0] if not k.startswith(other)]
    for a, b in zip(local, remote):
        assert {k: b[k] for k in same} == pytest.approx({k: a[k] for k in same}, rel=1e-3, abs=1e-6)
    assert all(line["phases"]["generation"] > 0 for line in remote)
    assert glossary()[1] == {k for k in remote[0] if k not in local[0]}     # docs/metrics.md defines each key


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_reaches_no_server(servers, stubs, tmp_path, value):
    name, published = servers.adapter, sorted((tmp_path / "adapters").iterdir())
    with torch.no_grad():
        next(iter(servers.policy.parameters().values()))[0, 0] = value
    with pytest.raises(UserError, match="adapter of the actor cannot work: 1 of its 28 tensors hold NaN"):
        servers.push(1)
    assert all(list(stub.adapters) == [name] and not stub.seen for stub in stubs)
    assert sorted((tmp_path / "adapters").iterdir()) == published
