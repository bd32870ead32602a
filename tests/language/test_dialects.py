"""Other agents' forms of an action, as their own code and reports write them, and spaces of coordinates."""

import json
import random
import re
import string

import pytest

from language import actions, dialects
from language.dialects import read_guilibra, read_point, read_qwen, read_uitars
from runtime import UserError


def said(action: actions.Action) -> list[str]:
    assert not action.error, action.error
    return [actions.format_call(call) for call in action.calls]


# --------------------------------------------------------------------------------------------------- UI-TARS
@pytest.mark.parametrize("text, calls", [
    ("click(start_box='(177,549)')", ["click(x=177, y=549)"]),
    ("click(start_box='<|box_start|>(177, 549)<|box_end|>')", ["click(x=177, y=549)"]),
    ("click(point='<point>177 549</point>')", ["click(x=177, y=549)"]),
    ("click(start_box='[100, 40, 120, 80]')", ["click(x=110.0, y=60.0)"]),
    ("left_double(start_box='(0,1)')", ["doubleClick(x=0, y=1)"]),
    ("right_single(start_box='(5,6)')", ["rightClick(x=5, y=6)"]),
    ("drag(start_box='(1,2)', end_box='(30,40)')", ["moveTo(x=1, y=2)", "dragTo(x=30, y=40)"]),
    ("drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')",
     ["moveTo(x=1, y=2)", "dragTo(x=3, y=4)"]),
    ("hotkey(key='ctrl c')", ["hotkey('ctrl', 'c')"]),
    ("type(content='it's done\\n')", ["write(message=\"it's done\\n\")"]),
    ("type(content='left_double(')", ["write(message='left_double(')"]),
    ("scroll(start_box='(9,8)', direction='down')", ["swipe(from_coord=[9, 8], direction='up')"]),
    ("scroll(direction='left')", ["swipe(direction='right')"]),
    ("wait()", ["wait(seconds=5)"]),
    ("finished(content='It costs $3')", ["response(answer='It costs $3')"]),
    ("finished()", ["terminate()"]),
    ("click(start_box='(1,2)')\n\ntype(content='a')", ["click(x=1, y=2)", "write(message='a')"]),
])
def test_uitars_calls(text, calls):
    action = read_uitars(f"Thought: I see a box. Let me go on.\nAction: {text}")
    assert said(action) == calls
    assert action.think == action.operation == "I see a box. Let me go on."


def test_uitars_without_a_thought_and_with_nothing_to_read():
    assert said(read_uitars("click(start_box='(1,2)')")) == ["click(x=1, y=2)"]
    for text in ("Thought: hm", "Action: click(start_box='(1)')", "Action: fly()", ""):
        action = read_uitars(text)
        assert action.error and not action.calls


# ------------------------------------------------------------------------------------------------- GUI-Libra
def libra(kind, value="None", point=(-100, -100), tag="think"):
    answer = {"action_description": "do it", "action_type": kind, "value": value,
              "point_2d": list(point) if point else None}
    return f"<{tag}>\nLook.\n</{tag}>\n<answer>\n{json.dumps(answer, indent=1)}\n</answer>"


@pytest.mark.parametrize("text, calls", [
    (libra("Click", point=(644, 364)), ["click(x=644, y=364)"]),
    (libra("Select", point=(3, 4), tag="thinking"), ["click(x=3, y=4)"]),
    (libra("Write", "a 'b' \"c\"", (3, 4)), ["click(x=3, y=4)", "write(message='a \\'b\\' \"c\"')"]),
    (libra("Write", "a"), ["write(message='a')"]),
    (libra("KeyboardPress", "Enter"), ["press(keys='Enter')"]),
    (libra("KeyboardPress", "Ctrl+A"), ["hotkey('Ctrl+A')"]),
    (libra("Scroll", "down", None), ["swipe(direction='up')"]),
    (libra("Swipe", "up"), ["swipe(direction='up')"]),
    (libra("Wait", "2"), ["wait(seconds=2)"]),
    (libra("Wait"), ["wait(seconds=3)"]),
    (libra("NavigateBack"), ["go_backward()"]),
    (libra("LongPress", point=(3, 4)), ["long_press(x=3, y=4)"]),
    (libra("Answer", "42"), ["response(answer='42')"]),
    (libra("terminate", "done"), ["terminate(info='done')"]),
    ('```json\n{"action_type": "Answer", "value": "a\nb"}\n```', ["response(answer='a\\nb')"]),
])
def test_guilibra_calls(text, calls):
    action = read_guilibra(text)
    assert said(action) == calls
    if "<think" in text:
        assert (action.think, action.operation) == ("Look.", "do it")


@pytest.mark.parametrize("text, complaint", [
    (libra("Click"), "no place"), (libra("Click", point=(1, "a")), "no place"),
    (libra("Fly"), "unknown action Fly"),
    (libra("Scroll", "sideways"), "direction"), ("<answer>{'a': 1}</answer>", "no JSON object"),
    ("<answer>[1]</answer>", "no JSON object"), ("", "no JSON object"),
    (libra("Click", point=(1e9, 1)), "x="),
])
def test_guilibra_names_what_is_wrong(text, complaint):
    action = read_guilibra(text)
    assert complaint in action.error and not action.calls


# ----------------------------------------------------------------------------------------------------- Qwen
def tool(action, **arguments):
    said = {"name": "computer_use", "arguments": {"action": action} | arguments}
    return f"<tool_call>\n{json.dumps(said)}\n</tool_call>"


@pytest.mark.parametrize("text, calls", [
    (tool("left_click", coordinate=[644, 364]), ["click(x=644, y=364)"]),
    (tool("right_click", coordinate=[3, 4]), ["rightClick(x=3, y=4)"]),
    (tool("middle_click", coordinate=[3, 4]), ["middleClick(x=3, y=4)"]),
    (tool("double_click", coordinate=[3, 4]), ["doubleClick(x=3, y=4)"]),
    (tool("triple_click", coordinate=[3, 4]), ["tripleClick(x=3, y=4)"]),
    (tool("left_click"), ["click()"]), (tool("double_click", coordinate=None), ["doubleClick()"]),
    (tool("mouse_move", coordinate=[3, 4]), ["moveTo(x=3, y=4)"]),
    (tool("left_click_drag", coordinate=[30, 40]), ["dragTo(x=30, y=40)"]),
    (tool("mouse_move", coordinate=[1, 2]) + "\n" + tool("left_click_drag", coordinate=[30, 40]),
     ["moveTo(x=1, y=2)", "dragTo(x=30, y=40)"]),
    (tool("type", text='it\'s "5" }{ , ]\n'), ['write(message=\'it\\\'s "5" }{ , ]\\n\')']),
    (tool("key", keys=["ctrl", "a"]), ["hotkey('ctrl', 'a')"]),
    (tool("key", keys="Return"), ["hotkey('Return')"]),
    (tool("key", text="ctrl+c"), ["hotkey('ctrl+c')"]),
    (tool("scroll", pixels=-500), ["scroll(clicks=-5.0)"]),
    (tool("scroll", pixels=50, coordinate=[3, 4]), ["scroll(clicks=0.5, x=3, y=4)"]),
    (tool("hscroll", pixels=200, coordinate=[3, 4]), ["hscroll(clicks=2.0, x=3, y=4)"]),
    (tool("wait", time=2), ["wait(seconds=2)"]), (tool("wait"), ["wait()"]),
    (tool("terminate", status="success"), ["terminate(status='success')"]),
    (tool("terminate", status="failure"), ["terminate(status='failure')"]),
    (tool("terminate", status="success", answer="42"), ["terminate(status='success', info='42')"]),
    (tool("answer", text="It costs $3"), ["response(answer='It costs $3')"]),
    (tool("visit_url", url="http://a.b/"), ["open_url(url='http://a.b/')"]),
    (tool("history_back"), ["go_backward()"]),
    # broken in ways that are seen
    (tool("left_click", coordinate=[100, 40, 120, 80]), ["click(x=110, y=60)"]),
    (tool("left_click", coordinate="84, 120"), ["click(x=84, y=120)"]),
    (tool("left_click", coordinate=["84", "120"]), ["click(x=84, y=120)"]),
    (tool("left_click", coordinate=[84, 120]).replace("]}}", "],},}"), ["click(x=84, y=120)"]),
    (tool("type", text="a").replace('"', "'"), ["write(message='a')"]),
    ("<tool_call>{'arguments': {'action': 'type', 'text': 'say \"it\\'s\"'}}</tool_call>",
     ["write(message='say \"it\\'s\"')"]),
    ('<tool_call>{"arguments": "{\\"action\\": \\"wait\\", \\"time\\": 1}"}</tool_call>',
     ["wait(seconds=1)"]),
    ('{"name": "computer_use", "arguments": {"action": "wait"}}', ["wait()"]),
    ('{"action": "left_click", "coordinate": [1, 2]}', ["click(x=1, y=2)"]),
    ('```json\n{"name": "left_click", "arguments": {"coordinate": [1, 2]}}\n```', ["click(x=1, y=2)"]),
    ('<tool_call>{"action": "wait"}\n{"action": "history_back"}</tool_call>', ["wait()", "go_backward()"]),
    (tool("left_click", coordinate=[1, 2]).removesuffix("</tool_call>"), ["click(x=1, y=2)"]),
])
def test_qwen_calls(text, calls):
    for before in ("", "Thought: I see a box.\nAction: Go on.\n", "<think>Hm {x}.</think>\n\nGo on.\n"):
        action = read_qwen(before + text)
        assert said(action) == calls
        assert action.operation == ("Go on." if before else "")
    assert action.think == "Hm {x}."
    assert read_qwen("I click the box.\n" + text).think == "I click the box."


@pytest.mark.parametrize("text, complaint", [
    ('<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coord', "no JSON object"),
    ("", "no JSON object"), ("I am done.", "no JSON object"), ("<tool_call></tool_call>", "no JSON object"),
    ("<tool_call>[1, 2]</tool_call>", "no JSON object"),
    ("<tool_call>{nonsense}</tool_call>", "no JSON object"),
    ("<tool_call>{}</tool_call>", "unknown action None"), (tool("fly"), "unknown action fly"),
    (tool(["left_click"]), "unknown action ['left_click']"), (tool("web_search", query="a"), "web_search"),
    ('<tool_call>{"name": "computer_use", "arguments": [1]}</tool_call>', "no JSON object"),
    ('<tool_call>{"name": "computer_use", "arguments": "left_click"}</tool_call>', "no JSON object"),
    (tool("left_click", coordinate=[1]), "is not a point"), (tool("left_click", coordinate={}), "a number"),
    (tool("left_click", coordinate=[1, None]), "is not a point"),
    (tool("mouse_move"), "moveTo: x is missing"),
    (tool("left_click", coordinate="the box"), "is not a point"), (tool("left_click", coordinate=7), "y one"),
    (tool("left_click", coordinate=[float("nan"), 1]), "is not a point"),
    (tool("type"), "message is missing"),
    (tool("scroll"), "pixels='None' is not a number"), (tool("scroll", pixels="far"), "pixels='far'"),
    (tool("scroll", pixels=float("inf")), "is not a number"), (tool("key", keys=[]), "is not a key list"),
    (tool("wait", time=float("nan")), "is not a number"),
    (tool("terminate", status="maybe"), "is not one of"),
    (tool("wait") + tool("fly"), "unknown action fly"),
    ("<tool_call>" + '{"a": ' * 5000 + "1" + "}" * 5000 + "</tool_call>", "no JSON object"),
])
def test_qwen_names_what_is_wrong_and_then_gives_no_calls(text, complaint):
    action = read_qwen("Go on.\n" + text)
    assert complaint in action.error and not action.calls


def test_qwens_prompt_shows_calls_that_its_reader_knows():
    system = dialects.PROMPTS["qwen"]["actor_system"]
    function = json.loads(re.search(r"<tools>\n(.*)\n</tools>", system)[1])["function"]
    properties = function["parameters"]["properties"]
    values = {"coordinate": [1, 2], "text": "a", "keys": ["a"], "pixels": 100, "time": 1, "status": "success"}
    names = properties["action"]["enum"]
    assert set(properties) == {"action", *values} and set(names) < {*dialects.QWEN_ACTIONS}
    for name in names:
        assert said(read_qwen(tool(name, **values))), name
    example = re.search(r"<tool_call>\n\{.*\n</tool_call>", system)[0].replace("[x, y]", "[1, 2]")
    assert said(read_qwen(example)) == ["click(x=1, y=2)"]
    assert "{width}x{height}" in system


def test_no_reader_raises_on_any_text():
    dice = random.Random(0)
    words = ["Action:", "Thought:", "<answer>", "</answer>", "{", "}", "[", "(", "start_box=", "'", '"', ":",
             "<point>", "<tool_call>", '"action"', '"wait"', "'action'", '"arguments"', "click(",
             "scroll(", "drag(", "hotkey(key=", "99999999999", "1,2", "-1.5", "\n", ")"]
    for _ in range(3000):
        length = dice.randrange(25)
        text = "".join(dice.choice([*words, dice.choice(string.printable)]) for _ in range(length))
        for read in dialects.READERS.values():
            action = read(text)
            assert bool(action.error) != bool(action.calls)
        read_point(text)


# ----------------------------------------------------------------------------------- places and their spaces
@pytest.mark.parametrize("text, point", [
    ("<action>\nclick(x=84, y=120)\n</action>", [84, 120]), ("(84, 120)", [84, 120]),
    ("click(start_box='(84,120)')", [84, 120]), ("<point>84 120</point>", [84, 120]),
    ("<ref>Save</ref><box>[[80, 100, 88, 140]]</box>", [84, 120]), ("<point>[[84, 120]]</point>", [84, 120]),
    ('{"point_2d": [84, 120], "label": "Save"}', [84, 120]), ("pyautogui.click(x=0.25, y=0.5)", [0.25, 0.5]),
    ("At first (1, 2), rather (84, 120).", [84, 120]), ("There is no such button.", None), ("(84)", None),
])
def test_a_grounding_models_place(text, point):
    assert read_point(text) == point


@pytest.mark.parametrize("name, call, there", [
    ("image", "click(x=644, y=364)", (640, 360)), ("page", "click(x=644, y=364)", (644, 364)),
    ("0-1", "click(x=0.5, y=0.25)", (640, 180)), ("0-1", "click(x=1, y=0)", (1279, 0)),
    ("0-1000", "click(x=500, y=250)", (640, 180)), ("0-1000", "click(x=1000, y=1)", (1279, 1)),
    ("0-1000", "click(x=1, y=1)", (1, 1)),
])
def test_coordinates_of_every_convention_become_the_pages(name, call, there):
    size = dialects.space(name)((1288, 728), (1280, 720))
    (call,) = actions.parse(call).calls
    moved = actions.rescale(call, size, (1280, 720))
    assert (moved["x"], moved["y"]) == there


def test_unknown_settings_are_the_users_to_mend():
    with pytest.raises(UserError, match="--coordinates percent.*0-1000"):
        dialects.space("percent")
    with pytest.raises(UserError, match="--dialect klingon.*uitars"):
        dialects.reader("klingon")
