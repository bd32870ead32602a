"""docs/forking.md: each worked fork is a short diff that applies, changes what it says, and runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/forking.md").read_text()
FORKS = re.findall(r"(?m)^## ([^\n]+)\n(?:(?!##|```).)*```diff\n(.*?)```", TEXT, re.S)
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
GROUPS = """
import json, grpo_hier as g
from model.inputs import Sample
from records.episode import Episode, Group, Plan, Step
from web.environment import Task
from language.plans import Subtask
def episode(group, plan, m, reward, line):
    sample = Sample([1], b"", (28, 28), [2], [0.0], role="actor")
    return Episode(group, plan, m, 0, [Step(b"", [sample], line=line)], "failure", reward)
group = Group(Task("t", "s"), plans=[Plan(0, "", [Subtask("one", "open it"), Subtask("two", "close it")])])
group.episodes = [[episode(group, group.plans[0], 0, 1.0, "Open it, then close it"),
                   episode(group, group.plans[0], 1, 0.0, "open it"),
                   episode(group, group.plans[0], 2, 0.0, "")]]
learnt = g.credit([group], g.Config(K=1, M=3))
print(json.dumps({"R": g.returns([group], 1, 3)[0].flatten().tolist(),
                  "adv_A": [beside["adv_A"] for beside in learnt.of_episode],
                  "learnt": [row.adv for row in learnt.rows["actor"]]}))
"""


def run(copy, *command):
    process = subprocess.run([sys.executable, *map(str, command)], cwd=copy, env=ENV, text=True,
                             capture_output=True, timeout=300)
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    return process.stdout


@pytest.fixture
def forked(request, tmp_path):
    """A copy of the project with one fork's diff applied."""
    name, diff = FORKS[request.param]
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 0 < len(changed) <= 40, name
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "bench", "tests", "__pycache__"))
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=diff, text=True, cwd=copy, check=True)
    return copy


def first_batch(copy, model, tmp_path):
    """One rollout batch of the fork on the tiny model; its log line."""
    run(copy, "grpo_hier.py", "--prompts", "demo/prompts.json", "--dtype=float32", "--checkpointing=false",
        "--run_dir", tmp_path / "run", "--actor", model, "--decomposer", model, "--env", "miniwob", "--tasks",
        "click-tab", "--split", "train", "--instances=1", "--K", 2, "--M", 2, "--threads", 2, "--max_steps=2",
        "--lora_r", 4, "--max_tokens_A", 8, "--max_tokens_D", 8, "--beta", 0.01)
    (line,) = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    return line


def test_there_are_three():
    assert [name for name, _ in FORKS] == [
        "A leave-one-out baseline", "A shaped reward from completed subtasks",
        "A decomposer that plans again after a failure"]


@pytest.mark.parametrize("forked", [0], indirect=True)
def test_the_leave_one_out_baseline(forked, tiny_model, tmp_path):
    groups = json.loads(run(forked, "-c", GROUPS))
    assert groups["R"] == [1.0, 0.0, 0.0]
    assert groups["adv_A"] == groups["learnt"] == [1.0, -0.5, -0.5]
    assert first_batch(forked, tiny_model, tmp_path)["episodes"] == 4


@pytest.mark.parametrize("forked", [1], indirect=True)
def test_the_shaped_reward(forked, tiny_model, tmp_path):
    groups = json.loads(run(forked, "-c", GROUPS))
    assert groups["R"] == pytest.approx([1.2, 0.1, 0.0])
    assert groups["adv_A"] == pytest.approx([1.2 - 1.3 / 3, 0.1 - 1.3 / 3, -1.3 / 3])
    assert first_batch(forked, tiny_model, tmp_path)["episodes"] == 4


@pytest.mark.parametrize("forked", [2], indirect=True)
def test_the_decomposer_that_plans_again(forked, tiny_model, tmp_path):
    line = first_batch(forked, tiny_model, tmp_path)     # the untrained actor fails at both steps
    assert line["episodes"] == 4 and line["trained_D"] == 2 + 4
    episodes = (tmp_path / "run" / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    for steps in [json.loads(episode)["steps"] for episode in episodes]:
        assert [one["role"] for one in steps[1]["asked"]] == ["decomposer", "actor"]
        assert "asked" not in steps[0]
