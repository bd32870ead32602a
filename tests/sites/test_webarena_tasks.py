"""tasks.py, and what environment.py makes of task files: real, faulty, `check`, settings."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime import UserError
from sites.webarena.check import Config, check
from sites.webarena.environment import WebArena
from sites.webarena.replicas import load_sites
from sites.webarena.tasks import FILES, apply_patch, bind, derive_train, read_tasks, to_placeholders
from tests.site import Forum, Map, html_target, local_sites, task, written
from web import environment as web_environment

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
REAL = {"all812": "webarena/test.raw.json", "lite165": "visualagentbench/test_webarena_lite.raw.json",
        "lite_v2": "scalecua/webarena_lite_v2/test.raw.json",
        "legacy": "webagent_r1/legacy_train_webarena_lite.raw.json",
        "revised": "webagent_r1/train_webarena_lite.raw.json"}
GBK = "scalecua/webarena_lite_v2/test.substituted.gbk.json"
real = pytest.mark.skipif(not DATA.exists(), reason="the real task files in ../shared/data are not here")
EVERYWHERE = {s: f"http://127.0.0.1:{7000 + i}" for i, s in enumerate(
    ("shopping", "shopping_admin", "reddit", "gitlab", "map", "wikipedia"))}


def judge(kind, question, reference, answer):
    return "correct"


# ------------------------------------------------------------------------------------------- real task files
@real
def test_the_real_files_are_read_and_the_647_derived():
    tasks = {name: read_tasks(DATA / path) for name, path in REAL.items()}
    assert [len(t) for t in tasks.values()] == [812, 165, 154, 647, 647]
    train = derive_train(tasks["all812"], tasks["lite165"])
    splits = json.loads((DATA / "derived/splits.json").read_text())
    assert [t["task_id"] for t in train] == [t["old_task_id"] for t in tasks["legacy"]]
    assert sorted(t["task_id"] for t in train) == sorted(next(v for k, v in splits.items() if "647" in k and
                                                              isinstance(v, list) and len(v) == 647))
    assert sum(a["eval"] == b["eval"] and a["intent"] == b["intent"] for a, b in zip(train,
                                                                                     tasks["legacy"])) >= 646
    for t in tasks["revised"]:
        assert isinstance(t["eval"]["reference_answers"], dict) and isinstance(t["storage_state"], str)
        assert all(isinstance(v, list) for target in t["eval"]["program_html"]
                   for rule, v in target["required_contents"].items() if rule == "must_include")


@real
def test_gbk_with_addresses_filled_in_equals_utf8_with_placeholders():
    sites = load_sites(DATA / "scalecua/webarena_lite_v2/webarena_url.json")
    filled, raw = [to_placeholders(t,
                                   sites) for t in read_tasks(DATA / GBK)], read_tasks(DATA / REAL["lite_v2"])
    assert [a["task_id"] for a, b in zip(filled, raw) if a != b] == [44,
                                                                     75]    # published with these differences
    assert "10.140" not in json.dumps(filled) and len(filled) == len(raw)


@real
def test_splits_come_from_a_folder_and_ids_are_unique(tmp_path):
    env = WebArena(str(DATA), written(tmp_path / "sites.json", EVERYWHERE), judge=judge, leases=tmp_path)
    sizes = {split: env.tasks(split) for split in FILES}
    assert {k: len(v) for k, v in sizes.items()} == {"all812": 812, "lite165": 165, "lite_v2": 154,
                                                     "train647": 647}
    assert len({t.id for tasks in sizes.values() for t in tasks}) == 812 + 165 + 154 + 647
    assert sum(t.changes_state for t in sizes["lite_v2"]) == 59
    assert {s: sum(t.site == s for t in sizes["lite_v2"]) for s in EVERYWHERE if s != "wikipedia"} == {
        "shopping": 44, "shopping_admin": 35, "reddit": 19, "gitlab": 30, "map": 26}
    with pytest.raises(UserError, match="no split 'test'"):
        env.tasks("test")


@real
def test_every_task_of_every_file_binds_without_a_placeholder(tmp_path):
    for path in REAL.values():
        for t in read_tasks(DATA / path):
            bound = bind(t, EVERYWHERE, str(t["task_id"]))
            assert "__SHOPPING" not in json.dumps(bound) and ("__last_url__" in json.dumps(t)) == (
                "__last_url__" in json.dumps(bound))


@real
def test_the_older_schema_is_read():
    old = [read_tasks(DATA / f"webarena/example_{i}.json")[0] for i in (1, 2, 3, 4)]
    assert old[0]["eval"]["reference_answers"]["must_include"] and old[1]["eval"]["program_html"] == []


@real
@pytest.mark.parametrize("path, lines", [
    (REAL["all812"], ["812 tasks, 812 readable", "need a judge   118", "need wikipedia         23"]),
    (REAL["lite165"], ["165 tasks, 165 readable"]),
    (REAL["lite_v2"], ["154 tasks, 154 readable", "need a judge   43", "change state   59"]),
    (REAL["legacy"], ["647 tasks, 647 readable", "need a judge   86"]),
    (REAL["revised"], ["647 tasks, 647 readable", "need a judge   186"])])
def test_check_passes_on_the_real_files(path, lines, tmp_path, capsys):
    check(Config(str(DATA / path), written(tmp_path / "sites.json", EVERYWHERE)))
    said = capsys.readouterr().out
    assert all(line in said for line in lines) and "PROBLEM" not in said


# ------------------------------------------------------------------------------------------------- bad files
GOOD = task(7, "x", "url_match", "__REDDIT__", ["reddit"], reference_url="__REDDIT__/f/books")
BAD = [
    (GOOD | {"eval": {}}, "task 7: it has no evaluator"),
    (GOOD | {"eval": GOOD["eval"] | {"eval_types": ["looks"]}}, "task 7: the eval type 'looks'"),
    (GOOD | {"sites": ["reddit", "gitlab"]}, "task 7: the site 'gitlab' is missing"),
    (GOOD | {"eval": GOOD["eval"] | {"reference_url": "__HOMEPAGE__/x"}},
     "task 7: the site 'homepage' is missing"),
    (GOOD | {"start_url": ""}, "task 7: the start page '' is no address"),
    (task(7, "x", "program_html", "__REDDIT__", ["reddit"], program_html=html_target("func:rm('/')", "",
                                                                              exact_match="a")),
     "task 7: the helper call"),
]


@pytest.mark.parametrize("bad, message", BAD)
def test_a_faulty_task_is_an_error_that_names_it(bad, message, tmp_path, capsys):
    good = GOOD | {"task_id": 6}
    file = written(tmp_path / "tasks.json", [good, bad])
    sites = written(tmp_path / "sites.json", {"reddit": "http://127.0.0.1:1"})
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        WebArena(file, sites, leases=tmp_path).tasks("train647")
    with pytest.raises(UserError, match="1 problems"):
        check(Config(file, sites))
    assert "2 tasks, 1 readable" in (said := capsys.readouterr().out) and "PROBLEM 7: " in said


def test_a_left_over_placeholder_names_task_and_site():
    with pytest.raises(UserError,
                       match="task v2/3: the placeholder __WIKIPEDIA__ has no address; add 'wikipedia'"):
        bind({"intent": "see __WIKIPEDIA__/x"}, EVERYWHERE | {"wikipedia": "__WIKIPEDIA__"}, "v2/3")


@pytest.mark.parametrize("content, message", [
    (b"[", "not JSON"), (b"[]", "holds no task"), (b'[{"intent": "x"}]', "entry 0 is no task"),
    (b'[{"task_id": 1, "intent": "x"}]', "holds no task with an evaluator"), (b"\xff\xff\xff",
                                                                              "neither UTF-8 nor GBK")])
def test_a_file_that_is_no_task_file(content, message, tmp_path):
    (tmp_path / "tasks.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_tasks(tmp_path / "tasks.json")


def test_check_on_the_command_line_ends_with_one_line_and_code_2(tmp_path):
    sites = written(tmp_path / "sites.json", {"reddit": "http://127.0.0.1:1"})
    done = subprocess.run([sys.executable, "-m", "sites.webarena", "check", "--tasks",
                           str(tmp_path / "nowhere.json"),
                           "--sites", sites], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere.json" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_site_that_is_null_leaves_its_tasks_out_and_a_judge_must_be_named(tmp_path):
    tasks = [GOOD, GOOD | {"task_id": 8, "sites": ["map"], "start_url": "__MAP__"},
             task(9, "y", "string_match", "__REDDIT__", ["reddit"], reference_answers={"fuzzy_match": ["a"]})]
    file = written(tmp_path / "tasks.json", tasks)
    sites = written(tmp_path / "sites.json", {"reddit": "http://127.0.0.1:1", "map": None})
    said = []
    env = WebArena(file, sites, judge=judge, leases=tmp_path, log=said.append)
    assert [t.id for t in env.tasks("any")] == ["tasks/7", "tasks/9"] and "1 tasks left out" in said[0]
    with pytest.raises(UserError, match="1 of 2 tasks need a judge"):
        WebArena(file, sites, leases=tmp_path).tasks("any")
    with pytest.raises(UserError, match="no evaluator profile is called 'strict'"):
        WebArena(file, sites, profile="strict", leases=tmp_path)


@dataclass(frozen=True)
class Stage(web_environment.RolloutConfig):
    """What a stage adds to the pool's settings."""
    judge_model: str = "a-judge"
    profile: str = "vab"
    also: str = "fixed, webarena"


def test_make_reads_a_stages_config_and_asks_for_a_key_only_where_a_judge_is_needed(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judged = task(9, "y", "string_match", "__REDDIT__", ["reddit"], reference_answers={"fuzzy_match": ["a"]})
    sites = written(tmp_path / "sites.json", {"reddit": "http://127.0.0.1:1"})
    env = web_environment.load_environment(Stage(tasks=written(tmp_path / "plain.json", [GOOD]), sites=sites))
    assert len(env.tasks("any")) == 1 and env.profiles == ["vab", "fixed", "webarena"]
    judged_file = written(tmp_path / "judged.json", [judged])
    env = web_environment.load_environment(Stage(tasks=judged_file, sites=sites))
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        env.tasks("any")


def test_a_patch_repairs_annotations(tmp_path):
    tasks = [json.loads(json.dumps(GOOD))]
    assert apply_patch(tasks, written(tmp_path / "p.json",
                                      {"7": {"eval": {"reference_url": "__REDDIT__/f/nyc"}}})) == 1
    assert tasks[0]["eval"]["reference_url"] == "__REDDIT__/f/nyc"
    assert tasks[0]["eval"]["eval_types"] == ["url_match"]
    with pytest.raises(UserError, match="no task '70'"):
        apply_patch(tasks, written(tmp_path / "p.json", {"70": {}}))


def test_check_asks_live_sites(tmp_path, capsys):
    with local_sites(1, [Forum, Map]) as web:
        file, sites = written(tmp_path / "tasks.json", [GOOD]), written(tmp_path / "sites.json", web.json)
        check(Config(file, sites, live=True))
        web.one("reddit").elsewhere = web.one("map").origin
        with pytest.raises(UserError, match="1 problems"):
            check(Config(file, sites, live=True))
    assert "PROBLEM reddit: site reddit:" in capsys.readouterr().out


def test_unsafe_ports_are_allowed_explicitly(tmp_path):
    sites = written(tmp_path / "sites.json", {"reddit": ["http://h:6668", "http://h:6667"],
                                              "map": "http://h"})
    assert WebArena("", sites, leases=tmp_path).browser_args == ["--explicitly-allowed-ports=6667,6668"]
