"""env_webarena.py: the real task files, bad ones, and whole episodes of scripted agents on the local sites of
site.py."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import env_webarena
import rollout
from env_webarena import WebArena
from llm import Client
from prompts import load_prompts
from runtime import UserError
from tests.site import CodeHost, Forum, Map, Office, Shop, local_sites
from webarena_sites import ACCOUNTS, load_sites
from webarena_tasks import FILES, apply_patch, bind, derive_train, read_tasks, to_placeholders

ROOT = Path(__file__).parents[1]
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


def written(path, thing) -> str:
    path.write_text(json.dumps(thing))
    return str(path)


def task(task_id, intent, kind, start, sites, changes=None, state="", **rules):
    rules = {"eval_types": kind if isinstance(kind, list) else [kind], "reference_answers": None,
             "reference_url": "",
             "program_html": []} | rules
    return {"task_id": task_id, "intent": intent, "start_url": start, "sites": sites, "eval": rules,
            "storage_state": state or f"./.auth/{sites[0]}_state.json"}


def html(url, locator, **contents):
    return [{"url": url, "locator": locator, "required_contents": contents}]


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
    env_webarena.check(env_webarena.Config(str(DATA / path), written(tmp_path / "sites.json", EVERYWHERE)))
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
    (task(7, "x", "program_html", "__REDDIT__", ["reddit"], program_html=html("func:rm('/')", "",
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
        env_webarena.check(env_webarena.Config(file, sites))
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
    done = subprocess.run([sys.executable, "env_webarena.py", "check", "--tasks",
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
        env_webarena.check(env_webarena.Config(file, sites, live=True))
        web.one("reddit").elsewhere = web.one("map").origin
        with pytest.raises(UserError, match="1 problems"):
            env_webarena.check(env_webarena.Config(file, sites, live=True))
    assert "PROBLEM reddit: site reddit:" in capsys.readouterr().out


def test_unsafe_ports_are_allowed_explicitly(tmp_path):
    sites = written(tmp_path / "sites.json", {"reddit": ["http://h:6668", "http://h:6667"],
                                              "map": "http://h"})
    assert WebArena("", sites, leases=tmp_path).browser_args == ["--explicitly-allowed-ports=6667,6668"]


# ----------------------------------------------------------------------------------------- scripted episodes
class Prompts:
    """The request's user text says which task and step it is."""

    def actor(self, instruction, history, plan):
        return "", json.dumps([instruction, len(history)])


def play(env, tasks, scripts, threads=2, retries=0, call_timeout=8.0):
    """One episode per script of a task, without plans. `scripts`: intent -> scripts -> calls, one per step;
    then the agent ends the episode. Returns the tasks' episodes, in order."""
    seeds = {rollout.request_seed(0, t.id, t.seed, 0, 0, m): script
             for t in tasks for m, script in enumerate(scripts[t.instruction])}
    steps = {rollout.request_seed(seed, k): (script + ["terminate(status='success')"] * 9)[k]
             for seed, script in seeds.items() for k in range(9)}

    def act(requests):
        return [SimpleNamespace(text=steps[r.seed], image_size=(1280, 720), response_ids=[0])
                for r in requests]
    cfg = rollout.RolloutConfig(threads=threads, retries=retries, coordinates="page", max_steps=6,
                                call_timeout=call_timeout)
    with rollout.Pool(env, Prompts(), cfg) as pool:
        groups = list(pool.run(tasks, 1, max(map(len, scripts.values())), 0, {"actor": act}, use_plan=False))
    return [e for g in sorted(groups, key=lambda g: tasks.index(g.task)) for row in g.episodes for e in row]


def environment(tmp_path, web, tasks, **options):
    options = {"judge": judge, "lease_timeout": 60, "leases": tmp_path / "leases",
               "log": lambda text: None} | options
    return WebArena(written(tmp_path / "tasks.json", tasks), written(tmp_path / "sites.json", web.json),
                    **options)


MEMBERS = "__GITLAB__/byteblaze/dotfiles/-/project_members"
ONE_OF_EACH = [
    # task, the calls that solve it, the calls that do not
    (task(0, "how many reviews", "string_match", "__SHOPPING__", ["shopping"],
          reference_answers={"must_include": ["12"]}),
     ["click(x=110, y=208)", "response(answer='There are 12.')"], ["click(x=110, y=208)",
                                                                   "response(answer='112')"]),
    (task(1, "open the issue", "url_match", "__GITLAB__", ["gitlab"], url_note="GOLD in PRED",
          reference_url="__GITLAB__/a11yproject/-/issues/719"), ["click(x=110, y=208)"],
     ["click(x=110, y=108)"]),
    (task(2, "is it closed", ["string_match", "url_match"], "__GITLAB__", ["gitlab"],
          reference_answers={"exact_match": "Yes"}, reference_url="__GITLAB__/a11yproject/-/issues/719"),
     ["click(x=110, y=208)", "response(answer='Yes')"], ["response(answer='Yes')"]),
    (task(3, "invite vinta", "program_html", "__GITLAB__/byteblaze/dotfiles/-/project_members", ["gitlab"],
          program_html=html(MEMBERS, "func:gitlab_get_project_memeber_role(__page__, 'vinta')",
                            must_include=["Guest"])),
     ["click(x=120, y=115)", "write(message='vinta')", "click(x=120, y=215)"],
     ["click(x=120, y=115)", "write(message='koush')", "click(x=120, y=215)"]),
    (task(4, "order the kit", "program_html", "__SHOPPING__", ["shopping"], program_html=html(
        "func:shopping_get_latest_order_url()",
        "document.querySelector('.order-details-items.ordered').outerText",
        must_include=["B0738JQG6Q"])), ["click(x=120, y=115)"], ["wait(seconds=0)"]),
    (task(5, "post about cars", ["url_match", "program_html"], "__REDDIT__/submit/nyc", ["reddit"],
          reference_url="__REDDIT__/f/nyc", url_note="GOLD in PRED", program_html=html(
              "func:reddit_get_post_url('__last_url__')",
              "document.querySelector('.submission__inner').outerText",
              must_include=["is car necessary in NYC"])),
     ["click(x=120, y=115)", "write(message='is car necessary in NYC')", "click(x=120, y=215)"],
     ["click(x=120, y=115)", "write(message='are cars necessary')", "click(x=120, y=215)"]),
    (task(6, "draft a refund", "program_html", "__SHOPPING__/contact", ["shopping"], program_html=html(
        "last", "document.querySelector('[title=\"What’s on your mind?\"').value", must_include=["180",
                                                                                                 "12.99"])),
     ["click(x=120, y=120)", "write(message='order 180, please pay $12.99 back')"],
     ["click(x=120, y=120)", "write(message='order 1180, please pay $12.99 back')"]),
    (task(7, "set the price", "program_html", "__SHOPPING_ADMIN__/price", ["shopping_admin"],
          program_html=html(
        "last", "document.querySelector('[name=\"product[price]\"').value", exact_match="29.5")),
     ["click(x=390, y=115, clicks=3)", "write(message='29.50')", "click(x=120, y=215)"], ["wait(seconds=0)"]),
    (task(8, "find the hall", "program_html", "__MAP__", ["map"], state="null", program_html=html(
        "last", "document.querySelector('[id=\"sidebar_content\"').outerText",
        must_include=["Carnegie Music Hall"])),
     ["click(x=110, y=108)"], ["wait(seconds=0)"]),
    (task(9, "leave a review", "program_html", "__SHOPPING__/review", ["shopping"], program_html=html(
        "last", "func:shopping_get_sku_latest_review_rating('B1')", must_include=["100"]) + html(
        "last", "func:shopping_get_sku_latest_review_author('B1')", must_include=["Emma Lopez"])),
     ["click(x=120, y=115)", "write(message='Emma Lopez')", "click(x=120, y=215)"], ["click(x=120, y=215)"]),
    (task(10, "why is there none", "string_match", "__SHOPPING_ADMIN__", ["shopping_admin"],
          string_note="no such order",
          reference_answers={"fuzzy_match": "N/A"}), ["response(answer='N/A')"], ["response(answer='done')"]),
    (task(11, "what is it about", "string_match", "__REDDIT__", ["reddit"],
          reference_answers={"fuzzy_match": ["books"]}),
     ["response(answer='about books')"], ["response(answer='')"]),
]


@pytest.fixture(scope="module")
def web():
    with local_sites(replicas=2) as sites:
        yield sites


def test_every_eval_type_end_to_end_right_and_wrong(web, tmp_path):
    def verdict(kind, question, reference, answer):
        return "different" if kind == "reason" else "correct"
    env = environment(tmp_path, web, [t for t, _, _ in ONE_OF_EACH], judge=verdict,
                      also="scalecua_v2,vab,webarena")
    scripts = {t["intent"]: [right, wrong] for t, right, wrong in ONE_OF_EACH}
    episodes = play(env, env.tasks("any"), scripts, threads=3)
    assert len(episodes) == 24 and {e.group.instruction for e in episodes} == set(scripts)
    for e in episodes:
        wanted = ("success", 1) if e.m == 0 else ("failure", 0)
        assert (e.status, e.reward) == wanted, (e.group.instruction, e.m, e.reason, e.error)
    assert not env.visits


def test_an_unplugged_judge_is_infra_with_its_reason(web, tmp_path):
    env = environment(tmp_path, web, [ONE_OF_EACH[-1][0]], judge=env_webarena.Judge(
        Client("j", base_url="http://127.0.0.1:9/v1", retries=0), load_prompts()))
    episode, = play(env, env.tasks("any"), {"what is it about": [["response(answer='books')"]]})
    assert (episode.status, episode.reward) == ("infra",
                                                None) and "no verdict from the judge" in episode.reason


class Unauthorized(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_wrong_judge_key_is_infra_not_a_failure(web, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unauthorized)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = environment(tmp_path, web, [ONE_OF_EACH[-1][0]], judge=env_webarena.Judge(
        Client("j", base_url=f"http://127.0.0.1:{server.server_address[1]}/v1"), load_prompts()))
    episode, = play(env, env.tasks("any"), {"what is it about": [["response(answer='books')"]]})
    server.shutdown()
    server.server_close()
    assert episode.status == "infra" and "401" in episode.reason and "sk-wrong-key" not in episode.reason


INVITE = task(0, "invite once", "program_html", MEMBERS, ["gitlab"], state="null", program_html=html(
    MEMBERS, "document.querySelectorAll('tr').length", exact_match="2"))
INVITING = ["click(x=120, y=115)", "write(message='vinta')", "click(x=120, y=215)"]


def test_twenty_one_episodes_on_two_replicas_never_see_each_other(tmp_path):
    with local_sites(2, [CodeHost]) as web:
        env = environment(tmp_path, web, [INVITE])
        episodes = play(env, env.tasks("any"), {"invite once": [INVITING] * 21}, threads=6, retries=2)
        assert [(e.reward, e.reason,
                 e.error) for e in episodes if e.reward != 1] == [] and len(episodes) == 21
        assert [s.state["most"] for s in web.servers] == [2, 2]         # nobody ever saw a third member
        assert web.resets >= 21 and min(s.resets for s in web.servers) > 0
        replicas = [e.details["gitlab"]["replica"] for e in episodes]
        assert {replicas.count(s.address) for s in web.servers} <= set(range(8, 14))


def test_without_a_reset_the_log_warns_once_and_changes_stay(tmp_path):
    said = []
    with local_sites(1, [CodeHost], reset=False) as web:
        env = environment(tmp_path, web, [INVITE], log=said.append)
        rewards = [e.reward for e in play(env, env.tasks("any"), {"invite once": [INVITING] * 3})]
    assert sorted(rewards) == [0, 0, 1] and len(said) == 1 and "gitlab has no reset" in said[0]


# -------------------------------------------------------------------------------------- sites that misbehave
READ = task(0, "look", "url_match", "__REDDIT__", ["reddit"], reference_url="__REDDIT__/f/books",
            url_note="GOLD in PRED")


def one_infra(tmp_path, web, call_timeout=8.0):
    env = environment(tmp_path, web, [READ])
    episode, = play(env, env.tasks("any"), {"look": [["click(x=110, y=108)"]]}, call_timeout=call_timeout)
    assert (episode.status, episode.reward) == ("infra", None)
    return episode.error + episode.reason


def test_a_site_that_redirects_to_another_host_is_infra(tmp_path):
    with local_sites(1, [Forum, Map]) as web:
        web.one("reddit").elsewhere = web.one("map").origin
        assert "redirects to" in one_infra(tmp_path, web)


def test_a_site_that_is_down_is_infra(tmp_path):
    with local_sites(1, [Forum]) as web:
        web.one("reddit").down = True
        assert "503" in one_infra(tmp_path, web)


def test_a_refused_log_in_is_infra_and_no_password_is_told(tmp_path):
    with local_sites(1, [Forum]) as web:
        web.json["reddit"]["account"] = {"username": "somebody", "password": "hunter2hunter2"}
        error = one_infra(tmp_path, web)
        assert "as somebody was refused" in error and "hunter2" not in error


def test_a_form_that_hangs_tells_no_password(tmp_path):
    with local_sites(1, [Forum]) as web:
        web.one("reddit").locked = "readonly"       # Playwright's message quotes what it could not type
        error = one_infra(tmp_path, web, call_timeout=2.0)
        assert "log-in at reddit" in error and ACCOUNTS["reddit"][1] not in error


def test_a_failing_reset_is_infra(tmp_path):
    with local_sites(1, [Forum]) as web:
        web.json["reddit"]["reset"] = f"{sys.executable} -c 'raise SystemExit(\"no docker here\")'"
        env = environment(tmp_path, web, [task(0, "look", "program_html", "__REDDIT__", ["reddit"],
                                               program_html=html(
            "last", "", must_include=["books"]))])
        episode, = play(env, env.tasks("any"), {"look": [[]]})
        assert episode.status == "infra" and "no docker here" in episode.error


def test_a_site_that_goes_down_before_scoring_is_infra(tmp_path):
    def judge_then(env, server):
        original = env.judge

        def later(task, session, answer):
            server.down = True
            return original(task, session, answer)
        return later
    with local_sites(1, [Forum]) as web:
        env = environment(tmp_path, web, [task(0, "look", "program_html", "__REDDIT__", ["reddit"],
                                               program_html=html(
            "__REDDIT__/f/books", "", must_include=["x"]))])
        env.judge = judge_then(env, web.one("reddit"))
        episode, = play(env, env.tasks("any"), {"look": [[]]})
        assert (episode.status, episode.reward) == ("infra", None) and "503" in episode.reason


def test_the_page_of_an_order_is_read_even_if_the_agent_logged_out(tmp_path):
    order = ONE_OF_EACH[4][0]
    with local_sites(1, [Shop]) as web:
        env = environment(tmp_path, web, [order])
        script = ["click(x=120, y=115)", f"open_url(url='{web.one('shopping').address}/logout')"]
        episode, = play(env, env.tasks("any"), {"order the kit": [script]})
        assert episode.reward == 1, episode.reason + episode.error


def test_start_pages_open_side_by_side_the_first_in_front(tmp_path):
    with local_sites(1, [Shop]) as web:
        tabs = task(0, "compare", "url_match", "__SHOPPING__/kit.html |AND| __SHOPPING__/contact",
                    ["shopping"],
                    reference_url="__SHOPPING__/kit.html")
        env, pages = environment(tmp_path, web, [tabs]), []
        original = env.open
        env.open = lambda task, session: (original(task, session), pages.append(
            [p.url for p in session.context.pages] + [session.page.url]))[0]
        episode, = play(env, env.tasks("any"), {"compare": [[]]})
        shop = web.one("shopping").address
        assert pages[-1] == [f"{shop}/kit.html", f"{shop}/contact",
                             f"{shop}/kit.html"] and episode.reward == 1


def test_a_storage_state_is_used_while_it_works_and_renewed_when_it_has_expired(tmp_path):
    auth = tmp_path / "auth"
    auth.mkdir()
    with local_sites(1, [CodeHost]) as web:
        server = web.one("gitlab")
        expired = {"name": "_gitlab_session", "value": "expired", "domain": "127.0.0.1", "path": "/"}
        written(auth / "gitlab.reddit_state.json", {"cookies": [expired], "origins": []})
        env = environment(tmp_path, web, [task(0, "look", "url_match", "__GITLAB__", ["gitlab"],
                                               reference_url="__GITLAB__")], auth=str(auth))
        for _ in range(2):
            episode, = play(env, env.tasks("any"), {"look": [[]]})
            assert episode.reward == 1
        assert sum(v == ("post", "/users/sign_in") for v in server.visits) == 1
        assert len(list(auth.glob("*/gitlab_state.json"))) == 1


def test_an_episode_carries_the_other_profiles_rewards_and_its_replica(tmp_path):
    t = task(0, "count", "string_match", "__SHOPPING__", ["shopping"],
             reference_answers={"must_include": ["2"]})
    with local_sites(1, [Shop, Office]) as web:
        env = environment(tmp_path, web, [t], also="scalecua_v2")
        episode, = play(env, env.tasks("any"), {"count": [["response(answer='12')"]]})
        assert episode.reward == 0 and episode.rewards == {"fixed": 0.0, "scalecua_v2": 1.0}
        assert episode.details["shopping"]["replica"] == web.one("shopping").address
        assert episode.details["shopping"]["order"] == 2    # the first was the pool's look at the task
