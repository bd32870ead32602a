"""Recordings for the tests of stage 2: files of every kind of record, the settings that train on them, and
their examples on the random Qwen2.5-VL."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, png

import sft
from model.inputs import Inputs
from records import examples, recordings, trajectories
from runtime import World, parse_args

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
