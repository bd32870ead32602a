"""The episode loop and the pool: determinism, statuses, faults, deadlines, ends, and what is written down."""

import hashlib
import json
import re
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from hostile import Hostile, Prompts, act, left_behind, scripted
from scenarios import CLICK, END

import rollout
from bench.soak import while_they_come
from language import actions
from records.episode import read_plan
from records.episode_log import EpisodeLog
from records.training_log import fault_counts
from rollout import Progress, history_line, request_seed
from sites.miniwob import MiniWob
from web.environment import RolloutConfig, Verdict

SETTINGS = {
    "threads": 2, "retries": 1, "coordinates": "page",
    "max_steps": 4,
    "call_timeout": 4.0,
    "settle": 1.0,
    "retry_wait": 0.0,
    "open_timeout": 30.0,
}


@pytest.fixture(scope="module")
def site():
    environment = Hostile()
    yield environment
    environment.close()


def sample(text):
    return SimpleNamespace(text=text, image_size=(320, 240), prompt_ids=[1], response_ids=[0], logp=[0.0])


def says(*texts):
    """A model that says one text after the other in every episode."""
    return lambda requests: [sample(texts[min(json.loads(r.user)[1], len(texts) - 1)]) for r in requests]


def play(env, tasks, models, K=1, M=1, use_plan=False, seed=0, **settings):
    """All groups, sorted by task."""
    roles = ("actor", "decomposer") if use_plan else ("actor",)
    with scripted(env, RolloutConfig(**SETTINGS | settings), roles=roles) as pool:
        groups = list(pool.run(tasks, K if use_plan else 1, M, seed, models))
    assert not left_behind()
    return sorted(groups, key=lambda g: g.task.id)


def episodes(groups):
    return [e for g in groups for row in g.episodes for e in row]


# ------------------------------------------------------------------------------------------------ determinism
class Scribes(Prompts):
    """Prompts in which everything stands that an episode could depend on."""

    def actor(self, instruction, history, plan):
        return "", json.dumps([instruction, history, plan])


def by_chance(requests):
    """Clicks and plans that depend on the seed, the prompt and the screenshot, and on nothing else."""
    out = []
    for r in requests:
        h = hashlib.sha256(repr((r.seed, r.user, hashlib.sha256(r.png).hexdigest())).encode()).digest()
        calls = [
            f"click(x={h[0] % 160}, y={50 + h[1] % 160})",
            "press(keys='tab')",
            "go_backward()",
            "keyDown(key='shift')",
            f"moveTo(x={h[2] % 160}, y={h[3] % 160})",
            "terminate(status='success')",
        ]
        out.append(
            sample(f"1. go: {h[4]}" if r.role == "decomposer" else calls[h[5] % 7 if h[5] % 7 < 6 else 0])
        )
    return out


def told(groups):
    return [
        (
            g.task.id,
            g.instruction,
            hashlib.sha256(g.png).hexdigest(),
            [p.text for p in g.plans],
            [
                (
                    e.seed,
                    e.status,
                    e.reward,
                    e.reason,
                    e.answer,
                    [(s.line, hashlib.sha256(s.png).hexdigest()) for s in e.steps],
                )
                for row in g.episodes
                for e in row
            ],
        )
        for g in groups
    ]


def test_the_same_episodes_with_one_thread_and_with_four():
    env = MiniWob("choose-date-easy,click-tab,use-spinner", instances=1)
    models = {"decomposer": by_chance, "actor": by_chance}
    results = []
    for threads, order in ((1, 1), (4, -1)):
        with scripted(env, RolloutConfig(**SETTINGS | {"threads": threads}), Scribes(),
                      ("actor", "decomposer")) as pool:
            tasks = env.tasks("train")[::order]
            results.append(told(sorted(pool.run(tasks, 2, 2, (5, 0), models), key=lambda g: g.task.id)))
    env.close()
    assert results[0] == results[1]
    lines = [line for _, _, _, _, es in results[0] for e in es for line, _ in e[-1]]
    assert len(set(lines)) > 10  # the agents have done many different things


def test_all_draws_of_a_task_have_seeds_of_their_own_and_ranks_do_not_matter(site):
    seen = []

    def model(requests):
        seen.extend((r.user, r.seed, r.temperature, r.max_new_tokens) for r in requests)
        return [sample("1. go: on" if r.role == "decomposer" else END) for r in requests]

    models = {"decomposer": model, "actor": model}
    tasks = [site.task("ok", i) for i in range(2)]
    play(site, tasks[:1], models, K=3, M=7, use_plan=True, threads=3)
    assert len({s for _, s, *_ in seen}) == len(seen) == 3 + 21
    seen.clear()
    play(site, tasks, models, K=1, M=2, use_plan=True)
    both = sorted(seen)
    assert len({s for _, s, *_ in both}) == 2 * (1 + 2)
    seen.clear()
    for rank in range(2):  # two ranks, half of the tasks each
        play(site, tasks[rank::2], models, K=1, M=2, use_plan=True, threads=1)
    assert sorted(seen) == both
    seen.clear()
    play(site, tasks, models, K=1, M=2, use_plan=True, seed=1)
    assert not {s for _, s, *_ in seen} & {s for _, s, *_ in both}


def test_a_seed_depends_on_every_part():
    assert request_seed(0, "a", 1) == request_seed(0, "a", 1)
    seeds = {
        request_seed(*key)
        for key in ((0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, "a"), ("0", "a", 1))
    }
    assert len(seeds) == 6 and all(0 <= s < 2**63 for s in seeds)


# ---------------------------------------------------------------------------------------- how an episode ends
@pytest.mark.parametrize(
    "texts, status, steps, answer",
    [
        ((CLICK,), "success", 1, ""),  # the page says that it is over
        (("wait(seconds=0)",), "max_steps", 4, ""),
        ((END,), "failure", 1, ""),
        (("response(answer='42')",), "failure", 1, "42"),  # PAPER-GAP 13
        (("what?",), "unparsable", 3, ""),  # PAPER-GAP 12
        (("what?", "what?", "wait(seconds=0)", "what?"), "max_steps", 4, ""),
        (("click(x=1, y=1)\nresponse(answer='a')\nclick(x=60, y=60)",), "failure", 1, "a"),
    ],
)
def test_how_an_episode_ends(site, texts, status, steps, answer):
    (episode,) = episodes(play(site, [site.task("ok")], {"actor": says(*texts)}, threads=1))
    assert (episode.status, len(episode.steps), episode.answer) == (status, steps, answer), episode.error
    assert episode.reward == float(status == "success") and episode.fault == "" and episode.final_png


def test_a_history_line_tells_what_was_done_and_what_came_of_it():
    action = actions.parse("<operation>Open  the\nmenu</operation><action>click(x=1, y=2)</action>")
    assert history_line(action, "", []) == "Open the menu"
    assert (
        history_line(actions.parse(CLICK), "no", ["an alert"]) == "click(x=60, y=60) | failed: no | an alert"
    )
    assert history_line(actions.parse("?"), "no action", []).startswith("(unreadable answer) | failed:")
    assert len(history_line(actions.parse(CLICK), "x" * 900, [])) == 500


def test_a_plan_that_cannot_be_read_is_passed_on_clipped():
    assert read_plan(0, sample("x" * 2000)).text == "x" * 1000 and read_plan(0, sample("?")).malformed
    plan = read_plan(2, sample("1. Open: the menu\n2. Pick: tea"))
    assert plan.text == "1. Open: the menu\n2. Pick: tea" and not plan.malformed and plan.k == 2
    assert [(s.title, s.goal) for s in plan.subtasks] == [("Open", "the menu"), ("Pick", "tea")]


def test_without_a_plan_there_is_no_decomposer_and_K_counts_as_one(site):
    (group,) = play(site, [site.task("ok")], {"actor": act}, K=3, M=2, use_plan=False)
    assert len(group.plans) == 1 and group.plans[0].text == "" and [len(row) for row in group.episodes] == [2]


def test_without_a_verdict_an_episode_is_run_again_and_then_infra(site, monkeypatch):
    unknown, known = Verdict(None, "the judge is out", {"other": 0.0}), Verdict(1.0, "right", {"other": 1.0})

    def played(*verdicts):
        def judge(*_):
            if (verdict := next(left)) is None:
                raise ConnectionRefusedError("connection refused")
            return verdict

        left = iter(verdicts)
        monkeypatch.setattr(site, "judge", judge)
        (episode,) = episodes(play(site, [site.task("ok")], {"actor": act}))
        told = episode.status, episode.reward, episode.fault, episode.retried, episode.reason, episode.rewards
        return told, fault_counts([episode])

    told, counts = played(unknown, known)
    assert told == ("success", 1.0, "", ["verdict"], "right", {"other": 1.0})
    assert counts == {"retried_verdict": 1}
    told, counts = played(unknown, unknown)  # what the judge did say stays
    assert told == ("infra", None, "verdict", ["verdict"], "the judge is out", {"other": 0.0})
    assert counts == {"infra_verdict": 1, "retried_verdict": 1}
    told, _ = played(unknown, None)  # the second attempt breaks: no reward of the first is left
    assert told == ("infra", None, "refused", ["verdict"], "the judge is out", {})


def test_an_episode_whose_task_does_not_open_has_the_seconds_of_the_attempts(site):
    (lost,) = episodes(play(site, [site.task("5xx")], {"actor": act}, retry_wait=0.4))
    assert (lost.status, lost.fault) == ("infra", "http_5xx") and 0.4 < lost.seconds < 20


# ------------------------------------------------------------------------------------ faults, bounds, the end
def test_a_bug_is_not_weather(site, monkeypatch):
    def judge(task, session, answer):
        raise KeyError("a mistake in the environment")

    monkeypatch.setattr(site, "judge", judge)
    with pytest.raises(KeyError, match="a mistake"):
        play(site, [site.task("ok", i) for i in range(3)], {"actor": act})
    assert not left_behind()


def test_an_error_of_the_model_ends_the_run_and_all_browsers(site):
    def broken(requests):
        raise RuntimeError("out of memory")

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"):
        play(site, [site.task("ok", i) for i in range(4)], {"actor": broken})
    assert time.monotonic() - start < 30 and not left_behind()


class Server:
    """A model on a server: it answers each request by itself, and is out of order for the first few."""

    def __init__(self, out_of_order):
        self.out_of_order, self.executor = out_of_order, ThreadPoolExecutor(4)

    def submit(self, request):
        return self.executor.submit(self.answer, request)

    def answer(self, request):
        if self.out_of_order > 0:
            self.out_of_order -= 1
            raise ConnectionError("model server http://there: no answer")
        return sample("1. click: it") if request.role == "decomposer" else act([request])[0]


def test_a_model_on_a_server_answers_and_its_outages_are_data(site):
    models = {"decomposer": Server(0), "actor": Server(1)}
    (group,) = play(site, [site.task("ok")], models, K=2, M=2, use_plan=True)
    assert [e.status for e in episodes([group])] == ["success"] * 4
    assert sum((e.retried for e in episodes([group])), []) == ["model"]
    assert {p.text for p in group.plans} == {"1. click: it"}
    (group,) = play(site, [site.task("ok")], {"decomposer": Server(1), "actor": Server(0)}, use_plan=True)
    assert [(e.status, e.retried) for e in episodes([group])] == [("success", ["model"])]
    (lost,) = episodes(play(site, [site.task("ok")], {"actor": Server(9)}))
    assert (lost.status, lost.fault, lost.reward) == ("infra", "model", None) and "no answer" in lost.error


def test_a_pool_that_is_closed_does_not_wait_for_a_server_and_says_so(site):
    silent = SimpleNamespace(submit=lambda request: Future())
    pool = scripted(site, RolloutConfig(**SETTINGS))
    run = pool.run([site.task("ok")], 1, 1, 0, {"actor": silent})
    waiter = threading.Timer(4.0, pool.close)
    waiter.start()
    with pytest.raises(RuntimeError, match="closed"):
        list(run)
    waiter.join()
    assert not any(t.is_alive() for t in pool.threads) and not left_behind()


def test_what_has_lost_its_parent_is_still_ours(site):
    orphan = psutil.Process(int(subprocess.check_output(["sh", "-c", "sleep 60 > /dev/null & echo $!"])))
    assert orphan not in psutil.Process().children(recursive=True) and left_behind(0) == {orphan}
    orphan.kill()
    assert not left_behind()


def test_the_soak_gives_up_an_endless_wait(site):
    silent = SimpleNamespace(submit=lambda request: Future())
    with scripted(site, RolloutConfig(**SETTINGS)) as pool:
        groups = pool.run([site.task("ok")], 1, 1, 0, {"actor": silent})
        assert list(while_they_come(pool, groups, 3.0)) == []


def test_an_episode_beyond_its_deadline_is_cut_and_not_run_again(site):
    def slow(requests):
        threading.Event().wait(3.5)
        return act(requests)

    (cut,) = episodes(play(site, [site.task("ok")], {"actor": slow}, deadline=3.0, threads=1))
    assert (cut.status, cut.fault, cut.retried, cut.reward) == ("infra", "deadline", [], None)
    assert fault_counts([cut]) == {"infra_deadline": 1}


def test_a_deadline_also_cuts_an_episode_that_is_stuck_in_its_page(site):
    (hung,) = episodes(
        play(site, [site.task("busy")], {"actor": act}, deadline=6.0, call_timeout=30.0, threads=1)
    )
    assert (hung.status, hung.fault) == ("infra", "deadline") and hung.seconds < 15


def test_close_takes_no_longer_than_15_seconds_whatever_the_pages_do(site):
    pool = scripted(site, RolloutConfig(**SETTINGS | {"call_timeout": 60.0, "threads": 3}))
    busy = pool.run(
        [site.task("busy"), site.task("busy-later"), site.task("no-answer")], 1, 1, 0, {"actor": act}
    )

    def wait():
        with pytest.raises(RuntimeError, match="closed"):
            list(busy)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(8.0)  # all three are where nothing goes on
    assert waiter.is_alive()
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 15 and not any(t.is_alive() for t in pool.threads)
    assert not left_behind()
    waiter.join(2)
    assert not waiter.is_alive()


def test_the_environment_is_left_after_every_attempt(site, monkeypatch):
    left = []
    monkeypatch.setattr(
        site, "leave", lambda session: left.append(session) or {"order": len(left)}, raising=False
    )
    (one,) = episodes(play(site, [site.task("5xx-once", 7)], {"actor": act}))
    assert one.retried == ["http_5xx"] and len(left) == 3 and one.details == {"order": 3}
    assert fault_counts([one, one]) == {"retried_http_5xx": 2}


def test_the_bar_tells_what_is_done_live_won_and_lost_and_how_fast(capsys):
    with Progress(4, "batch 7", live={1, 2}) as bar:
        bar.begun -= 10
        for status, steps in (("success", 14), ("infra", 0), ("failure", 6)):
            bar.count(SimpleNamespace(status=status, steps=[None] * steps))
        bar.refresh()
    said = capsys.readouterr().err
    assert re.search(r"batch 7: .* 3/4 \[.*, infra=1, live=2, steps_per_s=2\.0, success=1\]", said), said


# ------------------------------------------------------------------------------------------------- the record
def test_the_log_has_every_field_and_no_secret(site, tmp_path, monkeypatch):
    original = site.open

    def open_and_log_in(task, session):
        session.secrets.add("pass-word-1")
        return original(task, session)

    monkeypatch.setattr(site, "open", open_and_log_in)
    (group,) = play(site, [site.task("ok")], {"actor": says("write(message='pass-word-1')", CLICK)}, M=2)
    log = EpisodeLog(tmp_path)
    log.append([group], 3, [{"S_i": 0.5, "adv_A": float(m), "adv_D": 0.0} for m in range(2)])
    text = (tmp_path / "episodes.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert "pass-word-1" not in text and "write(message='***')" in lines[0]["steps"][0]["text"]
    assert set(lines[0]) == set(
        """batch task site instance run k m seed instruction plan subtasks malformed status reward
        rewards reason answer seconds fault retried error details S_i adv_A adv_D first_shot final_shot
        steps""".split()
    )
    assert [(e["batch"], e["m"], e["adv_A"], e["status"]) for e in lines] == [
        (3, 0, 0.0, "success"),
        (3, 1, 1.0, "success"),
    ]
    step = lines[0]["steps"][1]
    assert step["point"] == [60, 60] and step["calls"] == ["click(x=60, y=60)"] and step["n_tokens"] == 1
    shots = {e[name] for e in lines for name in ("first_shot", "final_shot")}
    shots |= {s["shot"] for e in lines for s in e["steps"]}
    assert shots == {f"shots/{p.name}" for p in (tmp_path / "shots").iterdir()}     # equal pictures once
    assert lines[0]["first_shot"] == lines[1]["first_shot"] and len(rollout.__doc__.splitlines()) <= 25
