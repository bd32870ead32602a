"""Stage 3 through a real vLLM: three rollout batches, versions that advance, log-probs that agree, a server
that is killed in the middle. Opt-in, as it needs a vLLM (about 7 GB) and minutes:

    JHIMA_VLLM=SCRIPT python -m pytest tests/test_vllm.py -s

`SCRIPT CHECKPOINT PORT` serves a checkpoint as engine.py says, and `SCRIPT --processor CHECKPOINT` adds the
processor's configuration that vLLM wants to find there. JHIMA_VLLM=1 takes ../shared/vllm_cpu.sh.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from test_engine import with_servers
from test_grpo_log import log_of

import grpo_hier

WANTED = os.environ.get("JHIMA_VLLM", "")
SCRIPT = Path(__file__).resolve().parents[3] / "shared" / "vllm_cpu.sh" if WANTED == "1" else Path(WANTED)
pytestmark = [pytest.mark.opt_in, pytest.mark.skipif(
    not WANTED or not SCRIPT.is_file(),
    reason="needs a real vLLM: set JHIMA_VLLM to a script that serves a checkpoint (see this file)")]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Serving:
    """A vLLM process group of its own."""

    def __init__(self, checkpoint, log):
        self.port = free_port()
        self.process = subprocess.Popen(["bash", SCRIPT, checkpoint, str(self.port)], start_new_session=True,
                                        stdout=log.open("wb"), stderr=subprocess.STDOUT)
        self.url, self.log = f"http://127.0.0.1:{self.port}/v1", log

    def wait(self, seconds=600):
        deadline = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                return urllib.request.urlopen(f"{self.url}/models", timeout=2).read()
            except OSError:
                time.sleep(1)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def fleet(tiny_model, tmp_path_factory):
    """Two servers of the actor and one of the decomposer."""
    directory = tmp_path_factory.mktemp("vllm")
    shutil.copytree(tiny_model, directory / "model")
    subprocess.run(["bash", SCRIPT, "--processor", directory / "model"], check=True)
    servers = {}
    try:
        for name in ("actor", "spare", "decomposer"):
            servers[name] = Serving(directory / "model", directory / f"{name}.log")
        for server in servers.values():
            server.wait()
        yield servers
    finally:
        for server in servers.values():
            server.kill()


def test_three_rollout_batches_and_a_server_that_is_killed(fleet, tiny_model, tmp_path, monkeypatch):
    load = grpo_hier.load_engine
    had = with_servers(monkeypatch, fleet["actor"].kill)
    lines = log_of(tiny_model, tmp_path / "run", monkeypatch, engine="vllm", is_cap=2.0, probe_limit=1e-3,
                   actor_url=f"{fleet['actor'].url},{fleet['spare'].url}",
                   decomposer_url=fleet["decomposer"].url)
    assert [line["version_A"] for line in lines] == [line["version_D"] for line in lines] == [0, 1, 2]
    assert [line["servers_A"] for line in lines] == [2, 2, 1] and had
    for line in lines:
        assert line["probe_A"] < 1e-3 and line["probe_D"] < 1e-3 and line["mismatch_A"] < 1e-3
        assert line["episodes"] == 12 and line["infra_rate"] == 0
        assert 0 < line["reward_mean"] < 1 and line["grad_A"] > 0
        print({k: line[k] for k in ("batch", "reward_mean", "version_A", "servers_A", "probe_A", "probe_D",
                                    "mismatch_A", "mismatch_D", "ratio_max_A", "seconds")})
    monkeypatch.setattr(grpo_hier, "load_engine", load)
    local = log_of(tiny_model, tmp_path / "local", monkeypatch)
    print("local", [line["reward_mean"] for line in local], "vllm", [line["reward_mean"] for line in lines])
