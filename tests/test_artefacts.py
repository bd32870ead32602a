"""Prompts, schedule, seeds and fields of files against artefacts.json, recorded before systems had a seam.

Every machine agrees on that; bytes of floats hold on one only, test_grpo_log.py has their numbers. The
fields of files are compared with the runs of test_stages.py."""

import json

from conftest import ROOT

from language.prompts import load_prompts
from rollout import request_seed
from runtime.batches import schedule
from web.environment import Task

RECORDED = json.loads((ROOT / "tests/artefacts.json").read_text(encoding="utf-8"))


def types(line: dict) -> dict:
    """Field -> the name of its type."""
    return {key: type(value).__name__ for key, value in line.items()}


def same_fields(line: dict, recorded: dict) -> None:
    """The same fields of the same types, where neither is null."""
    assert line.keys() == recorded.keys()
    null = "NoneType"
    other = {k: t for k, t in types(line).items() if t != recorded[k] and null not in (t, recorded[k])}
    assert not other, other


def test_prompts_are_those_that_were_recorded():
    prompts, recorded = load_prompts(), RECORDED["prompts"]
    assert prompts.digest() == recorded["default"]
    assert load_prompts(str(ROOT / "demo/prompts.json")).digest() == recorded["demo"]
    assert list(prompts.decomposer("Buy it.")) == recorded["decomposer"]
    assert prompts.actor("Buy it.", ["a", "b"], "1. x: y")[1] == recorded["actor"]


def test_the_order_of_tasks_and_the_seeds_are_those_that_were_recorded():
    tasks = [Task(f"task{i}", "site", seed=i % 3) for i in range(10)]
    assert [[task.id for task in batch] for batch in schedule(tasks, 2, 4, seed=3)] == RECORDED["schedule"]
    seeds = [request_seed((0, 1), "click-tab.2000000", 2000000, 0, k) for k in range(3)]
    assert seeds + [request_seed(7, t) for t in range(3)] == RECORDED["seeds"]
