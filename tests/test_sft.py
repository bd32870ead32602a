"""Stage 2 on a random Qwen2.5-VL: one process against two ranks, micro-batches, resuming, evaluation, the
exported directory, roles of other systems."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, png, request
from recorded import config, corpus, log, settings  # noqa: F401  (a fixture)
from test_docs import logged

import sft
from model import flops
from model.backbone import load_model
from model.inputs import Inputs
from runtime import UserError, World, parse_args

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


# ---------------------------------------------------------------------------------------------- other systems
KEPT = "from grpo_hier import Agent, Config, credit, draw, loss, rewards, roles, trains\n"
TOY = KEPT + """
from records.examples import Examples

def texts(record, plan, prompts, thinking):
    return "Which step is this?", f"{record.instruction} {len(record.history)}"

def says(record, plan, size):
    return record.line

def plans(record, plan, size):
    return f"The plan: {plan}"

EXAMPLES = {"painter": Examples(texts, says), "scout": Examples(texts, plans, one_a_trajectory=True),
            "hand": Examples(texts, says, scored=True)}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Two systems in files of their own, one of which says nothing about stage 2."""
    import runtime.systems
    import systems
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems/toy.py").write_text(TOY)
    (tmp_path / "systems/mute.py").write_text(KEPT)
    monkeypatch.setattr(runtime.systems, "ROOT", tmp_path)
    monkeypatch.setattr(systems, "__path__", [str(tmp_path / "systems")])
    yield tmp_path / "run"
    for name in ("systems.toy", "systems.mute"):
        sys.modules.pop(name, None)


def learnt(run, cfg):
    """(prompt, target) of each example that the run's index holds and that can be read."""
    steps, _ = sft.datasets(cfg, Inputs(cfg.model), World(), run)
    decode = steps.source.inputs.tokenizer.decode
    found = []
    for i in range(len(steps.source.table)):
        if steps.source.record(i).image.name not in ("broken.png", "thin.png"):
            found.append((decode(steps.source[i].prompt_ids), decode(steps.source[i].target_ids)))
    return found


@pytest.mark.parametrize("role, examples, kinds", [("painter", 40, set()), ("scout", 11, set()),
                                                   ("hand", 40, {"step", "box", "point", "grounding"})])
def test_a_role_of_another_system_learns_what_the_system_says(corpus, tiny_model, toy, role, examples, kinds):
    cfg = config(corpus, tiny_model, toy, system="toy", role=role, max_steps=2, held_out=1)
    sft.main(cfg)
    assert [o["step"] for o in log(toy)] == [1, 2] and log(toy)[1]["loss"] < log(toy)[0]["loss"]
    assert (toy / "hf/config.json").is_file()
    assert set(log(toy, "eval.jsonl")[-1]["kinds"]) == kinds
    found = learnt(toy, cfg)
    assert len(found) == examples
    assert all("Which step is this?" in prompt for prompt, _ in found)
    if role == "scout":
        assert all(answer.startswith("The plan: 1. Go") for _, answer in found)
    else:
        assert found[0][1] == "Click the 0 link<|im_end|>"


def test_a_role_without_plans_needs_no_decompositions(corpus, tiny_model, toy):
    none = {"system": "toy", "max_steps": 1, "use_plan": False, "decompositions": toy / "gone.jsonl"}
    sft.main(config(corpus, tiny_model, toy, role="painter", **none))
    with pytest.raises(UserError, match="no decompositions at .*gone.jsonl"):
        sft.main(config(corpus, tiny_model, toy / "other", role="scout", **none))


@pytest.mark.parametrize("system, role, line", [
    ("toy", "actor", "--role actor: choose one of painter, scout, hand"),
    ("grpo_hier", "painter", "--role painter: choose one of decomposer, actor"),
    ("mute", "actor", "mute.py has no EXAMPLES; define there what each role learns"),
    ("nosuch", "actor", "--system nosuch: there is no systems/nosuch.py; there are grpo_hier, mute, toy")])
def test_a_system_or_role_that_is_not_there_is_one_line(corpus, tiny_model, toy, system, role, line):
    with pytest.raises(UserError, match=re.escape(line)):
        config(corpus, tiny_model, toy, system=system, role=role)
    assert not toy.exists()


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
