"""Stage 1: nothing paid for is lost, nothing is there twice, nothing wrong slips in."""

import base64
import io
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from model_server import serving
from PIL import Image

import annotate
import runtime
from annotate import Config, main
from bench import annotate as bench
from demo import teacher
from runtime import UserError

ROOT = Path(__file__).resolve().parents[1]
GOOD = bench.GOOD
SIX = bench.SIX
PAPER = ROOT.parent / "shared/seeds/000_085da43796ecbd44.txt"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve trajectories of three steps; the meta file."""
    return bench.make_data(tmp_path_factory.mktemp("data") / "d", 12)


def tokens(lines) -> int:
    return sum(n for o in lines for kind, n in o["usage"].items() if not kind.endswith("cached"))


def config(data, server, tmp_path, **more):
    return Config(**{"meta": str(data), "out": str(tmp_path / "out.jsonl"), "base_url": server.url,
                     "concurrency": 4, "first_pause": 0.01, "retries": 2, "timeout": 5.0} | more)


def written(cfg):
    """(output lines, quarantine lines)"""
    return runtime.read_jsonl(cfg.out), runtime.read_jsonl(f"{cfg.out}.quarantine.jsonl")


def asked_for(body) -> str:
    """The task that a request is about."""
    return teacher.request_text(body).split("Task: ")[-1].split("\n")[0]


# --------------------------------------------------------------------------------------------- one trajectory
def test_what_the_teacher_gets(data, tmp_path):
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path, limit=1, max_side=640)
        main(cfg)
    _, body, headers = server.requests[0]
    assert headers["x-client-request-id"].startswith("d/t000000#") and body["model"] == "gpt-5.2-codex"
    (turn,) = body["input"]
    kinds = [p["type"] for p in turn["content"]]
    assert kinds == ["input_text", "input_image"] * 3 + ["input_text"]
    words = [p["text"] for p in turn["content"][::2]]
    assert 0 < words[0].index("Essential subgoals") < words[0].index("Task: Task number 0")
    assert "Step 1: Do 0 [click(x=0.5, y=0.25)]" in words[1]
    assert "Step 3: Do 2 [terminate(status='success')]\nScreenshot after step 3:\n(none was rec" in words[3]
    sizes = {Image.open(io.BytesIO(base64.b64decode(p["image_url"].split(",")[1]))).size
             for p in turn["content"] if p["type"] == "input_image"}
    assert sizes == {(640, 360)}


def test_the_output_line(data, tmp_path):
    with serving(lambda *request: GOOD.replace("NONE", "YES step 2")) as server:
        cfg = config(data, server, tmp_path, api="chat")
        main(cfg)
    lines, left = written(cfg)
    assert len({o["id"] for o in lines}) == len(lines) == 12 and not left
    line = next(o for o in lines if o["task"] == "Task number 3")
    usage = line.pop("usage")
    assert line == {"id": line["id"], "task": "Task number 3", "platform": "Web", "n_steps": 3,
                    "teacher": "a-model", "unnecessary": "step 2",
                    "analysis": "The demonstrator means to: Open the page (The page is open.), then Press "
                                "the button (It has been pressed.).",
                    "subtasks": [{"title": "Open the page", "goal": "The page is open."},
                                 {"title": "Press the button", "goal": "It has been pressed."}],
                    "prompt_hash": annotate.load_prompts().digest("teacher")}
    assert usage["input"] > 500 and usage["output"] > 50


def test_small_screenshots_go_as_they_are_and_once(data, tmp_path, monkeypatch):
    seen = []
    picture = annotate.picture
    monkeypatch.setattr(annotate, "picture", lambda path, side: seen.append(path) or picture(path, side))
    with serving(lambda *request: SIX) as server:
        main(config(data, server, tmp_path, limit=1))
    urls = [[p["image_url"] for p in body["input"][0]["content"] if "image_url" in p]
            for _, body, _ in server.requests]
    assert len(seen) == 3 and len(urls) == 2 and urls[0] == urls[1]
    assert base64.b64decode(urls[0][0].split(",")[1]) == seen[0].read_bytes()


def test_a_malformed_answer_is_asked_again_once_with_what_was_wrong(data, tmp_path):
    def mends(path, body, headers):
        return GOOD if len(body["input"]) == 3 else SIX
    with serving(mends) as server:
        cfg = config(data, server, tmp_path, limit=2)
        main(cfg)
        assert len(server.requests) == 4
        first, said, again = max((body["input"] for _, body, _ in server.requests), key=len)
        assert said == {"role": "assistant", "content": SIX}
        assert "it has 6 subtasks, and 1 to 5" in again["content"]
        once = [body["input"][0] for _, body, _ in server.requests if len(body["input"]) == 1]
        assert first in once  # the same prefix, so a provider's cache applies
        lines, left = written(cfg)
        assert len(lines) == 2 and not left and lines[0]["usage"]["output"] == len(SIX) // 4 + len(GOOD) // 4

        server.answer = lambda *request: SIX
        cfg = config(data, server, tmp_path, limit=3)
        main(cfg)
        lines, (left,) = written(cfg)
        assert len(lines) == 2
        assert left["reason"] == "malformed twice: it has 6 subtasks, and 1 to 5 are allowed"
        assert left["usage"]["output"] == 2 * (len(SIX) // 4) and len(server.requests) == 6


def test_refusals_and_cuts(data, tmp_path):
    refusal = {"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]}
    cut = {"output": [], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}

    def answer(path, body, headers):
        return {"Task number 0": refusal, "Task number 1": cut}.get(asked_for(body), GOOD)
    with serving(answer) as server:
        cfg = config(data, server, tmp_path)
        main(cfg)
    lines, left = written(cfg)
    reasons = sorted(o["reason"] for o in left)
    assert len(lines) == 10 and reasons[1] == "refused: No." and "cut off (max_output_tokens)" in reasons[0]
    assert len(server.requests) == 13  # the refusal once, the cut one twice
    again = max((body["input"] for _, body, _ in server.requests), key=len)
    assert [turn["role"] for turn in again] == ["user", "user"]  # there were no words to repeat


def test_an_unreadable_screenshot_costs_nothing(tmp_path):
    data = bench.make_data(tmp_path / "d", 3)
    broken = tmp_path / "d/t000001/images/1.png"
    broken.unlink()
    broken.write_bytes(b"\x89PNG no")
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path)
        main(cfg)
        assert len(server.requests) == 2
        lines, (left,) = written(cfg)
        assert left["where"].startswith("d/t000001#") and "1.png" in left["reason"] and len(lines) == 2
        Image.new("RGB", (50, 50)).save(broken)
        main(cfg)
        assert len(server.requests) == 2
        main(config(data, server, tmp_path, retry_quarantined=True))
    assert len(written(cfg)[0]) == 3 and not written(cfg)[1]


def test_unreadable_screenshots_are_not_the_teachers_fault(tmp_path):
    data = bench.make_data(tmp_path / "d", 40, 1)
    for i in range(30):
        (tmp_path / f"d/t{i:06d}/images/0.png").unlink()
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path)
        main(cfg)
    assert [len(o) for o in written(cfg)] == [10, 30]


@pytest.mark.skipif(not PAPER.exists(), reason="shared/seeds is absent")
def test_prompt_file(data, tmp_path):
    text = PAPER.read_text()
    text = text[text.index("You are an AI assistant tasked"):text.index("B P OLICY")]
    (tmp_path / "p.txt").write_text(text)
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path, prompt_file=str(tmp_path / "p.txt"), limit=1)
        main(cfg)
        words = [p.get("text", "<image>") for p in server.requests[0][1]["input"][0]["content"]]
        assert words[0].endswith("Task: Task number 0\n\n\nStarting Image URL:\n")
        assert words.count("<image>") == 3
        with pytest.raises(UserError, match="another prompt"):
            main(config(data, server, tmp_path))
        with pytest.raises(UserError, match="none.txt"):
            main(config(data, server, tmp_path, prompt_file="none.txt"))


# -------------------------------------------------------------------------------------- failures and resuming
def test_killed_three_times_among_faults(tmp_path):
    data = bench.make_data(tmp_path / "d", 60, 2)
    out = tmp_path / "out.jsonl"
    faulty = bench.Faulty(seed=1, latency=0.05, limit=8, stall=1.5, always=0.1)
    server = teacher.Server(faulty, handler=bench.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    args = bench.command(data, out, server.server_address[1], concurrency=8, timeout=1.0, retries=5,
                         first_pause=0.05)
    for goal in (8, 20, 35):
        process = subprocess.Popen(args)
        while bench.lines(out) < goal:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = bench.outcome(out, 60)
    assert found["lost"] == found["duplicated"] == 0
    assert found["quarantined"] >= 1 and found["annotated"] >= 45
    before = sum(faulty.asked.values())
    subprocess.run(args, check=True, capture_output=True)
    assert sum(faulty.asked.values()) == before
    assert set(faulty.told) >= {"good", "429", "500", "closed", "half"}
    server.shutdown()


def test_a_line_cut_by_a_kill_is_asked_again(data, tmp_path):
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path)
        main(cfg)
        whole = Path(cfg.out).read_bytes()
        Path(cfg.out).write_bytes(whole[:-20])
        main(cfg)
        assert len(server.requests) == 13 and bench.outcome(Path(cfg.out), 12)["lost"] == 0
        Path(cfg.out).write_bytes(b"{broken\n" + whole)
        with pytest.raises(UserError, match="out.jsonl:1"):
            main(cfg)


def test_two_processes_on_one_file_are_refused(data, tmp_path):
    with serving(lambda *request: GOOD) as server, runtime.only_process(tmp_path / "out.jsonl"):
        with pytest.raises(UserError, match="held by another run, process"):
            main(config(data, server, tmp_path))
        assert not server.requests


def test_a_wrong_key_and_an_outage_quarantine_nothing(data, tmp_path):
    with serving(lambda *request: (401, {"error": {"message": "bad key"}}, {})) as server:
        cfg = config(data, server, tmp_path)
        with pytest.raises(UserError, match="bad key"):
            main(cfg)
        assert len(server.requests) <= 2 * cfg.concurrency + cfg.encoders
        server.answer = lambda *request: (503, {}, {})
        with pytest.raises(UserError, match="does not answer.*goes on from here"):
            main(cfg)
        assert written(cfg) == ([], [])
        server.answer = lambda *request: GOOD
        main(cfg)
        assert len(written(cfg)[0]) == 12


def test_an_answer_under_way_when_the_teacher_fails_does_not_condemn_the_others(data, tmp_path):
    class Bar:
        update = set_postfix_str = staticmethod(lambda *args, **options: None)
    with serving(lambda *request: GOOD) as server:
        cfg = config(data, server, tmp_path)
        client = annotate.llm.Client("m", server.url)
    outage = annotate.llm.LLMError("no answer", transient=True)
    for unanswered, stops in (("abc", True), ("ab", False)):
        ledger = annotate.Ledger(cfg, "hash")
        stop = annotate.Stop(client)
        results = [*((name, outage) for name in unanswered), ("z", {"id": "z", "usage": {}})]
        annotate.handle(results, ledger, stop, 3, Bar)
        assert bool(stop.why) == stops and len(written(cfg)[1]) == (0 if stops else 2)
        Path(cfg.out).unlink()


def test_a_malformed_answer_is_kept_where_the_second_question_fails(data, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(annotate.tqdm, "set_postfix_str", lambda bar, text, **options: shown.append(text))
    with serving(lambda path, body, headers: SIX if len(body["input"]) == 1 else (403, {}, {})) as server:
        cfg = config(data, server, tmp_path, limit=1)
        with pytest.raises(UserError, match="does not answer: HTTP 403"):
            main(cfg)
        left = [(429, {}, {"Retry_After": "0.01"}), GOOD]
        server.answer = lambda *request: left.pop(0)
        main(cfg)
        (line,), _ = written(cfg)
        assert line["usage"]["output"] == len(SIX) // 4 + len(GOOD) // 4
        assert [len(body["input"]) for _, body, _ in server.requests] == [1, 3, 3, 3]
    assert "the server asks to wait 0 s" in shown


def test_one_question_that_never_gets_an_answer_is_quarantined(data, tmp_path):
    special = {"Task number 4": (500, {}, {}), "Task number 5": (400, {"error": {"message": "too big"}}, {})}

    def answer(path, body, headers):
        return special.get(asked_for(body), GOOD)
    with serving(answer) as server:
        cfg = config(data, server, tmp_path)
        main(cfg)
    lines, left = written(cfg)
    assert len(lines) == 10 and sorted(o["reason"][:8] for o in left) == ["HTTP 400", "HTTP 500"]


def test_when_nothing_works_it_stops(tmp_path):
    data = bench.make_data(tmp_path / "d", 60, 1)
    with serving(lambda *request: (400, {"error": {"message": "unknown parameter"}}, {})) as server:
        with pytest.raises(UserError, match="20 in a row could not be annotated.*unknown parameter"):
            main(config(data, server, tmp_path))
        assert len(server.requests) < 40


def test_when_nothing_works_any_more_it_stops(tmp_path):
    data = bench.make_data(tmp_path / "d", 80, 1)

    def until_the_tenth(path, body, headers):
        return GOOD if len(server.requests) <= 10 else (400, {"error": {"message": "gone"}}, {})
    with serving(until_the_tenth) as server:
        cfg = config(data, server, tmp_path, concurrency=2)
        with pytest.raises(UserError, match="20 in a row could not be annotated.*gone"):
            main(cfg)
        lines, left = written(cfg)
        assert len(lines) == 10 and 20 <= len(left) < 25 and len(server.requests) < 40


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"encoders": 0}, {"batch_open": 0}, {"retries": -1},
                                   {"max_dollars": -1.0}, {"batch_requests": 0}, {"api": "completions"}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(UserError, match=f"--{next(iter(wrong))} {next(iter(wrong.values()))}"):
        Config(**wrong)


def test_interrupted_once_what_is_under_way_is_kept(data, tmp_path):
    def slow(path, body, headers):
        time.sleep(0.5)
        return GOOD
    with serving(slow) as server:
        out = tmp_path / "out.jsonl"
        args = bench.command(data, out, server.server_address[1], concurrency=2)
        process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
        while not server.requests:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130 and "goes on from where it stopped" in said
        assert bench.lines(out) == len(server.requests) < 12


# ----------------------------------------------------------------------------------------- the demo's teacher
def test_the_demos_teacher(data, tmp_path):
    minds = [{"id": f"t{i:06d}", "task": f"Task number {i}", "operations": ["Do 0", "Do 1", "Do 2"],
              "subtasks": [{"title": f"Do {i}", "goal": "done"}], "unnecessary": ""} for i in range(11)]
    for other in ({"operations": ["Do 0", "Do 9"]}, {}):  # other steps; the same steps, another trajectory
        minds.insert(0, minds[5] | {"id": "other", "subtasks": [{"title": "other", "goal": "x"}]} | other)
    (tmp_path / "demonstrator.jsonl").write_text("".join(json.dumps(m) + "\n" for m in minds))
    port_file = tmp_path / "port"
    process = subprocess.Popen([sys.executable, str(ROOT / "demo/teacher.py"), f"--demonstrations={tmp_path}",
                                f"--port_file={port_file}"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("scripted local teacher at")
        port = int(port_file.read_text())
        for api in ("responses", "chat"):
            cfg = Config(meta=str(data), out=str(tmp_path / f"{api}.jsonl"), api=api,
                         base_url=f"http://127.0.0.1:{port}/v1")
            main(cfg)
            lines, (left,) = written(cfg)
            assert {o["task"]: o["subtasks"][0]["title"] for o in lines} == {
                f"Task number {i}": f"Do {i}" for i in range(11)}
            assert "not one of the demonstrator's" in left["reason"]
            assert all("scripted local teacher" in o["metadata"]["teacher"] for o in lines)
        taken = subprocess.run([sys.executable, str(ROOT / "demo/teacher.py"), f"--demonstrations={tmp_path}",
                                f"--port={port}"], capture_output=True, text=True)
        assert taken.returncode == 2 and f"port {port}: Address already in use" in taken.stderr
    finally:
        process.kill()
        process.wait()
    with pytest.raises(UserError, match="demonstrate.py"):
        teacher.Script(tmp_path / "absent.jsonl")
