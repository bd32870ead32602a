"""Stage 2's machinery on a random Qwen2.5-VL: packing and grouped attention against transformers, the data's
order and shares, one process against two ranks, resuming, evaluation, the exported directory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, png, request
from test_docs import logged
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import sft
from language.prompts import load_prompts
from model import attention, flops
from model.backbone import load_model
from model.inputs import Inputs
from model.sharded import TargetLogp
from records import examples, recordings, trajectories
from records.answers import score
from runtime import UserError, World, parse_args

FORMS = {"click": "<operation>\nClick the {n} link\n</operation>\n"
                  "<action>\nclick(x=0.{n}5, y=0.5)\n</action>",
         "write": "<operation>\nType {n}\n</operation>\n<action>\nwrite(message='word {n}')\n</action>",
         "end": "<action>\nterminate(status='success')\n</action>"}


def line(image, human, assistant, size=(56, 56)):
    return {"image": image, "width": size[0], "height": size[1],
            "conversations": [{"from": "human", "value": f"<image>\n{human}"},
                              {"from": "gpt", "value": assistant}]}


def navigation(image, task, history, answer, size=(56, 56)):
    past = "\n".join(f'Step {k}: "{h}"' for k, h in enumerate(history, 1)) or "None"
    return line(image, "Please generate the next move according to the UI screenshot, task and previous "
                       f"operations.\n\nTask: {task}\n\nPrevious operations:\n{past}", answer, size)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """12 trajectories of three steps on two sizes of screenshot, 11 of them annotated, and every other kind
    of record once or twice; one broken image, one of an impossible shape."""
    d = tmp_path_factory.mktemp("corpus")
    (d / "images").mkdir()
    records, plans = [], []
    for n in range(12):
        size = (56, 56) if n % 3 else (112, 84)
        for k, form in enumerate(FORMS):
            (d / f"images/{n}_{k}.png").write_bytes(png(10 * n + k, size))
            history = [f"Click the {n} link", f"Type {n}"][:k]
            records.append(navigation(f"{n}_{k}.png", f"Task number {n} " + "of many " * (n % 4), history,
                                      FORMS[form].format(n=n), size))
    think = "<think>\nIt is blue.\n</think>\n" + FORMS["end"]
    records += [navigation("0_0.png", "Think", [], think), line("1_0.png", "Click on 'Quick'.",
                "<action>\nclick(x=0.5, y=0.25)\n</action>"),
                line("2_0.png", "Where is 'Quick'?", "<ref>Quick</ref><box>[[100, 200, 300, 600]]</box>"),
                line("1_0.png", "Point at 'Easy'", "<ref>Easy</ref><point>[[250, 500]]</point>"),
                navigation("broken.png", "Nothing to see", [], FORMS["end"]),
                navigation("thin.png", "A line", [], FORMS["end"], (28, 6000))]
    (d / "images/broken.png").write_bytes(png(1)[:-40])
    (d / "images/thin.png").write_bytes(png(2, (28, 6000)))
    (d / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (d / "meta.json").write_text(json.dumps({"web": {"root": "images", "annotation": "a.jsonl"}}))
    for t in trajectories.TrajectoryFiles(d / "meta.json", recordings.Quarantine()):
        if t.instruction.startswith("Task") and not t.instruction.startswith("Task number 11 "):
            plans.append({"id": t.id, "subtasks": [{"title": "Go", "goal": "click " * (len(plans) % 3)}]})
    (d / "decompositions.jsonl").write_text("".join(json.dumps(p) + "\n" for p in plans))
    return d


def settings(corpus, tiny_model, run, **more):
    given = {"role": "actor", "model": tiny_model, "meta": corpus / "meta.json", "run_dir": run,
             "decompositions": corpus / "decompositions.jsonl", "prompts": ROOT / "demo/prompts.json",
             "dtype": "float32", "checkpointing": False, "workers": 0, "global_batch": 8, "lr": 1e-3} | more
    return [f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items()]


def config(*args, **more) -> sft.Config:
    return parse_args(sft.Config, settings(*args, **more))


def log(run, name="log.jsonl"):
    return [json.loads(o) for o in (Path(run) / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def source(corpus, tiny_model, tmp_path_factory):
    cfg = config(corpus, tiny_model, tmp_path_factory.mktemp("source"))
    steps, _ = sft.datasets(cfg, Inputs(cfg.model), World(), Path(cfg.run_dir))
    return steps.source


def encoded(source, kinds=("step",), n=6):
    """Examples of different lengths, the first two of equal length."""
    rows = [i for i in range(len(source.table)) if examples.KINDS[source.table[i, examples.KIND]] in kinds]
    found = [source[i] for i in rows[:n]]
    return [found[0], *found]


# -------------------------------------------------------------------------------------------------- attention
def test_grouped_windows_are_equal_to_sdpa_bit_for_bit_and_take_fewer_calls(tiny_model, monkeypatch):
    inputs, model = Inputs(tiny_model), load_model(tiny_model)
    vision = inputs.images(images=[torch.randint(256, (3, *side), generator=torch.Generator().manual_seed(1),
                                                 dtype=torch.uint8).permute(1, 2, 0).numpy()
                                   for side in ((252, 364), (140, 196))], size={"shortest_edge": 3136,
                           "longest_edge": 200_000}, return_tensors="pt")
    calls, results = [], []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, **k: calls.append(1) or original(*a, **k))
    for name in ("sdpa", "windows_flash"):
        model.model.visual.config._attn_implementation = name
        model.zero_grad()
        calls.clear()
        out = model.model.visual(vision["pixel_values"], vision["image_grid_thw"]).pooler_output
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in model.model.visual.parameters()), len(calls)])
    assert all(a.equal(b) for a, b in zip(results[0][:-1], results[1][:-1]))
    assert results[1][-1] <= results[0][-1] / 2, (results[0][-1], results[1][-1])


def test_load_model_groups_windows(tiny_model):
    assert load_model(tiny_model).model.visual.config._attn_implementation == "windows_flash"


def test_attention_within_pieces_is_that_of_a_block_mask():
    lengths, g = [3, 5, 3, 1, 5], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 17, 8, generator=g) for h in (4, 2, 2))
    owner = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    block = owner[:, None] == owner
    for causal in (False, True):
        want = F.scaled_dot_product_attention(q, k, v, (block & torch.ones(17, 17).tril().bool()) if causal
                                              else block, enable_gqa=True)
        got = attention.attend_within(q, k, v, attention.pieces_of(lengths), causal, None)
        assert (got.transpose(1, 2) - want).abs().max() < 1e-6
    assert attention.pieces_of([4, 4, 2]).order is None and attention.pieces_of([4, 2, 4]).order is not None


# ---------------------------------------------------------------------------------------------------- packing
def test_positions_are_those_of_transformers(source, tiny_model):
    model = load_model(tiny_model).model
    for e in encoded(source, examples.KINDS, 40)[::3]:
        ids = torch.tensor([e.prompt_ids + e.target_ids])
        want, _ = model.get_rope_index(ids, (ids == source.inputs.image_id).long(), e.grid)
        assert examples.positions(len(e), e.prompt_ids.index(source.inputs.image_id), e.grid[0].tolist(),
                              2).equal(want[:, 0])


def logp_and_gradient(module, batches):
    module.zero_grad()
    logp = [module(b) for b in batches]
    (-torch.cat(logp).sum()).backward()
    return torch.cat(logp).detach(), torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_of_many_records_equals_each_by_transformers_alone(source, tiny_model, packing):
    """Log-probs and gradient of packed and of padded micro-batches against plain transformers, one record at
    a time, with positions and masks of its own making."""
    module = TargetLogp(attention.separate_records(load_model(tiny_model)))
    plain = load_model(tiny_model)
    plain.model.visual.config._attn_implementation = "sdpa"
    made, want = encoded(source), []
    for e in made:
        ids = torch.tensor([e.prompt_ids + e.target_ids])
        logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=e.pixels,
                       mm_token_type_ids=(ids == source.inputs.image_id).long(), image_grid_thw=e.grid).logits
        rows = logits[0, len(e.prompt_ids) - 1:-1].log_softmax(-1)
        want.append(rows[range(len(e.target_ids)), e.target_ids])
    (-torch.cat(want).sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters()])
    got, mine = logp_and_gradient(module, [examples.collate(made, source.inputs, packing)])
    assert (got - torch.cat(want)).abs().max() < 2e-5
    assert (mine - gradient).norm() < 2e-5 * gradient.norm()


def test_a_packed_record_does_not_see_its_neighbours(source, tiny_model):
    module = TargetLogp(attention.separate_records(load_model(tiny_model)))
    a, b, *_ = encoded(source)
    other = examples.Encoded([7] * 3 + b.prompt_ids, b.target_ids, b.pixels.flip(0), b.grid, b.size, b.record)
    with torch.no_grad():
        first, second = (module(examples.collate([x, a], source.inputs, True))[-len(a.target_ids):]
                         for x in (b, other))
    assert (first - second).abs().max() < 1e-6


def test_cut_packs_whole_records_and_keeps_the_budget(source):
    made = encoded(source, examples.KINDS, 30)
    budget = 3 * max(map(len, made))
    for shape in (examples.Shape(True, budget, 1), examples.Shape(False, budget, 4),
                  examples.Shape(True, 10, 1)):
        rows = examples.cut(made, shape)
        assert sorted(id(e) for row in rows for e in row) == sorted(map(id, made))
        if shape.packing and shape.row_tokens == budget:
            assert max(sum(map(len, row)) for row in rows) <= budget
            assert len(rows) < len(made) / 2
        elif shape.packing:
            assert all(len(row) == 1 for row in rows)      # longer than a row: alone, never cut
        else:
            assert max(map(len, rows)) == 4


# ------------------------------------------------------------------------------------------------------- data
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


def test_scores():
    def record(**more):
        return recordings.Record("", "", Path(), [], "", more.pop("calls", ()), "", 56, 56, "step", "", "",
                                   **more)

    def calls(text):
        return recordings.actions.parse(text).calls
    click = record(calls=calls("click(x=0.5, y=0.5)"))
    near = score("click(x=28, y=29)", click, (56, 56))
    assert near == {"type": 1, "point": 1, "distance": pytest.approx(1 / 56, abs=1e-3)}
    assert score("click(x=28, y=50)", click, (56, 56))["point"] == 0
    ended = score("terminate(status='success')", click, (56, 56))
    assert ended == {"type": 0, "point": 0, "distance": 1}
    write = record(calls=calls("write(message='a')"))
    assert score("write(message='a')", write, (56, 56)) == {"type": 1, "argument": 1}
    assert score("write(message='b')", write, (56, 56)) == {"type": 1, "argument": 0}
    box = record(box=(0.25, 0.25, 0.75, 0.5))
    assert score('{"bbox_2d": [20, 15, 30, 25]}', box, (56, 56))["point"] == 1
    assert score('{"bbox_2d": [0, 0, 10, 10]}', box, (56, 56))["point"] == 0
    assert score("nonsense", box, (56, 56)) == {"type": 0, "point": 0, "distance": 1}
    point = record(box=(0.5, 0.5))
    assert score('{"point_2d": [28, 29]}', point, (56, 56))["point"] == 1
    assert score('{"point_2d": [28, 40]}', point, (56, 56))["point"] == 0


# ------------------------------------------------------------------------------------------------------ FLOPs
def test_flops_are_those_that_torch_counts(source, tiny_model):
    model = attention.separate_records(load_model(tiny_model))
    batch = examples.collate(encoded(source), source.inputs, True)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), \
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        TargetLogp(model)(batch)
    H, layers = model.config.text_config.hidden_size, model.config.text_config.num_hidden_layers
    masked = layers * sum(2 * H * L * L for L in batch["lengths"])     # torch counts the masked half as well
    ours = flops.language_flops(model.config.text_config, batch["lengths"], len(batch["y"])) + \
        sum(flops.vision_flops(model.config.vision_config, batch["grids"])) + masked
    assert abs(ours / counter.get_total_flops() - 1) < 0.02


def test_a_frozen_tower_costs_no_backward():
    from transformers import Qwen2_5_VLConfig
    config = Qwen2_5_VLConfig()
    full, frozen = (flops.training_flops(config, [100], [(1, 4, 4)], 10, f) for f in (False, True))
    assert full - frozen == 2 * flops.vision_flops(config.vision_config, [(1, 4, 4)])[0] > 0


# ------------------------------------------------------------------------------------------- the stage itself
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none"}


def launched(ranks, *flags):
    """sft.py as torchrun starts it, in `ranks` processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--"]
    process = subprocess.run([sys.executable, *torchrun, "sft.py", *flags], cwd=ROOT, env=ENV, text=True,
                             capture_output=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def whole(corpus, tiny_model, tmp_path_factory):
    """Twenty steps in one process, packed."""
    cfg = config(corpus, tiny_model, tmp_path_factory.mktemp("whole") / "run", max_steps=20, held_out=2,
                 eval_every=10, save_every=7, row_tokens=400)
    sft.main(cfg)
    return Path(cfg.run_dir)


def same_curve(run, whole):
    a, b = log(run), log(whole)
    assert [o["step"] for o in a] == [o["step"] for o in b] == list(range(1, 21))
    assert [o["tokens"] for o in a] == [o["tokens"] for o in b]
    assert b[0]["loss"] - b[-1]["loss"] > 0.5, "nothing was learnt, so equal curves would show nothing"
    assert max(abs(x["loss"] - y["loss"]) for x, y in zip(a, b)) < 1e-4


@pytest.mark.parametrize("form", [{"packing": False, "batch_size": 3}, {"row_tokens": 90},
                                  {"packing": False, "batch_size": 1, "checkpointing": True}], ids=str)
def test_one_curve_whatever_the_micro_batches(corpus, tiny_model, whole, tmp_path, form):
    cfg = config(corpus, tiny_model, tmp_path / "run", max_steps=20, held_out=2, **form)
    sft.main(cfg)
    same_curve(cfg.run_dir, whole)


def test_two_ranks_and_a_resume_on_one_give_the_same_curve(corpus, tiny_model, whole, tmp_path):
    """Two ranks for 20 steps; then the run as a kill after step 14 would have left it goes on in one."""
    flags = settings(corpus, tiny_model, tmp_path / "run", max_steps=20, held_out=2, eval_every=10,
                     save_every=7, keep=9, row_tokens=200)
    launched(2, *flags)
    same_curve(tmp_path / "run", whole)
    for a, b in zip(log(tmp_path / "run", "eval.jsonl"), log(whole, "eval.jsonl"), strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-4 and a["kinds"].keys() == b["kinds"].keys()
        assert a["kinds"]["step"]["n_type"] == b["kinds"]["step"]["n_type"] == 2
    shutil.rmtree(tmp_path / "run/hf")
    shutil.rmtree(tmp_path / "run/checkpoints/000020")
    sft.main(parse_args(sft.Config, flags))
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["000007", "000014", "000020"]
    same_curve(tmp_path / "run", whole)
    same_weights(tmp_path / "run/hf", whole / "hf", 1e-4)


def same_weights(a, b, tolerance):
    a, b = (load_model(x).state_dict() for x in (a, b))
    assert max(float((a[k] - b[k]).abs().max()) for k in b) < tolerance


def test_log_lines_say_what_the_glossary_says(whole, tiny_model):
    language = load_model(tiny_model).config.text_config
    keys = set(log(whole)[0])
    assert keys == set(logged("sft log"))
    for o in log(whole):
        assert o["flops"] > 3 * flops.language_flops(language, [1] * o["positions"], 0)
        assert o["mfu"] > 0 and o["peak_gb"] > 0.1
        assert 0 <= o["data_wait"] <= 1 and o["padding"] == 0


def test_evaluation_is_written_by_kind(whole):
    first, last = log(whole, "eval.jsonl")
    assert (first["step"], last["step"]) == (10, 20) and last["loss"] < first["loss"] + 1
    assert set(last["kinds"]) >= {"step", "box", "point"}
    assert {"type", "n_type"} <= set(last["kinds"]["step"])
    assert all(0 <= v <= 1 for o in last["kinds"].values() for k, v in o.items() if not k.startswith("n_"))


def test_export_writes_what_the_run_wrote_and_plain_transformers_reads_it(whole, tiny_model, tmp_path):
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    sft.export(parse_args(sft.ExportConfig, ["--run_dir", str(whole), "--out", str(tmp_path / "hf")]))
    for file in sorted(p.name for p in (whole / "hf").iterdir()):
        assert (tmp_path / "hf" / file).read_bytes() == (whole / "hf" / file).read_bytes(), file
    plain, inputs = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "hf"), Inputs(tiny_model)
    ids, _ = inputs.encode("Do it.", "Click", png(3, (112, 84)))
    batch = inputs.batch([ids], [png(3, (112, 84))])
    with torch.no_grad():
        assert plain(**batch).logits.equal(load_model(whole / "hf")(**batch).logits)
        assert not plain(**batch).logits.equal(load_model(tiny_model)(**batch).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == len(inputs.tokenizer)


def test_export_of_nothing_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        sft.export(parse_args(sft.ExportConfig, ["--run_dir", str(tmp_path)]))
    (tmp_path / "config.json").write_text("{}")
    for out, said in (("hf_so_far", "save_every"), ("hf", "mark the run as finished")):
        with pytest.raises(UserError, match=said):
            sft.export(sft.ExportConfig(str(tmp_path), str(tmp_path / out)))


def test_an_unfinished_checkpoint_is_none(whole):
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["000014", "000020"]   # keep = 2


def test_a_frozen_tower_stays_as_it_was(corpus, tiny_model, tmp_path):
    cfg = config(corpus, tiny_model, tmp_path / "run", max_steps=2, freeze_vision=True)
    sft.main(cfg)
    before, after = load_model(tiny_model).state_dict(), load_model(tmp_path / "run/hf").state_dict()
    moved = {k for k in before if not before[k].equal(after[k])}
    assert not any("visual.blocks" in k or "patch_embed" in k for k in moved)
    assert any("merger" in k for k in moved) and any("language_model" in k for k in moved)


def test_a_sharded_tower_keeps_its_angles_in_float32(corpus, tiny_model, source, tmp_path):
    """FSDP2 would cast the rotary angles to bfloat16 together with the other inputs of a vision block."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = sft.build(config(corpus, tiny_model, tmp_path, dtype="bfloat16"), World(0, 2))
        seen = []
        module.model.model.visual.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((args[0].dtype, kwargs["position_embeddings"][0].dtype)),
            with_kwargs=True)
        module(examples.collate(encoded(source), source.inputs, True))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [(torch.bfloat16, torch.float32)]


# ------------------------------------------------------------------------------------------------- vLLM
@pytest.mark.opt_in
@pytest.mark.skipif("VLLM_URL" not in os.environ, reason="set VLLM_URL (.../v1) and VLLM_MODEL to a vLLM "
                    "that serves an exported directory (RUN/hf) under its path")
def test_a_real_vllm_writes_what_the_exported_directory_writes():
    import base64

    from openai import OpenAI

    from model.policy import Policy
    asked = request(5, "Click the link", temperature=0, image=png(5, (112, 84)))
    model = os.environ["VLLM_MODEL"]
    client = OpenAI(base_url=os.environ["VLLM_URL"], api_key="none")
    url = "data:image/png;base64," + base64.b64encode(asked.png).decode()
    answer = client.chat.completions.create(
        model=model, temperature=0, max_tokens=asked.max_new_tokens,
        messages=[{"role": "system", "content": asked.system},
                  {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                               {"type": "text", "text": asked.user}]}])
    mine = Policy(model, "actor").sample([asked])[0]
    assert answer.choices[0].message.content.strip() == mine.text.strip()
