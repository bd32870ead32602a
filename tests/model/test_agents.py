"""Models on servers as roles: what a server is asked, what its failures become, planner and grounder; and
whole evaluations over HTTP on MiniWoB++ in real Chromium, with scripts in the models' places."""

import base64
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_server import serving
from PIL import Image

import evaluate
from demo.teacher import request_text
from language import actions
from language.prompts import load_prompts
from language.texts import TEXTS
from model import remote
from model.llm import Client
from model.remote import PlannerGrounder, PlannerPrompts, Remote, description
from model.roles import Request
from records.episode import Step
from runtime import UserError


def png(width=160, height=210, color="white") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def request(user="Task: buy it", earlier=(), temperature=0.0, shot=None):
    return Request("actor", "You act.", user, shot or png(), 7, temperature, 64, list(earlier))


def parts(body) -> list[list]:
    """Per turn: its role, then its texts and the colours of its images' first pixel."""
    out = []
    for turn in body["messages"]:
        content = turn["content"] if isinstance(turn["content"], list) else [{"text": turn["content"]}]
        out.append([turn["role"]] + [pixel(p["image_url"]["url"]) if "image_url" in p else p["text"]
                                     for p in content])
    return out


def pixel(url: str):
    return Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB").getpixel((0, 0))


# ---------------------------------------------------------------------------------------------------- remote
def test_a_request_is_system_screenshot_text_and_its_answer_a_sample():
    with serving(lambda path, body, headers: "<action>click(x=1, y=2)</action>") as server:
        sample = Remote("actor", "an-actor", server.url).submit(request(shot=png(color="red"))).result(20)
    _, body, headers = server.requests[0]
    assert parts(body) == [["system", "You act."], ["user", (255, 0, 0), "Task: buy it"]]
    assert (body["model"], body["max_completion_tokens"], body["temperature"]) == ("an-actor", 64, 0.0)
    assert "seed" not in body and body["messages"][1]["content"][0]["image_url"]["detail"] == "high"
    assert sample.text == "<action>click(x=1, y=2)</action>" and not sample.truncated
    assert sample.image_size == actions.smart_resize(160, 210) and sample.response_ids == []


def test_sampling_has_the_requests_seed_and_a_temperature_below_0_is_not_sent():
    with serving(lambda *_: "x") as server:
        remote = Remote("actor", "m", server.url)
        for t in (0.8, -1.0):
            remote.answer(request(temperature=t))
    (_, hot, _), (_, unset, _) = server.requests
    assert (hot["temperature"], hot["seed"]) == (0.8, 7) and not {"temperature", "seed"} & unset.keys()


@pytest.mark.parametrize("limits, size", [((3136, 0), (1280, 720)), ((3136, 2109744), (1288, 728)),
                                          ((3136, 500_000), (924, 504))])
def test_the_size_that_the_model_sees(limits, size):
    remote = Remote("actor", "m", "http://127.0.0.1:9/v1", min_pixels=limits[0], max_pixels=limits[1])
    assert remote.resized(1280, 720) == size


def test_earlier_steps_are_turns_of_their_own_and_no_more_than_asked_for():
    steps = [Step(png(color=c), [SimpleNamespace(text=f"answer {c}")]) for c in ("red", "lime", "blue")]
    with serving(lambda *_: "x") as server:
        for earlier in (0, 2, 9):
            Remote("actor", "m", server.url, earlier=earlier).answer(request(earlier=steps))
    bodies = [parts(body)[1:] for _, body, _ in server.requests]
    last = ["user", (255, 255, 255), "Task: buy it"]
    red, lime, blue = ([["user", color], ["assistant", f"answer {name}"]] for name, color in (
        ("red", (255, 0, 0)), ("lime", (0, 255, 0)), ("blue", (0, 0, 255))))
    assert bodies == [[last], [*lime, *blue, last], [*red, *lime, *blue, last]]


def test_a_cut_answer_is_marked_and_a_refusal_is_an_answer():
    replies = iter([("length", {"content": "<action>cli"}),
                    ("stop", {"content": None, "refusal": "I will not"})])

    def answer(path, body, headers):
        finish, message = next(replies)
        return {"choices": [{"finish_reason": finish, "message": {"role": "assistant", **message}}]}
    with serving(answer) as server:
        remote = Remote("actor", "m", server.url)
        cut, refused = remote.answer(request()), remote.answer(request())
    assert cut.truncated and cut.text == "<action>cli"
    assert not refused.truncated and actions.parse(refused.text).error


def test_an_outage_is_data_and_a_wrong_key_or_name_is_the_users(monkeypatch):
    monkeypatch.setattr(remote, "Client", patient)
    with pytest.raises(ConnectionError, match="^model server of the actor: "):
        Remote("actor", "m", "http://127.0.0.1:9/v1").answer(request())
    for status in (401, 404):
        with serving(lambda *_: (status, {"error": {"message": "no such thing"}}, {})) as server:
            with pytest.raises(UserError, match="--actor_model m at .*no such thing"):
                Remote("actor", "m", server.url).submit(request()).result(20)


def patient(*args, retries, **options):
    """llm.Client that asks twice and does not pause."""
    return Client(*args, retries=1, first_pause=0.01, **options)


def test_every_server_gets_its_own_key_and_no_password_is_taken(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-openai")
    monkeypatch.setenv("GROUNDER_API_KEY", "key-of-grounder")
    with serving(lambda *_: "x") as server:
        for role in ("actor", "grounder"):
            Remote(role, "m", server.url).answer(request())
    sent = [headers["authorization"] for _, _, headers in server.requests]
    assert sent == ["Bearer no-key-needed", "Bearer key-of-grounder"]
    with pytest.raises(UserError, match="--actor_url: no password"):
        Remote("actor", "m", "http://me:secret@host/v1")


# ----------------------------------------------------------------------------------------- planner, grounder
def pair(planner_says, grounder_says):
    """A PlannerGrounder whose models say so, and the requests that each got."""
    asked = {"planner": [], "grounder": []}

    def model(role, texts, size):
        texts = iter(texts)

        def answer(request):
            asked[role].append(request)
            return remote.Sample([], b"", size, [], [], next(texts))
        return SimpleNamespace(answer=answer)
    planner, grounder = model("planner", planner_says, (9, 9)), model("grounder", grounder_says, (168, 224))
    return PlannerGrounder(planner, grounder, load_prompts()), asked


def test_the_grounders_place_takes_the_planners():
    plan = "I look.\n```python\n# the blue Save button\nclick(x=1, y=2, clicks=2)\nwrite(message='a, b')\n```"
    both, asked = pair([plan], ["It is at <point>30 40</point>."])
    sample = both.submit(request()).result(5)
    action = actions.parse(sample.text)
    assert list(map(actions.format_call, action.calls)) == ["click(x=30, y=40, clicks=2)",
                                                            "write(message='a, b')"]
    assert action.operation == "the blue Save button" and sample.image_size == (168, 224)
    assert plan in sample.text and "<point>30 40</point>" in sample.text and sample.said == plan
    q, = asked["grounder"]
    assert q.user == "the blue Save button" and q.system == TEXTS["grounder_system"] and not q.earlier


@pytest.mark.parametrize("said, call", [
    ("```python\n# go further down\nswipe(from_coord=[5, 6], direction='up')\n```", "swipe(direction='up')"),
    ("```python\n# say it\nresponse(answer='a < b')\n```", "response(answer='a < b')"),
    ("terminate(status='success')", "terminate(status='success')")])
def test_what_has_no_place_is_not_grounded(said, call):
    both, asked = pair([said], [])
    text = both.answer(request()).text
    assert not asked["grounder"]
    assert actions.parse(text).calls == actions.parse(call).calls


def test_a_planner_that_cannot_be_read_and_a_grounder_that_finds_nothing():
    both, asked = pair(["Let me think about it.", "```python\n# x\nclick(x=1, y=1)\n```"], ["Nowhere."])
    assert actions.parse(both.answer(request()).text).error.startswith("no action in")
    lost = both.answer(request())
    assert "named no place" in actions.parse(lost.text).error and "Nowhere." in lost.text
    assert len(asked["grounder"]) == 1


def test_the_planner_sees_its_own_earlier_words():
    both, asked = pair(["```python\n# first\nclick()\n```"], ["(1, 2)"])
    step = Step(png(color="red"), [both.answer(request())])
    with serving(lambda *_: "x") as server:
        Remote("planner", "m", server.url, earlier=3).answer(request(earlier=[step]))
    assert parts(server.requests[0][1])[2] == ["assistant", "```python\n# first\nclick()\n```"]


def test_descriptions():
    assert description("```python\n#  the  <b>tab</b>\nclick()\n```") == "the b tab /b"
    assert description("Press Save.\n```python\nclick()\n```") == "Press Save."
    assert description("click the\nlink") == "click the link"


def test_the_planners_texts_stand_in_an_actors_place():
    system, user = PlannerPrompts(TEXTS).actor("buy {x}", ["clicked"], "1. plan")
    assert "Task: buy {x}" in system and user == TEXTS["planner_user"]


# ----------------------------------------------------------------------- whole evaluations on MiniWoB++ pages
def tab_of(text: str) -> int:
    return int(re.search(r"#(\d)", text)[1])


def config(tmp_path, **settings) -> evaluate.Config:
    return evaluate.Config(**{"env": "miniwob", "tasks": "click-tab", "split": "eval", "instances": 3,
                              "runs": 1, "threads": 2, "max_steps": 3, "run_dir": str(tmp_path / "run"),
                              "use_plan": False} | settings)


def results_of(cfg) -> tuple[dict, list[dict]]:
    run = Path(cfg.run_dir)
    return (json.loads((run / "result.json").read_text()),
            [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()])


def left_click(x, y) -> str:
    """As Qwen's own models say it."""
    said = {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [round(x), round(y)]}}
    return f"I click the tab.\n<tool_call>\n{json.dumps(said)}\n</tool_call>"


@pytest.mark.parametrize("dialect, coordinates, answer", [
    ("scalecua", "image", lambda x, y: f"<operation>go</operation><action>click(x={x * 168 / 160:.0f}, "
                                       f"y={y * 224 / 210:.0f})</action>"),
    ("uitars", "0-1000", lambda x, y: f"Thought: Go.\nAction: click(start_box='({x * 1000 / 160:.0f},"
                                      f"{y * 1000 / 210:.0f})')"),
    ("guilibra", "page", lambda x, y: '<answer>{"action_type": "Click", "value": "None", "point_2d": '
                                      f'[{x}, {y}]}}</answer>'),
    ("qwen", "image", lambda x, y: left_click(x * 168 / 160, y * 224 / 210)),
    ("qwen", "0-1000", lambda x, y: left_click(x * 1000 / 160, y * 1000 / 210))])
def test_a_remote_native_agent_on_miniwob(tmp_path, capsys, tabs, dialect, coordinates, answer):
    """The server knows where the task's tab is: what it says lands there."""
    with serving(lambda path, body, headers: answer(*tabs[tab_of(request_text(body))])) as server:
        cfg = config(tmp_path, actor_model="native", actor_url=server.url, dialect=dialect,
                     coordinates=coordinates)
        evaluate.main(cfg)
    result, lines = results_of(cfg)
    assert (result["success"], result["n"], result["n_infra"], result["n_unparsable"]) == (1.0, 3, 0, 0)
    assert result["system"] == "actor native" and "100.0 %" in capsys.readouterr().out
    for e in lines:
        step, = e["steps"]
        x, y = tabs[tab_of(e["instruction"])]
        assert abs(step["point"][0] - x) <= 1 and abs(step["point"][1] - y) <= 1 and not e["plan"]


@pytest.mark.parametrize("settings, size", [
    ({}, "1288x728"), ({"coordinates": "0-1000"}, "1000x1000"), ({"coordinates": "page"}, "1280x720"),
    ({"max_pixels": 0}, "1280x720"), ({"max_pixels": 501760}, "924x504")])
def test_the_untrained_qwen_is_told_its_tool_and_the_size_of_its_space(settings, size, policy, monkeypatch):
    monkeypatch.setenv("ACTOR_API_KEY", "k")
    cfg = evaluate.Config(dialect="qwen", actor_model="m", actor_url="http://127.0.0.1:1/v1", use_plan=False,
                          **settings)
    env = SimpleNamespace(width=1280, height=720, scale=1.0)
    texts = evaluate.with_screen(evaluate.load_texts(cfg), cfg, env, evaluate.load_models(cfg, None)["actor"])
    system, user = texts.actor("Buy it", [])
    assert f"screenshot of {size} pixels" in system and "<tools>" in system and "Buy it" in user
    assert "{width}" not in texts.actor("Buy it", [])[0] and '"coordinate": [x, y]' in system
    if not settings:     # a model in this process says itself what it sees
        env = SimpleNamespace(width=160, height=210, scale=1.0)
        texts = evaluate.with_screen(evaluate.load_texts(cfg), cfg, env, policy.sample)
        assert "screenshot of 112x140 pixels" in texts.actor("", [])[0]


def test_prompts_of_ones_own_replace_the_dialects(tmp_path):
    (tmp_path / "mine.json").write_text('{"actor_system": "Mine, {width} wide."}')
    cfg = evaluate.Config(dialect="qwen", prompts=str(tmp_path / "mine.json"))
    assert evaluate.load_texts(cfg).texts["actor_system"] == "Mine, {width} wide."
    assert "<tools>" not in evaluate.load_texts(evaluate.Config()).texts["actor_system"]


def test_our_two_roles_on_a_server(tmp_path, tabs):
    """The decomposer's plan reaches the actor, and the actor does what it says, once it has looked around and
    seen its own answer again."""
    def answer(path, body, headers):
        text = request_text(body)
        if body["model"] == "D":
            return f"1. Click: tab {tab_of(text)}"
        if [turn["role"] for turn in body["messages"]] == ["system", "user"]:
            return "<operation>look around</operation><action>wait(seconds=0)</action>"
        assert "<operation>look around" in text and "Step 1: look around" in text
        x, y = tabs[int(re.search(r"1\. Click: tab (\d)", text)[1])]
        return f"<operation>go</operation><action>click(x={x}, y={y})</action>"
    with serving(answer) as server:
        cfg = config(tmp_path, actor_model="A", actor_url=server.url, decomposer_model="D", use_plan=True,
                     decomposer_url=server.url, coordinates="page", actor_earlier=1)
        evaluate.main(cfg)
    result, lines = results_of(cfg)
    assert result["success"] == 1.0 and result["system"] == "actor A, decomposer D"
    assert all(e["subtasks"] == [["Click", f"tab {tab_of(e['instruction'])}"]] for e in lines)
    assert all([s["history"] for s in e["steps"]] == ["look around", "go"] for e in lines)


def test_planner_and_grounder_on_miniwob(tmp_path, tabs):
    """The planner knows the tab's number and no place, the grounder the place and not the task."""
    def answer(path, body, headers):
        text = request_text(body)
        if body["model"] == "planner":
            return f"```python\n# the tab with number {tab_of(text)}\nclick(x=0, y=0)\n```"
        assert "Task:" not in text
        x, y = tabs[int(re.search(r"number (\d)", text)[1])]
        return f"<point>{x * 1000 // 160} {y * 1000 // 210}</point>"
    with serving(answer) as server:
        cfg = config(tmp_path, planner_model="planner", planner_url=server.url, grounder_model="grounder",
                     grounder_url=server.url, coordinates="0-1000", use_plan=True, instances=2)
        evaluate.main(cfg)
    result, lines = results_of(cfg)
    assert result["success"] == 1.0 and result["system"] == "planner planner, grounder grounder"
    assert all(e["steps"][0]["history"].startswith("the tab with number") for e in lines)


def test_a_server_that_fails_is_infra_of_kind_model_and_runs_again(tmp_path, monkeypatch, tabs):
    monkeypatch.setattr(remote, "Client", patient)
    broken = [True]

    def answer(path, body, headers):
        if broken[0]:
            return 503, {"error": {"message": "out of memory"}}, {}
        x, y = tabs[tab_of(request_text(body))]
        return f"<action>click(x={x}, y={y})</action>"
    with serving(answer) as server:
        cfg = config(tmp_path, actor_model="m", actor_url=server.url, coordinates="page", retries=0,
                     instances=2)
        with pytest.raises(UserError, match="2 of 2 episodes have no verdict.*'model': 2"):
            evaluate.main(cfg)
        result, lines = results_of(cfg)
        assert (result["success"], result["n"], result["n_infra"]) == (None, 0, 2)
        assert all("out of memory" in e["error"] for e in lines)
        broken[0] = False
        evaluate.main(cfg)
    result, lines = results_of(cfg)
    assert (result["success"], result["n"], result["n_infra"]) == (1.0, 2, 0) and len(lines) == 2


# ------------------------------------------------------------------------------------------------- real vLLM
@pytest.mark.opt_in
@pytest.mark.skipif("VLLM_URL" not in os.environ,
                    reason="set VLLM_URL (.../v1) and VLLM_MODEL to a vLLM that serves a Qwen2.5-VL")
def test_a_real_vllm_is_evaluated(tmp_path):
    """Whatever the model answers: every episode gets a verdict, and no answer is a fault."""
    cfg = config(tmp_path, actor_model=os.environ.get("VLLM_MODEL", ""), actor_url=os.environ["VLLM_URL"],
                 prompts=str(Path(__file__).parents[2] / "demo/prompts.json"), max_tokens_A=24)
    evaluate.main(cfg)
    result, lines = results_of(cfg)
    assert (result["n"], result["n_infra"]) == (3, 0) and all(e["steps"][0]["text"] for e in lines)
