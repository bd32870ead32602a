"""sites/webarena: whole episodes of scripted agents, through the pool, on the local sites of site.py."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from hostile import scripted

import rollout
from language.prompts import load_prompts
from model.llm import Client
from sites.webarena.environment import Judge, WebArena
from sites.webarena.replicas import ACCOUNTS
from sites.webarena.rules import PROFILES, Unknown
from tests.site import CodeHost, Forum, Map, Shop, html_target, local_sites, task, written
from web.environment import RolloutConfig


def judge(kind, question, reference, answer):
    return "correct"


class Prompts:
    """The request's user text says which task and step it is."""

    def actor(self, instruction, history, plan):
        return "", json.dumps([instruction, len(history)])


def play(env, tasks, scripts, threads=1, retries=2, call_timeout=15.0):
    """One episode per script of a task, without plans. `scripts`: intent -> scripts -> calls, one per step;
    then the agent ends the episode. Returns the tasks' episodes, in order."""
    seeds = {rollout.request_seed(0, t.id, t.seed, 0, 0, m): script
             for t in tasks for m, script in enumerate(scripts[t.instruction])}
    steps = {rollout.request_seed(seed, k): (script + ["terminate(status='success')"] * 9)[k]
             for seed, script in seeds.items() for k in range(9)}

    def act(requests):
        return [SimpleNamespace(text=steps[r.seed], image_size=(1280, 720), response_ids=[0])
                for r in requests]
    cfg = RolloutConfig(threads=threads, retries=retries, coordinates="page", max_steps=6,
                                call_timeout=call_timeout)
    with scripted(env, cfg, Prompts()) as pool:
        groups = list(pool.run(tasks, 1, max(map(len, scripts.values())), 0, {"actor": act}))
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
          program_html=html_target(MEMBERS, "func:gitlab_get_project_memeber_role(__page__, 'vinta')",
                            must_include=["Guest"])),
     ["click(x=120, y=115)", "write(message='vinta')", "click(x=120, y=215)"],
     ["click(x=120, y=115)", "write(message='koush')", "click(x=120, y=215)"]),
    (task(4, "order the kit", "program_html", "__SHOPPING__", ["shopping"], program_html=html_target(
        "func:shopping_get_latest_order_url()",
        "document.querySelector('.order-details-items.ordered').outerText",
        must_include=["B0738JQG6Q"])), ["click(x=120, y=115)"], ["wait(seconds=0)"]),
    (task(5, "post about cars", ["url_match", "program_html"], "__REDDIT__/submit/nyc", ["reddit"],
          reference_url="__REDDIT__/f/nyc", url_note="GOLD in PRED", program_html=html_target(
              "func:reddit_get_post_url('__last_url__')",
              "document.querySelector('.submission__inner').outerText",
              must_include=["is car necessary in NYC"])),
     ["click(x=120, y=115)", "write(message='is car necessary in NYC')", "click(x=120, y=215)"],
     ["click(x=120, y=115)", "write(message='are cars necessary')", "click(x=120, y=215)"]),
    (task(6, "draft a refund", "program_html", "__SHOPPING__/contact", ["shopping"], program_html=html_target(
        "last", "document.querySelector('[title=\"What’s on your mind?\"').value", must_include=["180",
                                                                                                 "12.99"])),
     ["click(x=120, y=120)", "write(message='order 180, please pay $12.99 back')"],
     ["click(x=120, y=120)", "write(message='order 1180, please pay $12.99 back')"]),
    (task(7, "set the price", "program_html", "__SHOPPING_ADMIN__/price", ["shopping_admin"],
          program_html=html_target(
        "last", "document.querySelector('[name=\"product[price]\"').value", exact_match="29.5")),
     ["click(x=390, y=115, clicks=3)", "write(message='29.50')", "click(x=120, y=215)"], ["wait(seconds=0)"]),
    (task(8, "find the hall", "program_html", "__MAP__", ["map"], state="null", program_html=html_target(
        "last", "document.querySelector('[id=\"sidebar_content\"').outerText",
        must_include=["Carnegie Music Hall"])),
     ["click(x=110, y=108)"], ["wait(seconds=0)"]),
    (task(9, "leave a review", "program_html", "__SHOPPING__/review", ["shopping"], program_html=html_target(
        "last", "func:shopping_get_sku_latest_review_rating('B1')", must_include=["100"]) + html_target(
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
        assert set(e.rewards) == set(PROFILES) and e.rewards["fixed"] == e.reward
    reviews = episodes[1]       # it said 112 where 12 was right
    assert reviews.rewards == {"fixed": 0.0, "scalecua_v2": 1.0, "vab": 0.0, "webarena": 1.0}
    visit, shops = reviews.details["shopping"], [s.address for s in web.replicas("shopping")]
    assert visit["replica"] in shops and visit["order"] >= 1
    assert not env.visits


def test_an_unplugged_judge_is_infra_with_its_reason(web, tmp_path):
    env = environment(tmp_path, web, [ONE_OF_EACH[-1][0]], judge=Judge(
        lambda: Client("j", base_url="http://127.0.0.1:9/v1", retries=0), load_prompts()))
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


def test_a_wrong_judge_key_is_unknown_with_its_reason_and_without_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unauthorized)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = Judge(
        lambda: Client("j", base_url=f"http://127.0.0.1:{server.server_address[1]}/v1"), load_prompts())
    with pytest.raises(Unknown, match="401") as error:
        asked("answer", "question", "reference", "answer")
    assert "sk-wrong-key" not in str(error.value)
    server.shutdown()
    server.server_close()


INVITE = task(0, "invite once", "program_html", MEMBERS, ["gitlab"], state="null", program_html=html_target(
    MEMBERS, "document.querySelectorAll('tr').length", exact_match="2"))
INVITING = ["click(x=120, y=115)", "write(message='vinta')", "click(x=120, y=215)"]


def test_twenty_one_episodes_on_two_replicas_never_see_each_other(tmp_path):
    with local_sites(2, [CodeHost]) as web:
        env = environment(tmp_path, web, [INVITE])
        episodes = play(env, env.tasks("any"), {"invite once": [INVITING] * 21}, threads=21)
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
        rewards = [e.reward for e in play(env, env.tasks("any"), {"invite once": [INVITING] * 2})]
    assert sorted(rewards) == [0, 1] and len(said) == 1 and "gitlab has no reset" in said[0]


def test_a_change_that_no_reset_undoes_leaves_traces(web, tmp_path):
    all_tasks = [t for t, _, _ in ONE_OF_EACH]
    assert not any(t.leaves_traces for t in environment(tmp_path, web, all_tasks).tasks("any"))
    bare = SimpleNamespace(json={name: {"address": site["address"]} for name, site in web.json.items()})
    lasting = {t.instruction for t in environment(tmp_path, bare, all_tasks).tasks("any") if t.leaves_traces}
    assert lasting == {"invite vinta", "order the kit", "post about cars", "draft a refund", "set the price",
                       "leave a review"}


# -------------------------------------------------------------------------------------- sites that misbehave
READ = task(0, "look", "url_match", "__REDDIT__", ["reddit"], reference_url="__REDDIT__/f/books",
            url_note="GOLD in PRED")


def one_infra(tmp_path, web, call_timeout=15.0):
    env = environment(tmp_path, web, [READ])
    episode, = play(env, env.tasks("any"), {"look": [["click(x=110, y=108)"]]}, retries=0,
                    call_timeout=call_timeout)
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
                                               program_html=html_target(
            "last", "", must_include=["books"]))])
        episode, = play(env, env.tasks("any"), {"look": [[]]}, retries=0)
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
                                               program_html=html_target(
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
        episodes = play(env, env.tasks("any"), {"look": [[], []]})
        assert [e.reward for e in episodes] == [1, 1]
        assert sum(v == ("post", "/users/sign_in") for v in server.visits) == 1
        assert len(list(auth.glob("*/gitlab_state.json"))) == 1
