"""The seam: a system of three roles (toy_system.py) through pool, update, log, viewer, kill and resume; and
what a wrong system is told."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy_system
from conftest import ROOT
from safetensors.torch import load_file

import evaluate
import grpo_hier
from model.roles import Role, check_roles
from runtime import UserError, systems

ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}


def command(model, run):
    flags = {"run_dir": run, "helper": model, "writer": model, "critic": model, "env": "miniwob",
             "split": "train", "tasks": "click-tab", "instances": 4, "threads": 1, "max_steps": 2, "M": 2,
             "lr": 1e-3, "lora_r": 4, "lora_alpha": 8, "dtype": "float32", "checkpointing": "false",
             "keep": 9}
    return [sys.executable, str(ROOT / "tests/toy_system.py"), *(f"--{k}={v}" for k, v in flags.items())]


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """A whole run, and one that was killed after its second batch and started again."""
    directory = tmp_path_factory.mktemp("toy")
    subprocess.run(command(tiny_model, directory / "whole"), cwd=ROOT, env=ENV, check=True, timeout=300)
    killed = subprocess.Popen(command(tiny_model, directory / "parts"), cwd=ROOT, env=ENV)
    log = directory / "parts/log.jsonl"
    until = time.monotonic() + 200
    while not log.exists() or log.read_text().count("\n") < 2:
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    subprocess.run(command(tiny_model, directory / "parts"), cwd=ROOT, env=ENV, check=True, timeout=300)
    return directory


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_three_roles_learn_in_turns_and_the_frozen_one_never(runs):
    def moved(role, file, before, after):
        a, b = (load_file(runs / f"whole/checkpoints/{n:06d}/{role}/{file}") for n in (before, after))
        return any(not a[name].equal(b[name]) for name in a)
    adapter = "adapter_model.safetensors"
    assert moved("writer", adapter, 2, 3) and not moved("writer", adapter, 1, 2)
    assert moved("critic", "heads.safetensors", 1, 2) and not moved("critic", "heads.safetensors", 2, 3)
    assert moved("critic", adapter, 2, 4)             # heads begin at zero: first they move alone
    assert not moved("helper", adapter, 1, 4)
    assert not (runs / "whole/checkpoints/000004/helper/optimizer.pt").exists()


def test_the_log_tells_each_batch_s_own_update_and_no_other(runs):
    log = lines(runs / "whole/log.jsonl")
    learnt = [("grad_writer" in line, "grad_critic" in line) for line in log]
    assert learnt == [(True, False), (False, True)] * 2
    assert all(line["grad_writer"] > 0 and line["ratio_max_writer"] > 1 for line in log[::2])
    assert 0 < log[3]["error_critic"] < log[1]["error_critic"] < 1.0 and "ratio_max_critic" not in log[3]
    assert all(line["len_writer"] > 0 and line["len_helper"] > 0 for line in log)
    assert all("steps_seen" in line and "len_critic" not in line for line in log)


def test_each_step_holds_both_answers_and_says_which_acted(runs):
    steps = [step for e in lines(runs / "whole/episodes.jsonl") for step in e["steps"]]
    assert steps and all([(one["role"], one["acted"]) for one in step["asked"]] ==
                         [("helper", False), ("writer", True)] for step in steps)
    assert all(step["text"] == step["asked"][1]["text"] for step in steps)


def test_killed_and_resumed_it_ends_with_the_same_bytes(runs):
    timed = {"seconds", "seconds_rollout", "seconds_update", "generations", "phases"}
    whole, parts = ([{k: v for k, v in line.items() if k not in timed}
                     for line in lines(runs / name / "log.jsonl")] for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 4
    for file in (runs / "whole/checkpoints/000004").rglob("*.safetensors"):
        assert file.read_bytes() == (runs / "parts" / file.relative_to(runs / "whole")).read_bytes(), file


def test_the_viewer_draws_it(runs, tmp_path):
    page = tmp_path / "page.html"
    subprocess.run([sys.executable, "analysis.py", "view", "--runs", str(runs / "whole"), "--out", str(page)],
                   cwd=ROOT, env=ENV, check=True, timeout=100)
    assert '"helper"' in page.read_text(encoding="utf-8")


# -------------------------------------------------------------------------------------------- wrong systems
def test_a_system_that_is_not_there_or_lacks_a_name_is_one_line(monkeypatch):
    with pytest.raises(UserError, match="--system nosuch: there is no systems/nosuch.py; there are grpo"):
        systems.load_system("nosuch")
    names = {name: None for name in systems.SYSTEM if name not in ("credit", "trains")}
    lame = SimpleNamespace(**names, __file__="x.py")
    with pytest.raises(UserError, match="x.py lacks credit, trains: define it there, or import it from grpo"):
        systems.need_names(lame)
    systems.need_names(toy_system)


@pytest.mark.parametrize("change, said", [
    (lambda r: [r[0], dataclasses.replace(r[1], name="helper"), r[2]], "two roles have the name 'helper'"),
    (lambda r: [dataclasses.replace(r[0], symbol="A"), dataclasses.replace(r[1], symbol="A"), r[2]],
     "two roles have the symbol 'A'"),
    (lambda r: [dataclasses.replace(r[0], checkpoint=""), *r[1:]], "--helper is missing"),
    (lambda r: [], "one to four roles, this one 0"),
    (lambda r: [dataclasses.replace(r[0], name=f"r{i}") for i in range(5)], "one to four roles, this one 5"),
    (lambda r: [*r[:2], dataclasses.replace(r[2], heads=())], "critic needs heads"),
    (lambda r: [*r[:2], dataclasses.replace(r[2], reads="nobody")], "the policy whose samples it values"),
    (lambda r: [dataclasses.replace(r[0], kind="oracle"), *r[1:]], "helper is a 'oracle'; a role is one of"),
    (lambda r: [Role("judge", kind="server"), *r[1:]], "--judge_model is missing"),
])
def test_roles_that_cannot_work_are_one_line(tiny_model, change, said):
    cfg = toy_system.Config(helper=str(tiny_model), writer=str(tiny_model), critic=str(tiny_model))
    check_roles(toy_system.roles(cfg))
    with pytest.raises(UserError, match=said) as error:
        check_roles(change(toy_system.roles(cfg)))
    assert "\n" not in str(error.value)


def test_a_critic_of_another_kind_of_model_is_one_line(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    cfg = toy_system.Config(helper=str(tiny_model), writer=str(tiny_model), critic=str(tmp_path))
    with pytest.raises(UserError, match="is a llama model.*Qwen2.5-VL"):
        check_roles(toy_system.roles(cfg))


def test_a_system_is_evaluated_with_its_own_roles_and_settings(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "systems.toy", toy_system)
    monkeypatch.setattr(systems, "ROOT", Path(toy_system.__file__).parent / "nowhere")
    monkeypatch.setattr(systems, "load_system", lambda name: toy_system)
    monkeypatch.setattr(evaluate, "load_system", lambda name: toy_system)
    Config = evaluate.config_of(["--system", "toy"])
    cfg = Config(system="toy", helper=str(tiny_model), writer=str(tiny_model), device="cpu")
    assert [role.name for role in evaluate.roles_of(cfg)] == ["helper", "writer"]     # a critic is not asked
    assert evaluate.describe_system(cfg).startswith(f"toy: helper {tiny_model}, writer")
    evaluate.need(cfg)
    assert not cfg.use_plan and cfg.temperature_A == 0.0 and cfg.runs == 4
    assert evaluate.config_of(["--runs", "3"]) is evaluate.Config


def test_the_names_of_a_system_are_those_of_the_docs():
    table = (ROOT / "docs/systems.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in table for name in systems.SYSTEM)
    assert all(hasattr(grpo_hier, name) for name in systems.SYSTEM)
