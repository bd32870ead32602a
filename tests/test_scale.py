"""Stage 3 on more than one process and machine: browsers of a remote Playwright server, a rollout batch drawn
ahead of the update, ranks that are killed and started again by torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from runtime import UserError
from runtime.stopwatch import PHASES
from web.chromium import Chromium, Watchdog, chromium, web_errors

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}


def lines(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def grpo(model, run, *more):
    return ["grpo_hier.py", "--prompts", "demo/prompts.json", "--dtype", "float32", "--checkpointing=false",
            "--run_dir", run, "--actor", model, "--decomposer", model, "--env", "miniwob",
            "--tasks", "click-tab", "--split", "train", "--K", "2", "--M", "2", "--threads", "2",
            "--max_steps", "2", "--lora_r", "4", "--max_tokens_A", "8", "--max_tokens_D", "8",
            "--norm", "drgrpo", "--beta", "0.01", *more]


def start(*command):
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=ENV, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process, code=0):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code, out[-3000:]
    return out


def until(holds, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.02)


def check_complete(run, batches, episodes):
    log = lines(run / "log.jsonl")
    assert [line["batch"] for line in log] == list(range(batches))
    seen = [(e["batch"], e["task"], e["k"], e["m"]) for e in lines(run / "episodes.jsonl")]
    assert len(seen) == len(set(seen)) == episodes, "an episode is lost, or there twice"
    return log


def test_a_run_drawn_ahead_is_complete_also_when_it_was_killed(tiny_model, tmp_path):
    run = tmp_path / "run"
    command = grpo(tiny_model, run, "--instances", 3, "--pipeline", 1)
    process = start(*command)
    until(lambda: len(lines(run / "log.jsonl")) >= 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    out = finish(start(*command))
    log = check_complete(run, 3, 3 * 4)
    for line in log:
        p = line["phases"]
        assert set(p) == set(PHASES) and min(p.values()) >= 0 and p["generation"] > 0 and p["update"] > 0
        together = p["browser"] + p["waiting"] + p["idle"]
        assert together == pytest.approx(line["seconds_rollout"], rel=0.1, abs=0.1)
    assert out.count("wall clock") == 1 and all(phase in out for phase in PHASES)
    assert log[0]["mismatch_A"] < 1e-4            # what later batches' is: test_grpo_log.py


def test_torchrun_starts_killed_ranks_again_and_nothing_is_lost(tiny_model, tmp_path):
    run = tmp_path / "run"
    process = start("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=3",
                    "--monitor_interval=0.2", "--", *grpo(tiny_model, run, "--instances", 5))
    until(lambda: len(lines(run / "log.jsonl")) >= 1, process)
    ranks = [p for p in psutil.Process(process.pid).children() if "grpo_hier.py" in " ".join(p.cmdline())]
    assert len(ranks) == 2
    ranks[1].kill()                                                  # in the middle of the second batch
    out = finish(process)
    check_complete(run, 3, 5 * 4)                                    # two, two and one task: uneven work
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000002", "000003"]
    assert "exitcode" in out and "-9" in out


# ------------------------------------------------------------------------------------------- remote browsers
class Remote:
    """`playwright run-server` on this machine."""

    def __init__(self, *more):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url, self.more = f"ws://127.0.0.1:{self.port}/", more
        self.start()

    def start(self):
        self.process = start("-m", "playwright", "run-server", "--port", self.port, "--host", "127.0.0.1",
                             *self.more)
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def kill(self):
        for p in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            p.kill()
        self.process.wait()


@pytest.fixture
def remote(monkeypatch):
    if path := chromium():
        monkeypatch.setenv("CHROMIUM", path)
    server = Remote("--unsafe")
    yield server
    server.kill()


def test_a_remote_browser_works_is_confined_and_is_left_when_it_dies(remote):
    browser = Chromium(Watchdog(2000.0), remote.url)
    try:
        browser.launch(["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"])
        assert browser.driver in psutil.Process().children()
        page = browser.browser.new_page()
        with pytest.raises(web_errors(), match="ERR_NAME_NOT_RESOLVED"):
            page.goto("http://localhost.example/")
        page = browser.browser.new_page()              # the other one is still on its way to the error page
        page.set_content("<p>here</p>")
        assert page.inner_text("p") == "here" and page.screenshot()[:4] == b"\x89PNG"
        remote.kill()
        with pytest.raises(web_errors()) as error:
            page.screenshot()
        assert browser.fault(error.value) in ("browser_gone", "page_gone", "driver_gone", "browser")
        with pytest.raises(web_errors()):
            browser.launch([])
        remote.start()
        browser.launch([])
        assert browser.browser.is_connected()
    finally:
        browser.stop()


def test_a_server_that_drops_our_switches_is_refused(monkeypatch):
    if chromium() and not os.environ.get("CHROMIUM"):
        pytest.skip("Playwright's own Chromium is not here, and such a server takes no other")
    server = Remote()
    browser = Chromium(Watchdog(2000.0), server.url)
    try:
        with pytest.raises(UserError, match="--unsafe"):
            browser.launch([])
    finally:
        browser.stop()
        server.kill()


def test_a_run_with_remote_browsers(remote, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(ENV, "CHROMIUM", os.environ.get("CHROMIUM", ""))
    finish(start(*grpo(tiny_model, tmp_path / "run", "--instances", 1, "--browser_ws", remote.url)))
    log = check_complete(tmp_path / "run", 1, 4)
    assert log[0]["infra_rate"] == 0 and log[0]["faults"] == {}
