"""The action grammar: what parse makes of texts, and the screen's coordinates."""

import json
import random
import time
from pathlib import Path

import pytest

from language import actions
from language.actions import Action, Call

RECORDS = Path(__file__).resolve().parents[3] / "shared/data/scalecua/sft/readme_sample.jsonl"


# ---------------------------------------------------------------------------------------------- text -> calls
TEXTS = [  # (what a model wrote, the canonical calls it means)
    # as ScaleCUA's agent writes them
    ("click(644, 364)", ["click(x=644, y=364)"]),
    ("swipe(from_coord=[640, 5], to_coord=[640, 9])", ["swipe(from_coord=[640, 5], to_coord=[640, 9])"]),
    ("swipe((640, 5), (640, 9))", ["swipe(from_coord=[640, 5], to_coord=[640, 9])"]),
    ("press(keys='enter', presses=3)", ["press(keys='enter', presses=3)"]),
    ("press(keys='Enter')", ["press(keys='Enter')"]), ("hotkey('ctrl', 'a')", ["hotkey('ctrl', 'a')"]),
    ("hotkey(args=['ctrl','a'])", ["hotkey('ctrl', 'a')"]), ("hotkey(['ctrl','a'])", ["hotkey('ctrl', 'a')"]),
    ('write("x")', ["write(message='x')"]), ("response('42')", ["response(answer='42')"]),
    ("answer('42')", ["response(answer='42')"]), ("answer(answer='42')", ["response(answer='42')"]),
    ("response(answer=42)", ["response(answer='42')"]), ("write(message='a\nb')", [r"write(message='a\nb')"]),
    ("scroll(-3)", ["scroll(clicks=-3)"]), ("open_url('http://a.b/c')", ["open_url(url='http://a.b/c')"]),
    ("go_backward()", ["go_backward()"]), ("call_user()", ["call_user()"]),
    ("keyDown('shift')", ["keyDown(key='shift')"]),
    ("click(x=1,y=2); click(x=3,y=4)", ["click(x=1, y=2)", "click(x=3, y=4)"]),
    ("click(x=1,y=2) click(x=3,y=4)", ["click(x=1, y=2)", "click(x=3, y=4)"]),
    ("click(x=1,y=2), click(x=3,y=4)", ["click(x=1, y=2)", "click(x=3, y=4)"]),
    ("[click(x=1,y=2), wait()]", ["click(x=1, y=2)", "wait()"]),
    ("terminate(status='success', info=None)", ["terminate(status='success', info=None)"]),
    ("pyautogui.click(x=1, y=2)", ["click(x=1, y=2)"]), ("click(x=0.5, y=0.25)", ["click(x=0.5, y=0.25)"]),
    ("click(x=5, y=6", ["click(x=5, y=6)"]),
    ("press(keys=['tab', 'enter'\nwait()", ["press(keys=['tab', 'enter'])", "wait()"]),
    ("write(message='it's 5 o'clock')\nwait()", ['write(message="it\'s 5 o\'clock")', "wait()"]),
    ('response("the "best" (one)")', ["response(answer='the \"best\" (one)')"]),
    ("write(message='f('x') is\nit')", [r"""write(message="f('x') is\nit")"""]),
    # as ScaleCUA's training data has them
    ("terminate(status='fail')", ["terminate(status='failure')"]),
    ("terminate('failed', info='it's gone')", ['terminate(status=\'failure\', info="it\'s gone")']),
    ("write(message=8)", ["write(message='8')"]), ("wait(seconds='2')", ["wait(seconds=2)"]),
    ("press(keys=1)", ["press(keys='1')"]), ("click(x='644', y='36.5')", ["click(x=644, y=36.5)"]),
    ("click(1, 2, clicks=40)", ["click(x=1, y=2, clicks=40)"]), ("click(-3, 5000)", ["click(x=-3, y=5000)"]),
    ("moveTo(x=1284, y=733)", ["moveTo(x=1284, y=733)"]), ("hotkey(keys=['a', 'b'])", ["hotkey('a', 'b')"]),
    ("swipe(direction='up', amount=0.7)", ["swipe(direction='up', amount=0.7)"]),
    ("write('a\nb', interval=0.1)", [r"write(message='a\nb')"]),
    ("open_app(app_name='Cantook')", ["open_app(app_name='Cantook')"]),
    ("long_press(0.5, 0.5)", ["long_press(x=0.5, y=0.5)"]),
    ("select_option(x=1, y=2, value='b')", ["select_option(x=1, y=2, value='b')"]),
    # others
    ("click([84, 120])", ["click(x=84, y=120)"]), ("double_click(84, 120)", ["doubleClick(x=84, y=120)"]),
    ("Click(X=84, Y=120, button='LEFT')", ["click(x=84, y=120, button='left')"]),
    ("click(\n    x=84,  # the box\n    y=120,\n)", ["click(x=84, y=120)"]),
    ("write('''a\nb''')", [r"write(message='a\nb')"]), ("press(keys=enter)", ["press(keys='enter')"]),
    ("write(text='a', interval=0.1)", ["write(message='a')"]), ("click(x=1, y=2))", ["click(x=1, y=2)"]),
    (r"write('C:\Users\data')", [r"write(message='C:\\Users\\data')"]),
    ("terminate('failure', ')#, info=')", ["terminate(status='failure', info=')#, info=')"]),
    ("write('a # b; c) d')  # a remark", ["write(message='a # b; c) d')"]),
    ("write('</think> <b>')", ["write(message='</think> <b>')"]),
    ("First the box.\n1. click(x=1, y=2)\nThen done (hopefully).", ["click(x=1, y=2)"]),
    ("# click(x=9, y=9)\nclick(x=1, y=2).", ["click(x=1, y=2)"]),
    ("Action: `click(x=1, y=2)`", ["click(x=1, y=2)"]), ("click(x=1, y=2)<|im_end|>", ["click(x=1, y=2)"]),
    ("def act():\n    pass\nclick(x=1, y=2)", ["click(x=1, y=2)"]),
    # as people's models and AgentNet's records have them
    ("tripleClick(x=5, y=6)", ["tripleClick(x=5, y=6)"]), ("triple_click([5, 6])", ["tripleClick(x=5, y=6)"]),
    ("computer.tripleClick(x=0.5, y=0.25)", ["tripleClick(x=0.5, y=0.25)"]),
    ("computer.triple_click(x=5, y=6)\ncomputer.wait()", ["tripleClick(x=5, y=6)", "wait()"]),
    ("computer.terminate(status='success')", ["terminate(status='success')"]),
    ("pyautogui.middleClick(5, 6)", ["middleClick(x=5, y=6)"]), ("leftClick(5, 6)", ["click(x=5, y=6)"]),
    ("pyautogui.hscroll(-3)", ["hscroll(clicks=-3)"]), ("vscroll(2, 5, 6)", ["scroll(clicks=2, x=5, y=6)"]),
    ("pyautogui.typewrite('it's')", ['write(message="it\'s")']),
    ("click(x=[10, 20, 30, 40])", ["click(x=20, y=30)"]), ("click([10, 20, 31, 40])", ["click(x=20, y=30)"]),
    ("rightClick(x=(0.25, 0.5, 0.75, 1.0))", ["rightClick(x=0.5, y=0.75)"]),
    ("moveTo([[10, 20], [30, 40]])", ["moveTo(x=20, y=30)"]),
    ("click(bbox=[1, 2, 3, 4])", ["click(x=2, y=3)"]),
    ("click(x=[10, 20, 30, 40], y=None, clicks=2)", ["click(x=20, y=30, clicks=2)"]),
    ("swipe(from_coord=[0, 0, 20, 40], to_coord=['5', '6'])",
     ["swipe(from_coord=[10, 20], to_coord=[5, 6])"]),
]


@pytest.mark.parametrize("text, calls", TEXTS)
def test_parse_reads_every_form_with_and_without_tags(text, calls):
    for whole in (text, f"<action>{text}</action>", f"<action>\n{text}\n", f"So:\n```python\n{text}\n```\nX"):
        action = actions.parse(whole)
        assert (action.error, [actions.format_call(c) for c in action.calls]) == ("", calls), whole


@pytest.mark.parametrize("text, complaint", [
    ("", "no action"), ("Who knows.", "no action in 'Who knows.'"), ("<action></action>", "no action"),
    ("fly(x=1)", "unknown action fly"), ("click(x=1, y=2)\nfly()", "unknown action fly"),
    ("click(x=0.4)", "click: of x and y one is missing"), ("moveTo(3)", "moveTo: y is missing"),
    ("press()", "press: keys is missing"), ("scroll(x=1, y=2)", "scroll: clicks is missing"),
    ("click(x='left', y=2)", "click: x='left' is not a number"), ("click(x=True, y=2)", "is not a number"),
    ("click(x=1e999, y=2)", "is not a number"), ("click(x=nan, y=2)", "is not a number"),
    ("wait(nan)", "seconds='nan' is not a number"), ("wait(seconds=-inf)", "is not a plain value"),
    ("wait(1e9)", "is not a number"), ("scroll(float('nan'))", "is not a plain value"),
    ("scroll(clicks=1e999)", "is not a number"), ("hscroll('-Infinity')", "is not a number"),
    ("swipe(direction='up', amount='NaN')", "amount='NaN' is not a number"),
    ("swipe(amount=inf)", "is not a number"),
    ("press('a', presses=-2)", "presses='-2' is not a count"), ("press('a', presses=1e7)", "is not a count"),
    ("click(x=[1, 2, 3])", "x='[1, 2, 3]' is not a point"), ("click(x=[1, 2, 3, 4], y=5)", "is not a number"),
    ("click(x=[[1, 2], 'a'])", "is not a point"), ("click(x='12')", "of x and y one is missing"),
    ("click(1, 2, clicks=0)", "clicks='0' is not a count"), ("press(keys=[])", "keys='[]' is not a keys"),
    ("swipe('up')", "from_coord='up' is not a point"), ("click(1, 2, button=7)", "is not one of left"),
    ("swipe(direction='sideways')", "is not one of up, down, left, right"),
    ("rightClick(1, 2, 3)", "3 arguments where it takes 2"), ("click(x=1+a, y=2)", "is not a plain value"),
    ("click(x=1, y=2, colour='red')", "unknown argument colour"),
    ("write(message='half a sent", "cannot read \"write(message='half a sent\""),
    ("write(message='abc)\nwrite(message='def')", "cannot read"),
    ("click(x=1, y=2) is what I would do", "cannot read"),
])
def test_parse_names_what_is_wrong_and_then_gives_no_calls(text, complaint):
    action = actions.parse(text)
    assert complaint in action.error and action.calls == ()


def test_parse_keeps_thought_and_operation_apart_from_the_action():
    text = "<think>\nOr click(x=9, y=9), or <action>wait()</action>?\n</think>\n<operation>\nClick 'Save'\n"
    closed = text + "</operation>\n<action>\nclick(x=1, y=2)\n</action>"
    expected = Action((Call("click", {"x": 1, "y": 2}),), "Click 'Save'",
                      "Or click(x=9, y=9), or <action>wait()</action>?", "")
    assert actions.parse(closed) == expected
    assert actions.parse(text + "<action>click(x=1, y=2") == expected
    unclosed = actions.parse("<think> hm <operation>op</operation><action>wait()</action>")
    assert (unclosed.think, unclosed.operation, unclosed.calls) == ("hm", "op", (Call("wait", {}),))
    assert actions.parse("<operation>wait()</operation>").error.startswith("no action")
    for block in ("<action>go_backward()", "```python\ngo_backward()\n```\nwait()"):  # and nothing around it
        assert actions.parse(f"wait()\n{block}").calls == (Call("go_backward", {}),)


def test_parse_never_raises_and_is_fast_on_hostile_texts():
    rng = random.Random(0)
    pieces = ["click(", "write('", ")", "(", "'", '"', "\\", "\n", ",", "x=", "1e999", "9" * 5000, "é", "\0",
              "<action>", "</action>", "<think>", "```", "[", "]", "{", "**{}", "*a", "'''", "\\N{", "\ud800"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(40))) for _ in range(2000)]
    texts += ["click(" * 3000, "write('" + ")\n" * 5000, "click(x=" + "-" * 20000 + "1)", "<think>" * 3000,
              "(" * 20000, "write('" + "a'\n" * 3000, "click(x=" + "[" * 3000]
    start = time.perf_counter()
    for text in texts:
        action = actions.parse(text)
        assert bool(action.error) != bool(action.calls)
    assert time.perf_counter() - start < 20


def random_call(rng):
    """A call of the grammar with random arguments; texts are full of what has to be escaped."""
    def text():
        signs = "ab 'é\"\\\n\t\r()[]<>,;=#{}\0\u2028\U0001f600\U0010ffff"
        return "".join(rng.choices(signs, k=rng.randrange(12)))

    def number():
        return rng.choice([rng.randrange(-5, 2000), round(rng.random(), 4), 1e-07])
    makers = {actions.as_number: number, actions.as_text: text, actions.as_count: lambda: rng.randrange(1, 9),
              actions.as_point: lambda: [number(), number()],
              actions.as_keys: lambda: rng.choice([text(), [text(), text()]]),
              actions.as_key_list: lambda: [text() for _ in range(rng.randrange(1, 4))]}
    name = rng.choice(list(actions.SIGNATURES))
    args = {}
    for param, (kind, default) in actions.SIGNATURES[name].items():
        if default is actions.REQUIRED or rng.random() < 0.5:
            args[param] = makers[kind]() if callable(kind) else rng.choice(kind)
    if "y" in actions.SIGNATURES[name] and ("x" in args) != ("y" in args):
        args |= {"x": 7, "y": 0.5}
    return Call(name, args)


def test_round_trip_of_random_calls():
    rng = random.Random(1)
    calls = [random_call(rng) for _ in range(2000)]
    for call in calls:
        assert actions.parse(actions.format_call(call)) == Action((call,), "", "", "")
    for pair in zip(calls[::2], calls[1::2]):
        text = "\n".join(map(actions.format_call, pair))
        assert actions.parse(f"<operation>o</operation><action>{text}</action>").calls == pair


def test_parse_real_training_records():
    if not RECORDS.exists():
        pytest.skip(f"{RECORDS} is not here")
    records = map(json.loads, RECORDS.read_text("utf-8").splitlines())
    first, second = (actions.parse(record["conversations"][1]["value"]) for record in records)
    assert first.calls == (Call("open_app", {"app_name": "Cantook"}),) and first.error == ""
    assert first.operation.startswith("Open the Cantook app") and first.think.startswith("Based on the")
    assert second.calls == (Call("click", {"x": 0.3674, "y": 0.9192}),) and second.error == ""
    assert second.operation.startswith("Click on the 'My Books' tab") and second.operation.endswith("library")
    assert actions.rescale(second.calls[0], (1, 1), (1440, 3120)).args == {"x": 529, "y": 2868}


def test_call_adds_defaults_without_keeping_them():
    call = Call("click", {"x": 1, "y": 2})
    assert (call["x"], call["clicks"], call["button"]) == (1, 1, "left") and call.args == {"x": 1, "y": 2}


def test_final_calls_and_the_answer():
    def said(*texts):
        return actions.answer([c for t in texts for c in actions.parse(t).calls])
    assert [n for n in actions.SIGNATURES if actions.is_final(Call(n, {}))] == ["response", "terminate"]
    assert said("response('a')", "wait()", "response('b')", "terminate(info='c')") == "b"
    assert said("terminate('success', 'c')") == "c"
    assert said("response(answer=None)", "terminate(info='c')") == ""
    assert said("terminate(status='success', info=None)") == "" and said() == ""


# ------------------------------------------------------------------------------------------------ coordinates
@pytest.mark.parametrize("size, resized", [
    ((1280, 720), (1288, 728)), ((1920, 1080), (1932, 1092)), ((2560, 1440), (1932, 1064)),
    ((42, 70), (56, 56)),  # 1.5 and 2.5 factors: both halves go to the even multiple, 2
    ((28, 28), (56, 56)), ((100, 9), (196, 28)), ((3120, 1440), (2128, 980)), ((5600, 28), (5600, 28)),
])
def test_smart_resize_values(size, resized):
    assert actions.smart_resize(*size) == resized


def test_smart_resize_limits():
    assert actions.smart_resize(1920, 1080, max_pixels=2007040) == (1876, 1036)
    assert actions.smart_resize(1920, 1080, max_pixels=1003520) == (1316, 728)
    assert actions.smart_resize(100, 100, factor=32) == (96, 96)
    for size in ((5601, 28), (28, 5601), (0, 10)):
        with pytest.raises(ValueError):
            actions.smart_resize(*size)


def test_smart_resize_agrees_with_transformers():
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    except ImportError as e:
        pytest.skip(f"transformers has no PIL processor here: {e}")
    rng = random.Random(2)
    for _ in range(3000):
        width, height = rng.randrange(20, 4000), rng.randrange(20, 4000)
        theirs = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=2109744)
        assert actions.smart_resize(width, height) == theirs[::-1]


def test_rescale_both_ways_and_clamped():
    model, page = (1288, 728), (1280, 720)
    assert actions.rescale(Call("click", {"x": 644, "y": 364, "clicks": 2}), model, page) == \
        Call("click", {"x": 640, "y": 360, "clicks": 2})
    assert actions.rescale(Call("click", {"x": 640, "y": 360}), page, model).args == {"x": 644, "y": 364}
    swipe = Call("swipe", {"from_coord": [644, 728], "to_coord": [-4, 9999]})
    assert actions.rescale(swipe, model, page).args == {"from_coord": [640, 719], "to_coord": [0, 719]}
    assert swipe.args["to_coord"] == [-4, 9999]  # the input is as it was
    for x in range(0, 1280, 7):
        there = actions.rescale(Call("moveTo", {"x": x, "y": x % 720}), page, model)
        assert actions.rescale(there, model, page).args == {"x": x, "y": x % 720}


def test_rescale_of_fractions():
    for src in ((1, 1), (1288, 728)):  # recognised whatever the source
        assert actions.rescale(Call("moveTo", {"x": 0.5, "y": 1}), src, (640, 9)).args == {"x": 320, "y": 8}
    pixels, relative = Call("click", {"x": 320, "y": 90}), Call("click", {"x": 0.25, "y": 0.125})
    assert actions.rescale(pixels, (1280, 720), (1, 1)) == relative
    assert actions.rescale(Call("click", {"x": 1, "y": 0}), (1, 1), (1280, 720)).args == {"x": 1279, "y": 0}
    for fraction, points in ((True, [(0.5, 0), (1.0, 1.0)]), (False, [(1, 0), (0.5, 2), (None, None)])):
        assert {actions.is_fraction(Call("click", {"x": x, "y": y})) for x, y in points} == {fraction}
    assert actions.is_fraction(Call("swipe", {"from_coord": [0.5, 0.5], "to_coord": [0.5, 0.1]}))
    assert not actions.is_fraction(Call("swipe", {"from_coord": [0.5, 0.5], "to_coord": [0.5, 300]}))
    for call in (Call("swipe", {"direction": "up"}), Call("click", {"x": None, "y": None}), Call("wait", {})):
        assert actions.rescale(call, (1288, 728), (1280, 720)) == call
