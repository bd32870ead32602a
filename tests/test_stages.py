"""The stages as a user runs them: in order, on the embedded default, killed and restarted, given bad input.

One small set of demonstrations is made for all tests. Every command is the shipped one; those that are not
killed run in this process, as a new one would only import torch again.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_artefacts import RECORDED, same_fields
from test_docs import glossary

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"OMP_WAIT_POLICY": "passive", "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
TINY = ["--prompts", "demo/prompts.json", "--dtype", "float32", "--checkpointing", "false"]


def start(*command) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, env=ENV, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def run(*command, code=0) -> str:
    process = start(*command)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code, f"{command}: exit code {process.returncode}\n{out[-3000:]}"
    return out


def run_here(*command, code=0) -> None:
    """The shipped file as a script, in this process."""
    script, *args = map(str, command)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(sys, "argv", [str(ROOT / script), *args])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == code, f"{command}: exit code {ended.value.code}"


def kill_after(command, ready, within=120) -> None:
    """Start the command, kill -9 it as soon as `ready()` holds."""
    process = start(*command)
    deadline = time.monotonic() + within
    while not ready():
        assert process.poll() is None, f"ended before it could be killed:\n{process.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.02)
    ours = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while left := [p for p in ours if alive(p)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(path) -> list[dict]:
    path = Path(path)
    return ([json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
            if path.exists() else [])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Demonstrations, the tiny model and a running teacher."""
    d = tmp_path_factory.mktemp("demo")
    run_here("demo/demonstrate.py", "--out", d / "trajectories", "--pages", "click-tab", "--n", 30)
    run_here("demo/tiny_model.py", "--out", d / "model", "--texts", f"demo/prompts.json,{d / 'trajectories'}")
    teacher = start("demo/teacher.py", "--demonstrations", d / "trajectories", "--port_file", d / "port")
    while not (d / "port").exists():
        assert teacher.poll() is None, teacher.stdout.read()
        time.sleep(0.05)
    yield d
    teacher.kill()
    teacher.wait()


@pytest.fixture(scope="module")
def decompositions(data):
    """Stage 1, killed in the middle and started again: nothing lost, nothing twice."""
    out = data / "decompositions.jsonl"
    command = ["annotate.py", "--meta", data / "trajectories/meta.json", "--out", out, "--concurrency", 1,
               "--base_url", f"http://127.0.0.1:{(data / 'port').read_text().strip()}/v1"]
    kill_after(command, lambda: len(lines(out)) >= 3)
    assert 0 < len(lines(out)) < 30
    run(*command)
    return out


def test_stage_1_killed_and_resumed(decompositions):
    ids = [line["id"] for line in lines(decompositions)]
    assert len(ids) == 30 and len(set(ids)) == 30


def sft(data, role, name, *more):
    return ["sft.py", "--role", role, "--model", data / "model", "--meta", data / "trajectories/meta.json",
            "--decompositions", data / "decompositions.jsonl", "--run_dir", data / name, *TINY,
            "--global_batch", 16, "--batch_size", 16, "--lr", "3e-3", "--save_every", 10, *more]


@pytest.fixture(scope="module")
def models(data, decompositions):
    run(*sft(data, "actor", "actor", "--max_steps", 50))
    run_here(*sft(data, "decomposer", "decomposer", "--max_steps", 15))
    return data


def test_stage_2_killed_and_resumed_ends_with_the_same_bytes(models):
    command = sft(models, "actor", "killed", "--max_steps", 50)
    kill_after(command, lambda: len(lines(models / "killed/log.jsonl")) >= 14)
    run(*command)
    assert [line["step"] for line in lines(models / "killed/log.jsonl")] == list(range(1, 51))
    for file in ("model.safetensors", "tokenizer.json"):
        assert (models / "killed/hf" / file).read_bytes() == (models / "actor/hf" / file).read_bytes()


def test_the_tiny_actor_without_plans_trains_too(models):
    run_here(*sft(models, "actor", "no_plan", "--max_steps", 2, "--use_plan", "false"))
    assert (models / "no_plan/hf/model.safetensors").exists()


def grpo(data, name, *more):
    return ["grpo_hier.py", *TINY, "--run_dir", data / name,
            "--actor", data / "actor/hf", "--decomposer", data / "decomposer/hf",
            "--env", "miniwob", "--tasks", "click-tab", "--split", "train", "--instances", 3,
            "--K", 2, "--M", 3, "--threads", 3, "--max_steps", 3,
            "--max_tokens_A", 24, "--max_tokens_D", 12, "--lr", "1e-3", *more]


def last_checkpoint(run_directory) -> Path:
    return sorted((run_directory / "checkpoints").iterdir())[-1]


@pytest.fixture(scope="module")
def whole(models):
    """A run directory of stage 3, run in one go."""
    run(*grpo(models, "whole"))
    return models / "whole"


def test_stage_3_killed_and_resumed_ends_with_the_same_bytes(models, whole):
    command = grpo(models, "parts")
    kill_after(command, lambda: len(lines(models / "parts/log.jsonl")) >= 1)  # within the second batch
    run(*command)
    parts = models / "parts"
    assert [line["batch"] for line in lines(parts / "log.jsonl")] == [0, 1, 2]
    seen = [(e["batch"], e["task"], e["k"], e["m"]) for e in lines(parts / "episodes.jsonl")]
    assert len(seen) == len(set(seen)) == 3 * 2 * 3
    rewards = [e["reward"] for e in lines(whole / "episodes.jsonl")]
    assert 0 < sum(rewards) < len(rewards), "no spread of rewards, so this test would show nothing"
    assert sum(line["grad_A"] for line in lines(whole / "log.jsonl")) > 0
    assert set(lines(whole / "log.jsonl")[0]) == glossary()[0]     # docs/metrics.md defines every key
    for file in ("actor/adapter_model.safetensors", "actor/optimizer.pt",
                 "decomposer/adapter_model.safetensors"):
        assert ((last_checkpoint(whole) / file).read_bytes()
                == (last_checkpoint(parts) / file).read_bytes()), file


def test_files_of_stage_3_are_those_that_were_recorded(whole):
    """Layout, keys and types of a run's files."""
    last = last_checkpoint(whole)
    there = sorted(str(f.relative_to(last)) for f in last.rglob("*") if f.is_file())
    assert there == RECORDED["checkpoint"]
    episode = lines(whole / "episodes.jsonl")[0]
    same_fields(lines(whole / "log.jsonl")[0], RECORDED["log.jsonl"])
    same_fields(episode, RECORDED["episodes.jsonl"])
    same_fields(episode["steps"][0], RECORDED["steps"])



@pytest.mark.parametrize("row", [["--train_decomposer", "false"], ["--use_plan", "false", "--M", "4"],
                                 ["--norm", "printed", "--std", "true"]], ids=" ".join)
def test_the_rows_of_table_2_and_the_printed_form_run(models, row):
    directory = models / "_".join(row).replace("--", "")
    run_here(*grpo(models, directory.name, "--instances", 1, *row))
    (line,) = lines(directory / "log.jsonl")
    assert "reward_mean" in line and ("loss_D" in line) == (row == ["--norm", "printed", "--std", "true"])
    assert (last_checkpoint(directory) / "decomposer").exists() == ("--use_plan" not in row)


def test_stage_4_resumes_and_reports(models, whole, capsys):
    command = ["evaluate.py", "--prompts", "demo/prompts.json", "--dtype", "float32",
               "--run_dir", models / "eval", "--actor", models / "actor/hf",
               "--decomposer", models / "decomposer/hf", "--adapters", whole,
               "--env", "miniwob", "--tasks", "click-tab", "--split", "eval", "--instances", 4,
               "--runs", 1, "--threads", 2, "--max_steps", 2, "--max_tokens_A", 24, "--max_tokens_D", 12]
    run(*command)
    (models / "eval/episodes.jsonl").write_text("".join(
        json.dumps(e | ({"reward": None, "status": "infra"} if i == 2 else {})) + "\n"
        for i, e in enumerate(lines(models / "eval/episodes.jsonl"))))
    run_here(*command)
    out = capsys.readouterr().out
    assert "click-tab" in out and "n 4, infra 0" in out
    tasks = [e["task"] for e in lines(models / "eval/episodes.jsonl")]
    assert len(tasks) == len(set(tasks)) == 4
    result = json.loads((models / "eval/result.json").read_text())
    assert sorted(result) == RECORDED["result.json"]


@pytest.mark.parametrize("stage, command, told", [
    ("annotate", lambda d: ["--meta", d / "trajectories/meta.json", "--out", d / "decompositions.jsonl"],
     ["at most 30 trajectories", ": 30 done"]),
    ("sft", lambda d: sft(d, "actor", "new", "--epochs", 3)[1:], ["optimizer steps of 16", "M parameters"]),
    ("grpo_hier", lambda d: grpo(d, "whole")[1:],
     ["3 tasks of miniwob train in 3 rollout batches", "18 episodes of at most 3", "whole/checkpoints"]),
    ("evaluate", lambda d: ["--run_dir", d / "eval", "--actor", d / "actor/hf", "--use_plan", "false",
                            "--env", "miniwob", "--split", "eval", "--tasks", "click-tab", "--instances", 7],
     ["7 tasks x 4 runs = 28 episodes"])])
def test_a_dry_run_says_how_much_and_writes_nothing(models, whole, capsys, stage, command, told):
    def files():
        return {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    before = files()
    run_here(f"{stage}.py", "--dry_run", *command(models))
    out = capsys.readouterr().out
    assert not [words for words in told if words not in out]
    assert files() == before


def test_no_chromium_is_said(models, monkeypatch, capsys):
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    run_here(*grpo(models, "no_browser"), code=2)
    assert "/nowhere/chromium" in capsys.readouterr().err.strip().splitlines()[-1]
