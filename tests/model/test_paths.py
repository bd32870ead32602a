"""What is found behind the path of a checkpoint or an adapter, and that nothing broken is taken for one: in
stage 3's resume, in an evaluation, on its way to the servers."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from conftest import png, request
from recorded import config, corpus  # noqa: F401  (a fixture)
from safetensors.torch import load_file, save_file
from test_mistakes import said

import sft
from model.backbone import load_model, need_model
from model.inputs import Inputs
from model.paths import find_adapters, find_model, need_room
from model.policy import Policy
from runtime import UserError, World, read_settings
from runtime.checkpoints import load_checkpoint, save_checkpoint


# ------------------------------------------------------------------------------------------- stage 2's models
@pytest.fixture(scope="module")
def run(corpus, tiny_model, tmp_path_factory):  # noqa: F811
    """A stage-2 run of two steps, with a checkpoint after each."""
    cfg = config(corpus, tiny_model, tmp_path_factory.mktemp("stage2") / "run", max_steps=2, save_every=1)
    sft.main(cfg)
    return Path(cfg.run_dir)


@pytest.mark.parametrize("given, found", [
    ("", "hf"), ("hf", "hf"), ("checkpoints", "checkpoints/000002"),
    ("checkpoints/000002", "checkpoints/000002"), ("checkpoints/000001", "checkpoints/000001")])
def test_a_run_its_checkpoints_and_each_of_them_is_a_model(run, tiny_model, given, found):
    path = find_model(str(run / given), "--actor")
    assert Path(path) == run / found
    need_model(path)
    model, whole = load_model(path).state_dict(), load_model(run / "hf").state_dict()
    same = all(model[name].equal(whole[name]) for name in whole)
    assert model.keys() == whole.keys() and same == (found != "checkpoints/000001")
    assert Inputs(path).encode("s", "u", png(1)) == Inputs(tiny_model).encode("s", "u", png(1))


def test_a_policy_of_a_checkpoint_answers_as_the_whole_model(run):
    asked = [request(3), request(4, temperature=0)]
    answers = [[s.response_ids for s in Policy(run / where, "actor").sample(asked)]
               for where in ("hf", "checkpoints/000002")]
    assert answers[0] == answers[1]


def test_an_unfinished_run_is_its_newest_checkpoint(run, tmp_path):
    half = shutil.copytree(run, tmp_path / "half", ignore=shutil.ignore_patterns("hf"))
    assert Path(find_model(str(half), "--model")) == half / "checkpoints/000002"
    shutil.rmtree(half / "checkpoints/000002")
    assert find_model(f"{half}/checkpoints/", "--model") == str(half / "checkpoints/000001")
    shutil.rmtree(half / "checkpoints")
    with pytest.raises(UserError, match="that is a run of stage 2 without a checkpoint; give"):
        find_model(str(half), "--model")
    assert find_model(f"{run}/hf/", "--model") == f"{run}/hf/", "what was right stays as it was written"


def test_a_stage_2_run_goes_on_from_a_stage_2_run(run, corpus, tmp_path):  # noqa: F811
    cfg = config(corpus, run / "checkpoints", tmp_path / "next", max_steps=1)
    sft.main(cfg)
    assert f'"model": "{run}/checkpoints/000002"' in (tmp_path / "next/config.json").read_text()


def test_weights_that_are_cut_are_one_line(run, tmp_path):
    for name, weights in (("hf", "model.safetensors"), ("checkpoints/000002", "__0_0.distcp")):
        broken = shutil.copytree(run / name, tmp_path / name.replace("/", "_"))
        with open(broken / weights, "r+b") as f:
            f.truncate(1000)
        with pytest.raises(UserError, match="weights cannot be read"):
            load_model(broken)
        if name != "hf":                          # where a run would go on from it
            shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
            shutil.copy(broken / weights, tmp_path / "run" / name / weights)
            cfg = sft.Config(**read_settings(run))
            with pytest.raises(UserError, match="000002: its weights .* from the one before"):
                sft.train(cfg, World(), tmp_path / "run")
        (broken / weights).unlink()
        with pytest.raises(UserError, match="weights cannot be read"):
            load_model(broken)


def test_nothing_but_a_model_is_written_over(run, tmp_path):
    need_room(tmp_path / "new")
    need_room(run / "hf")
    (tmp_path / "runs").mkdir()
    need_room(tmp_path / "runs")
    (tmp_path / "runs/notes.txt").touch()
    with pytest.raises(UserError, match="holds notes.txt, which would be lost"):
        need_room(tmp_path / "runs")
    with pytest.raises(UserError, match="run of stage 2 .* would be lost"):
        sft.export(sft.ExportConfig(str(run), str(run)))
    assert (run / "hf").is_dir()


def test_torch_and_peft_have_nothing_to_say(corpus, run, tiny_model, tmp_path):  # noqa: F811
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sft.main(config(corpus, tiny_model, tmp_path / "run", max_steps=2, save_every=1, checkpointing=True))
        sft.export(sft.ExportConfig(str(tmp_path / "run"), str(tmp_path / "hf")))
        Policy(run / "checkpoints/000001", "actor", checkpointing=True)
    assert not heard, [str(w.message) for w in heard]


# --------------------------------------------------------------------------------------------------- adapters
def poison(name):
    """A change to an adapter's directory."""
    def change(directory):
        file = directory / "adapter_model.safetensors"
        state = load_file(file)
        first = sorted(state)[0]
        if name == "nan":
            state[first][0, 0] = float("nan")
        elif name == "infinite":
            state[first][-1, -1] = -float("inf")
        elif name == "all nan":
            state = {n: t * float("nan") for n, t in state.items()}
        elif name == "shape":
            state[first] = torch.cat([state[first], state[first]])
        elif name == "transposed":
            state[first] = state[first].T.contiguous()
        elif name == "a tensor less":
            del state[first]
        save_file(state, file)
        if name == "cut":
            file.write_bytes(file.read_bytes()[:500])
        elif name == "empty":
            file.write_bytes(b"")
        elif name == "no config":
            (directory / "adapter_config.json").unlink()
        elif name == "broken config":
            (directory / "adapter_config.json").write_text('{"r": ')
        elif name == "another r":
            config = directory / "adapter_config.json"
            config.write_text(config.read_text().replace('"r": 4', '"r": 8'))
    return change


BROKEN = {"nan": "1 of its 28 tensors hold NaN or infinite numbers", "infinite": "NaN or infinite",
          "all nan": "28 of its 28 tensors", "shape": "is (8, 192) and not (4, 192)",
          "transposed": "is (192, 4) and not (4, 192)", "a tensor less": "1 tensors differ",
          "cut": "cannot be read", "empty": "cannot be read", "no config": "cannot be read",
          "broken config": "cannot be read", "another r": "--lora_r"}


@pytest.fixture
def trained(make_policy, tmp_path):
    """A stage-3 run directory with one checkpoint, as far as it is read."""
    actor = make_policy("actor", moved=2)
    optimizers = {"actor": torch.optim.AdamW(actor.parameters().values())}
    save_checkpoint(tmp_path / "run/checkpoints", 3, {"actor": actor}, optimizers, keep=2)
    return tmp_path / "run"


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_adapter_is_one_line_and_changes_nothing(trained, policy, make_policy, how):
    poison(how)(trained / "checkpoints/000003/actor")
    mine = make_policy("actor", moved=1)
    with pytest.raises(UserError) as e:
        mine.load(trained / "checkpoints/000003/actor")
    assert BROKEN[how] in str(e.value) and "000003/actor" in str(e.value)
    before, after = (p.parameters().values() for p in (policy, mine))
    assert all(p.equal(q) for p, q in zip(before, after, strict=True))


STAGES = {"evaluate.py": "--run_dir {t}/eval --adapters {run} --split eval --device cpu",
          "grpo_hier.py": "--run_dir {run} --split train --checkpointing false"}


@pytest.mark.parametrize("how", ["nan", "infinite", "shape", "no config"])
@pytest.mark.parametrize("stage", STAGES)
def test_stages_refuse_a_broken_adapter(trained, tiny_model, tmp_path, monkeypatch, capsys, stage, how):
    poison(how)(trained / "checkpoints/000003/actor")
    flags = f"{STAGES[stage]} --env miniwob --tasks click-tab --use_plan false --actor {tiny_model} " \
            "--lora_r 4 --lora_alpha 8 --dtype float32 --threads 1"
    line = said(stage, flags.format(t=tmp_path, run=trained).split(), monkeypatch, capsys)
    assert line.startswith(f"{stage}: ") and ("000003" in line or how == "no config")
    assert not list(tmp_path.rglob("episodes.jsonl"))


@pytest.mark.parametrize("spoil", [
    lambda d: (d / "actor/optimizer.pt").write_bytes(b"PK\x03\x04 half"), lambda d: (d / "rng.pt").unlink(),
    lambda d: (d / "actor/optimizer.pt").write_bytes(b""),
    lambda d: torch.save({"state": {}, "param_groups": []}, d / "actor/optimizer.pt")])
def test_a_checkpoint_without_its_optimizer_is_one_line(trained, make_policy, spoil):
    spoil(trained / "checkpoints/000003")
    actor = make_policy("actor")
    with pytest.raises(UserError, match="000003 cannot be gone on from .* remove it"):
        load_checkpoint(trained / "checkpoints", {"actor": actor},
                        {"actor": torch.optim.AdamW(actor.parameters().values())})


def test_adapters_are_found_in_a_run_its_checkpoints_and_each_of_them(trained):
    for given in ("", "checkpoints", "checkpoints/000003"):
        assert Path(find_adapters(str(trained / given), ["actor"])) == trained / "checkpoints/000003"
    for given, there in (("checkpoints/000003/actor", "the adapter of one role"),
                         ("", "a run of stage 3|holds")):
        with pytest.raises(UserError, match=f"no checkpoint of the decomposer there, but that .*({there})"):
            find_adapters(str(trained / given), ["decomposer"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_that_has_become_infinite_is_not_saved(make_policy, tmp_path, value):
    policy = make_policy("actor", moved=2)
    name, p = list(policy.parameters().items())[-1]
    with torch.no_grad():
        p[0, 0] = value
    with pytest.raises(UserError, match="the adapter of the actor cannot work: 1 of its 28 tensors"):
        policy.save(tmp_path / "adapter")
    with pytest.raises(UserError, match="cannot work"):
        save_checkpoint(tmp_path, 4, {"actor": policy}, {}, keep=2)
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "000004").exists()
