"""Records -> examples -> the shares of an optimizer step: what each kind becomes, the order, the ranks."""

import json

import numpy as np
from conftest import ROOT
from recorded import config, corpus, encoded, log, source  # noqa: F401  (fixtures)

import sft
from language.prompts import load_prompts
from model.inputs import Inputs
from records import examples
from runtime import World


def test_every_kind_of_record_becomes_its_prompt_and_target(source):
    by_kind = {}
    for i in range(len(source.table)):
        r = source.record(i)
        if r.image.name not in ("broken.png", "thin.png"):
            by_kind.setdefault((r.kind, bool(r.think)), []).append((i, r))
    decode = source.inputs.tokenizer.decode
    assert set(by_kind) == {("step", False), ("step", True), ("grounding", False), ("box", False),
                            ("point", False)}
    i, r = by_kind["box", False][0]
    e = source[i]
    assert decode(e.target_ids) == json.dumps({"bbox_2d": [6, 11, 17, 34]}) + "<|im_end|>"
    assert "Where is 'Quick'?" in decode(e.prompt_ids)
    assert json.dumps({"point_2d": [14, 28]}) in decode(source[by_kind["point", False][0][0]].target_ids)
    i, r = by_kind["grounding", False][0]
    assert "click(x=28, y=14)" in decode(source[i].target_ids)
    system = load_prompts(str(ROOT / "demo/prompts.json")).grounder(r.instruction)[0]
    assert system.strip()[:40] in decode(source[i].prompt_ids)
    i, r = by_kind["step", True][0]
    assert "It is blue." in decode(source[i].target_ids)
    assert source.texts(r, "")[0] == source.thinking.texts["actor_system_think"]
    planned = [source.table[i, examples.PLAN] >= 0 for i, _ in by_kind["step", False]]
    assert sum(planned) == 33 and len(planned) == 36       # the trajectory without a decomposition stays in
    assert "1. Go" in decode(source[by_kind["step", False][0][0]].prompt_ids)


def test_the_decomposer_learns_one_plan_per_planned_trajectory(corpus, tiny_model, tmp_path):
    cfg = config(corpus, tiny_model, tmp_path, role="decomposer")
    steps, _ = sft.datasets(cfg, Inputs(cfg.model), World(), tmp_path)
    texts = [steps.source.inputs.tokenizer.decode(steps.source[i].target_ids) for i in steps.rows]
    assert len(texts) == 11 and all(t.startswith("1. Go") for t in texts)


def taken(source, world_size, steps=6, **shape):
    """Records of each step over all ranks, by name, from Steps alone."""
    rows = np.arange(len(source.table))
    out, shape = [], examples.Shape(**{"packing": True, "row_tokens": 300, "batch_size": 2} | shape)
    for k in range(steps):
        items = [examples.Steps(source, rows, 8, shape, r, world_size, 3)[k] for r in range(world_size)]
        out.append(sorted([r.where for item in items for b in item["batches"] for *_, r in b["examples"]]
                          + [where for item in items for where, _ in item["left_out"]]))
    return out


def test_a_step_takes_the_same_records_whatever_ranks_and_rows(source):
    one = taken(source, 1)
    assert one == taken(source, 3) == taken(source, 2, packing=False)
    assert list(map(len, one)) == [8] * 5 + [len(source.table) - 40]
    assert len({where for step in one for where in step}) == len(source.table)


def test_shares_are_balanced_by_length():
    costs = [9, 1, 1, 1, 8, 1, 7, 2]
    parts = examples.share(costs, 3)
    assert sorted(i for part in parts for i in part) == list(range(8))
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= 1 and examples.share([5, 5], 3)[2] == []


def test_workers_change_nothing_and_a_later_start_goes_on_with_the_next(source):
    steps = examples.Steps(source, np.arange(len(source.table)), 8, examples.Shape(True, 300, 2), 0, 1, 0)

    def seen(loader):
        return [[r.where for b in item["batches"] for *_, r in b["examples"]] for item in loader]
    alone = seen(steps.load(0, 8, 0, "cpu"))
    assert alone == seen(steps.load(0, 8, 2, "cpu"))
    assert alone[3:] == seen(steps.load(3, 8, 0, "cpu"))


def test_what_cannot_be_read_or_is_too_long_is_left_out_whole_and_named(corpus, tiny_model, source, tmp_path):
    longest = sorted(map(len, encoded(source, n=36)))[18]
    cfg = config(corpus, tiny_model, tmp_path / "run", max_steps=6, max_length=longest)
    sft.main(cfg)
    lines = log(cfg.run_dir)
    reasons = {o["where"].rpartition(":")[2]: o["reason"] for o in log(cfg.run_dir, "quarantine.jsonl")}
    names = {r["where"].rpartition(":")[2] for r in log(cfg.run_dir, "quarantine.jsonl")}
    assert len(names) == len(reasons) == sum(o["too_long"] + o["unreadable"] for o in lines)
    assert sum(o["unreadable"] for o in lines) == 2 and sum(o["too_long"] for o in lines) > 0
    assert "broken.png" in reasons["41"] and "ratio" in reasons["42"]
    assert all(f"--max_length is {longest}" in v for k, v in reasons.items() if k not in ("41", "42"))
    assert sum(o["records"] for o in lines) + len(reasons) == 42


def test_held_out_trajectories_are_not_trained_on(source):
    rows, held = examples.split(np.asarray(source.table), 3, 0)
    groups = source.table[:, examples.GROUP]
    assert not set(groups[rows]) & set(groups[held])
    kinds = [examples.KINDS[k] for k in source.table[held, examples.KIND]]
    assert kinds.count("step") == 3 and kinds.count("box") == 1 and len(set(groups[held])) == len(held)
    again = examples.split(np.asarray(source.table), 3, 0)
    assert (again[0] == rows).all() and (again[1] == held).all()
    assert len(examples.split(np.asarray(source.table), 0, 0)[0]) == len(source.table)
