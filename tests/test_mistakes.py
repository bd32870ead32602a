"""First mistakes: each gives one line that names the thing and the way out, exit code 2, and nothing written.

Every command is the shipped file run as a script, in this process (a new one would only import torch again).
"""

import json
import runpy
import sys

import pytest
import torch
from conftest import ROOT


@pytest.fixture
def here(tmp_path, tiny_model, monkeypatch):
    """A directory with the things that mistakes are made with; no keys in the environment."""
    for name in ("OPENAI_API_KEY", "ACTOR_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "broken.json").write_text('{"a": ')
    (tmp_path / "sites.json").write_text('{"shopping": "http://127.0.0.1:9"}')
    for name, kind in (("llama", "llama"), ("bare", "qwen2_5_vl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"eps": 0.3}')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "meta.json").write_text(json.dumps(
        {"web": {"root": str(tmp_path), "annotation": str(tmp_path / "empty.jsonl")}}))
    return {"tmp": tmp_path, "tiny": tiny_model}


def said(script, args, monkeypatch, capsys) -> str:
    """The one line of a command that must end with exit code 2."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *args])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    line, = capsys.readouterr().err.strip().splitlines()
    assert e.value.code == 2
    return line


GRPO = "grpo_hier.py --run_dir {tmp}/run --dtype float32"
BOTH = f"{GRPO} --actor {{tiny}} --decomposer {{tiny}}"
PAGES = f"{BOTH} --env miniwob --split train"
SFT = "sft.py --run_dir {tmp}/run --role actor"
EVAL = "evaluate.py --run_dir {tmp}/run --env miniwob --tasks click-tab --split eval --device cpu"
ASK = "annotate.py --out {tmp}/run/out.jsonl"


@pytest.mark.parametrize("command, thing, remedy", [
    # stage 3
    (GRPO, "--actor", "stage-2 checkpoint"),
    (f"{GRPO} --actor no/such", "no/such", "give the directory"),
    (f"{GRPO} --actor {{tmp}}/llama", "llama model", "qwen2_5_vl"),
    (f"{GRPO} --actor {{tmp}}/bare --use_plan false --env miniwob --split train --tasks click-tab", "bare",
     "copy tokenizer"),
    (f"{GRPO} --browser_ws ws://me:secret@host:3000/", "--browser_ws", "forward the port"),
    (f"{BOTH} --env miniwobb", "miniwobb", "there are miniwob and webarena"),
    (BOTH, "sites.json", "give a JSON object"),
    (f"{BOTH} --sites {{tmp}}/broken.json", "broken.json", "give a JSON object"),
    (f"{BOTH} --sites {{tmp}}/sites.json --tasks nowhere.json", "nowhere.json", "task file"),
    (f"{PAGES} --tasks click-tabb", "click-tabb", "click-tab,"),
    (f"{BOTH} --env miniwob --tasks click-tab", "train647", "choose one of"),
    (f"{PAGES} --tasks click-tab --prompts {{tmp}}/broken.json", "broken.json", "give a JSON object"),
    (f"{PAGES} --tasks click-tab --dtype fp16", "--dtype fp16", "bfloat16"),
    (f"{PAGES} --tasks click-tab --norm grpo", "--norm grpo", "drgrpo, printed"),
    (f"{PAGES} --tasks click-tab --engine sglang", "--engine sglang", "local, vllm"),
    (f"{PAGES} --tasks click-tab --engine vllm", "--actor_url", "http://HOST:8000/v1"),
    (f"{PAGES} --tasks click-tab --K 0", "--K 0", "1 or more"),
    (f"{PAGES} --tasks click-tab --threads 0", "--threads 0", "1 or more"),
    (f"{PAGES} --tasks click-tab --pipeline 2", "--pipeline 2", "0, 1"),
    (f"{PAGES} --tasks click-tab --lrr 1", "--lrr is no option", "did you mean --lr?"),
    (f"{PAGES} --tasks click-tab --run_dir {{tmp}}/other", "other settings", "choose another directory"),
    (f"{PAGES} --tasks click-tab --run_dir {{tmp}}/broken.json/run", "broken.json/run", "can be made"),
    (f"{PAGES} --preset nonsense", "nonsense", "demo, smoke"),
    # stage 2
    ("sft.py", "--role", "required"),
    ("sft.py --role painter", "painter", "decomposer, actor"),
    (f"{SFT} --model {{tiny}} --meta no_meta.json", "no_meta.json", "give a JSON object"),
    (f"{SFT} --model {{tiny}} --meta {{tmp}}/meta.json --decompositions gone.jsonl", "gone.jsonl",
     "annotate.py"),
    (f"{SFT} --model {{tmp}}/llama --meta {{tmp}}/meta.json", "llama model", "qwen2_5_vl"),
    ("sft.py export --run_dir {tmp}/gone", "gone is no run directory", "--run_dir"),
    # stage 4
    (f"{EVAL} --use_plan false --actor no/such", "no/such", "give the directory"),
    (f"{EVAL} --use_plan false --actor {{tiny}} --adapters {{tmp}}", "no checkpoint of the actor",
     "run directory of"),
    (f"{EVAL} --use_plan false --actor {{tiny}} --runs 0", "--runs 0", "1 or more"),
    (f"{EVAL} --use_plan false --actor_model gpt", "OPENAI_API_KEY", "address of a server without"),
    # stage 1
    (ASK, "--meta", "META.json"),
    (f"{ASK} --meta no_meta.json", "no_meta.json", "give a JSON object"),
    (f"{ASK} --meta {{tmp}}/broken.json", "broken.json", "give a JSON object"),
    (f"{ASK} --meta {{tmp}}/meta.json", "OPENAI_API_KEY", "address of a server without"),
    # stage 5
    ("analysis.py curve --runs {tmp}/gone", "gone", "run grpo_hier.py first"),
    ("analysis.py compare --a {tmp}/gone --b {tmp}/gone", "gone", "name a directory"),
    ("analysis.py view --runs {tmp}/gone", "gone", "name a directory"),
    ("demo/demonstrate.py --pages click-tabb --out {tmp}/t", "click-tabb", "--pages takes"),
])
def test_a_first_mistake_is_one_line_with_the_way_out(here, monkeypatch, capsys, command, thing, remedy):
    script, *args = command.format(**here).split()
    there = snapshot(here["tmp"])
    line = said(script, args, monkeypatch, capsys)
    assert thing in line and remedy in line
    # servers are wanted when the models that they are to serve are loaded, in the run directory
    assert snapshot(here["tmp"]) == there or "vllm" in command


def snapshot(directory) -> dict:
    return {path: path.read_bytes() for path in directory.rglob("*")
            if path.is_file() and path.name != ".lock"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so asking for one is no mistake")
def test_a_gpu_that_is_not_there(here, monkeypatch, capsys):
    line = said("evaluate.py", ["--device", "cuda", "--actor", str(here["tiny"]), "--use_plan", "false"],
                monkeypatch, capsys)
    assert "no GPU" in line and "--device cpu" in line
