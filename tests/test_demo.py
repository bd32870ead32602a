"""The embedded demo's parts: tokenizer, random checkpoint, scripted demonstrations, presets."""

import dataclasses
import hashlib
import importlib
import io
import json
import random
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "demo"))
import demonstrate
import tiny_model

from language import actions
from language.plans import Subtask, format_plan, parse_plan
from language.prompts import load_prompts
from model.backbone import forward_hidden, load_model
from model.inputs import Inputs
from records import recordings
from runtime import UserError, config_class, parse_args


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "trajectories"
    demonstrate.main(demonstrate.Config(out=str(out), n=16, threads=2))
    return out


@pytest.fixture(scope="module")
def model(demonstrations):
    return tiny_model.build(tiny_model.Config(str(demonstrations.parent / "model"), texts(demonstrations)))


def texts(demonstrations):
    return f"{ROOT}/demo/prompts.json,{demonstrations}"


def page(width=160, height=210):
    png = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(png, "PNG")
    return png.getvalue()


# -------------------------------------------------------------------------------------------- the tiny model
def test_tokenizer_round_trips_any_text(model):
    tokenizer, dice = Inputs(model).tokenizer, random.Random(0)
    texts = ["", "  two  spaces \n\n\t tab ", "click(x=84, y=120, clicks=7)",
             "Ünïcødé 漢字 \U0001f389\x00", "-0 007 3.14 a_b <x>"]
    ranges = [(32, 127), (160, 0x3000), (0x10000, 0x1ffff)]
    texts += ["".join(chr(dice.randrange(*dice.choice(ranges))) for _ in range(40)) for _ in range(200)]
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_tokenizer_numbers_and_phrases_are_single_tokens(model):
    tokenizer = Inputs(model).tokenizer
    text = "<operation>\nPick day 17\n</operation>\n<action>\nclick(x=84, y=400)\n</action>"
    pieces = [tokenizer.decode(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert pieces == ["<operation>\n", "Pick", " day", " ", "17", "\n</operation>\n<action>\n",
                      "click(x=", "84", ", y=", "400", ")", "\n</action>"]


def test_tokenizer_template_is_qwens(model):
    tokenizer = Inputs(model).tokenizer
    turns = [{"role": "system", "content": "S"},
             {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "U"}]}]
    prompt = ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
              "U<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == prompt
    turns.append({"role": "assistant", "content": "A"})
    assert tokenizer.apply_chat_template(turns, tokenize=False) == prompt + "A<|im_end|>\n"
    for special in tiny_model.SPECIAL:
        assert len(tokenizer(special, add_special_tokens=False)["input_ids"]) == 1


def test_checkpoint_loads_and_reads_image_and_text(model):
    inputs, net = Inputs(model), load_model(model)
    assert 1e6 < sum(p.numel() for p in net.parameters()) < 3e6
    png = page()
    ids, size = inputs.encode("S", "Click here", png)
    assert size == (112, 140) and ids.count(inputs.image_id) == 20
    with torch.no_grad():
        one = forward_hidden(net, inputs.batch([ids], [png]))
        other = forward_hidden(net, inputs.batch([ids], [page()]))
    assert one.shape == (1, len(ids), 128) and one.isfinite().all()
    assert (one[0, -1] - other[0, -1]).abs().max() > 1e-4  # it sees the image


def test_checkpoint_is_a_function_of_the_seed(model, tmp_path, demonstrations):
    def digest(path):
        files = [Path(path) / name for name in ("model.safetensors", "tokenizer.json")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    cfg = tiny_model.Config(str(tmp_path / "again"), texts(demonstrations))
    assert digest(tiny_model.build(cfg)) == digest(model)
    other = tiny_model.build(dataclasses.replace(cfg, out=str(tmp_path / "other"), seed=1))
    assert digest(other)[0] != digest(model)[0]


def test_missing_texts_and_a_small_vocabulary_are_errors():
    with pytest.raises(UserError, match="demonstrate.py"):
        tiny_model.build(tiny_model.Config(texts="nowhere"))
    with pytest.raises(UserError, match="vocabulary"):
        tiny_model.build_tokenizer([], 300, 400)


# -------------------------------------------------------------------------------------------- demonstrations
def test_records_parse_and_join_their_plans(demonstrations):
    quarantine = recordings.Quarantine()
    records = list(recordings.read_records(str(demonstrations / "meta.json"), quarantine))
    minds = [json.loads(line) for line in (demonstrations / "demonstrator.jsonl").read_text().splitlines()]
    assert not quarantine.counts["left out"] and len(minds) == 16
    assert len(records) == sum(len(m["operations"]) for m in minds)
    for r in records:
        assert (r.width, r.height) == Image.open(r.image).size == (160, 210)
        assert r.platform == "Web" and r.calls
        call = actions.parse(f"<operation>o</operation><action>{r.action(112, 140)}</action>").calls[0]
        assert call.name == "terminate" or 0 <= call.args["x"] < 112 and 0 <= call.args["y"] < 140
    for place in re.findall(r"[xy]=([\d.]+)", (demonstrations / "annotations.jsonl").read_text()):
        assert 0 < float(place) < 1
    for m in minds:
        plan = [Subtask(s["title"], s["goal"]) for s in m["subtasks"]]
        assert parse_plan(format_plan(plan)) == plan


def test_right_plans_without_slips_succeed_and_wrong_plans_fail(tmp_path, monkeypatch):
    for share in (0.0, 1.0):
        monkeypatch.setattr(demonstrate, "HABITS", dict.fromkeys(demonstrate.HABITS, share))
        out = tmp_path / str(share)
        demonstrate.main(demonstrate.Config(out=str(out), n=16, slips=0.0))
        for m in map(json.loads, (out / "demonstrator.jsonl").read_text().splitlines()):
            assert m["reward"] == (0.0 if m["wrong_plan"] else 1.0), m
            assert not m["slipped"] and (share == 1.0 or not m["wrong_plan"])


def test_a_habit_has_its_share_of_any_stretch(monkeypatch):
    from web.environment import Task
    monkeypatch.setitem(demonstrate.HABITS, "click-tab", 0.62)
    tasks = [Task(id="", site="", seed=s, data={"page": "click-tab"}) for s in range(7, 107)]
    wrong = [demonstrate.follows_habit(task, 0) for task in tasks]
    assert sum(wrong) == 62 and len({tuple(wrong[i:i + 5]) for i in range(0, 100, 5)}) > 2


def test_an_unknown_page_is_an_error():
    with pytest.raises(UserError, match="grid-coordinate"):
        demonstrate.main(demonstrate.Config(pages="click-link"))


# -------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("preset", ["demo", "smoke"])
def test_preset_names_fields_that_exist(preset):
    for stage, values in tomllib.loads((ROOT / "demo" / f"{preset}.toml").read_text()).items():
        module = importlib.import_module(stage)
        known = {f.name for f in dataclasses.fields(config_class(module.main))}
        for key, value in values.items():
            assert key in known, stage
            for special in value.values() if isinstance(value, dict) else ():
                assert set(special) <= known, (stage, key)


def test_a_preset_may_depend_on_another_flag():
    stage = importlib.import_module("sft")
    epochs = {role: parse_args(stage.Config, ["--preset", "demo", "--role", role], stage="sft").epochs
              for role in ("decomposer", "actor")}
    assert epochs == {"decomposer": 13, "actor": 6}


def test_prompts_of_the_demo_are_accepted_and_short():
    prompts = load_prompts(str(ROOT / "demo" / "prompts.json"))
    system, user = prompts.actor("Do it", ["a", "b"], "1. A: b")
    assert "Do it" in user and "1. A: b" in user and len(system + user) < 80
