"""The action grammar: what parse makes of texts, the screen's coordinates, and effects in a real Chromium."""

import json
import random
import time
from pathlib import Path

import pytest

from language import actions
from language.actions import Action, ActionError, ActionSettings, Call
from web.chromium import CHROMIUM_ARGS, chromium

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


# ------------------------------------------------------------------------------------------ effects on a page
@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    context.set_default_timeout(20_000)
    yield context.new_page()
    context.close()


SITE = "http://site.test"
PAGE = """<style>body { margin: 0; height: 3000px; width: 4000px }
    body > * { position: absolute; width: 200px }</style>
<div id=box style="left:100px; top:100px; height:100px; background:#ccc"></div>
<input id=field value=old style="left:400px; top:100px">
<div id=inner style="left:100px; top:300px; height:200px; overflow:scroll">
    <div style="height:2000px; width:2000px"></div></div>
<script>
    const seen = [];
    box.addEventListener('contextmenu', e => e.preventDefault());
    for (const name of ['click', 'dblclick', 'contextmenu', 'auxclick', 'mousemove', 'mousedown', 'mouseup'])
        box.addEventListener(name, e => seen.push([name, e.clientX, e.clientY]));
    for (const name of ['keydown', 'keyup'])
        field.addEventListener(name, e => seen.push([name, e.key, e.ctrlKey]));
</script>"""


def do(page, text, **settings):
    for call in actions.parse(text).calls:
        actions.perform(call, page, ActionSettings(**settings))


def seen(page, *names):
    return [event for event in page.evaluate("seen") if event[0] in names]


def test_clicks(page):
    page.set_content(PAGE)
    do(page, "click(x=150, y=120)")
    assert seen(page, "click", "dblclick") == [["click", 150, 120]]
    do(page, "doubleClick(x=160, y=130)")
    assert seen(page, "dblclick") == [["dblclick", 160, 130]] and len(seen(page, "click")) == 3
    do(page, "rightClick(x=170, y=140)\nclick(x=180, y=150, button='middle')")
    assert seen(page, "contextmenu") == [["contextmenu", 170, 140]]
    assert seen(page, "auxclick") == [["auxclick", 170, 140], ["auxclick", 180, 150]]
    do(page, "click(x=150, y=120, clicks=40)", max_repeats=5)
    assert len(seen(page, "click")) == 3 + 5


def test_a_click_without_coordinates_is_where_the_mouse_is(page):
    page.set_content(PAGE)
    do(page, "moveTo(x=222, y=111)\nclick()\ndoubleClick()")
    assert seen(page, "mousemove", "click", "dblclick") == [
        ["mousemove", 222, 111], *[["click", 222, 111]] * 3, ["dblclick", 222, 111]]


def test_drag(page):
    page.set_content(PAGE)
    do(page, "moveTo(x=110, y=110)\ndragTo(x=210, y=160)")
    events = seen(page, "mousedown", "mousemove", "mouseup")
    assert events[1] == ["mousedown", 110, 110] and events[-1] == ["mouseup", 210, 160] and len(events) >= 8
    with pytest.raises(ActionError, match="x and y"):
        do(page, "dragTo()")
    page.set_content("""<div draggable=true>drag me</div><div style="height:300px" id=t
        ondragover="event.preventDefault()" ondrop="document.title = 'dropped'">here</div>""")
    do(page, "moveTo(x=20, y=16)\ndragTo(x=90, y=200)")
    assert page.title() == "dropped"


def test_swipe_of_the_window(page):
    page.set_content(PAGE)
    for text, position in [
            ("swipe(direction='up', amount=0.5)", [0, 360]),  # the page goes DOWN
            ("swipe(direction='left', amount=7)", [1280, 360]), ("swipe(direction='right')", [640, 360]),
            ("swipe(direction='down', amount=0.25)", [640, 180]), ("swipe(to_coord=[5, 5])", [640, 540])]:
        do(page, text)
        assert page.evaluate("[Math.round(scrollX), Math.round(scrollY)]") == position


def test_swipe_and_scroll_of_an_inner_container(page):
    page.set_content(PAGE)
    for text, position in [
            ("scroll(-3, x=200, y=400)", [0, 300, 0, 0]), ("scroll(clicks=1)", [0, 200, 0, 0]),
            ("swipe(from_coord=[900, 600], to_coord=[900, 300])", [0, 200, 0, 300]),
            ("swipe(from_coord=[200, 150], to_coord=[150, 0])", [50, 350, 0, 300]),
            ("swipe(from_coord=[200, 150], direction='up', amount=0.5)", [50, 710, 0, 300])]:
        do(page, text)  # the wheel's effect comes some frames later
        page.wait_for_function("at => [inner.scrollLeft, inner.scrollTop, scrollX, scrollY].join() == at",
                               arg=",".join(map(str, position)))


def test_press(page):
    page.set_content(PAGE)
    page.focus("#field")
    do(page, "press(keys='END')\npress(keys='BackSpace', presses=2)")
    assert page.input_value("#field") == "o"
    do(page, "press(keys=['a', 'B'], presses=2)")
    assert page.input_value("#field") == "oaBaB"
    do(page, "press('Page Down')\npress('esc')\npress(keys='ctrl')\npress(' ')\npress('5')\npress('+')")
    assert [e[1] for e in seen(page, "keydown")][-6:] == ["PageDown", "Escape", "Control", " ", "5", "+"]
    do(page, "press(keys='x', presses=99)", max_repeats=3)
    assert page.input_value("#field").endswith("+xxx")
    with pytest.raises(ActionError, match="unknown key 'hyper'"):
        do(page, "press(keys=['z', 'hyper'])")
    assert not page.input_value("#field").endswith("z")  # nothing was pressed


def test_every_key_of_the_map_is_known_to_playwright(page):
    for key in [*actions.KEYS, *map(chr, range(33, 127))]:
        page.keyboard.down(actions.key_name(key))
        page.keyboard.up(actions.key_name(key))


@pytest.mark.parametrize("text", ["hotkey('Ctrl', 'A')", "hotkey('ctrl+a')", "hotkey('Ctrl-A')",
                                  "hotkey(['CONTROL', 'a'])", "keyDown('ctrl')\npress('a')\nkeyUp('Ctrl')"])
def test_hotkey_is_down_in_order_and_up_in_reverse(page, text):
    page.set_content(PAGE)
    page.focus("#field")
    do(page, text)
    assert seen(page, "keydown", "keyup") == [["keydown", "Control", True], ["keydown", "a", True],
                                              ["keyup", "a", True], ["keyup", "Control", False]]
    do(page, "write('new')")
    assert page.input_value("#field") == "new"  # everything had been selected


def test_write(page):
    page.set_content(PAGE)
    do(page, "click(x=430, y=110)\npress('end')\nwrite(message=' & é漢')")
    assert page.input_value("#field") == "old & é漢"
    do(page, "write(message='only this')", clear_before_write=True)
    assert page.input_value("#field") == "only this"
    page.set_content("<form onsubmit='document.title = 1; return false'><input></form><textarea></textarea>")
    do(page, "press('tab')\nwrite('a\\n')\npress('tab')\nwrite('a\\nb')")
    assert page.title() == "1" and page.input_value("textarea") == "a\nb"


SELECT = f"""<style>body {{ margin: 0 }} body > * {{ position: absolute }}</style>
<select id=s style="left:100px; top:TOPpx; width:150px; height:30px">
{"".join(f"<option>o{i}</option>" for i in range(40))}</select><button style="left:600px">b</button>
<select id=o style="left:400px"><option>x</select>"""


def height(page):
    return round(page.locator("#s").bounding_box()["height"])


def test_a_clicked_select_shows_its_options_and_closes_after_the_choice(page):
    page.set_content(SELECT.replace("TOP", "50"))
    style, below = page.get_attribute("#s", "style"), {"x": 100, "y": 100, "width": 150, "height": 200}
    before = page.screenshot(clip=below)
    do(page, "click(x=150, y=65)")
    box = page.locator("#s").bounding_box()
    assert box == {"x": 100, "y": 50, "width": 150, "height": box["height"]} and box["height"] > 400
    assert page.evaluate("s.size") == 30 and page.screenshot(clip=below) != before
    do(page, f"click(x=150, y={round(50 + box['height'] * 3.5 / 30)})")
    assert page.input_value("#s") == "o3"
    assert page.get_attribute("#s", "style") == style and page.get_attribute("#s", "size") is None


def test_a_shown_select_stays_in_the_window_and_closes_when_left(page):
    page.set_content(SELECT.replace("TOP", "680"))
    do(page, "click(x=150, y=695)")
    box = page.locator("#s").bounding_box()
    assert 0 <= box["y"] and box["y"] + box["height"] <= 720 and box["height"] > 400
    do(page, "click(x=610, y=10)")
    assert height(page) == 30 and page.input_value("#s") == "o0"
    do(page, "click(x=150, y=695)\npress('down')")
    assert height(page) == 30 and page.input_value("#s") == "o1"
    page.set_viewport_size({"width": 320, "height": 214})
    page.set_content(SELECT.replace("TOP", "100"))
    do(page, "click(x=150, y=115)")
    box = page.locator("#s").bounding_box()
    assert 0 <= box["y"] and box["y"] + box["height"] <= 214 and box["height"] > 150


@pytest.mark.parametrize("change, settings", [
    ("", {"show_select": False}), ("s.disabled = true", {}), ("s.multiple = true", {}), ("s.size = 4", {}),
    ("s.onmousedown = e => e.preventDefault(); o.focus()", {})])
def test_other_selects_are_left_alone(page, change, settings):
    page.set_content(SELECT.replace("TOP", "50"))
    page.evaluate(f"() => {{ {change} }}")
    size = page.evaluate("s.size")
    do(page, "click(x=150, y=65)", **settings)
    assert page.evaluate("[s.size, o.size]") == [size, 0] and height(page) == 30


def test_wait_is_bounded(page):
    start = time.perf_counter()
    do(page, "wait(seconds=0.3)")
    assert time.perf_counter() - start >= 0.3
    do(page, "wait(seconds=60)\nwait(-5)", max_wait=0.2)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("text", ["call_user()", "open_app('Maps')", "navigate_home()", "long_press(1, 2)"])
def test_what_a_browser_cannot_do_is_an_action_error(page, text):
    do(page, "response('a')\nterminate()")  # no effect, no error
    with pytest.raises(ActionError, match="cannot be done in a browser"):
        do(page, text)


@pytest.fixture
def web(page):
    """The page on a web of its own: SITE has any page but /slow, which never answers; all else is refused."""
    def answer(route):
        if not route.request.url.startswith(SITE):
            route.abort("blockedbyclient")
        elif not route.request.url.endswith("/slow"):
            route.fulfill(content_type="text/html", body=f"<title>{route.request.url}</title>")
    page.route("**/*", answer)
    return page


def test_open_url_back_and_forward(web):
    do(web, f"open_url('{SITE}/a')\nopen_url('site.test/b')")
    assert web.title() == f"{SITE}/b"
    do(web, "go_backward()")
    web.wait_for_url(f"{SITE}/a")
    do(web, "go_forward()")
    web.wait_for_url(f"{SITE}/b")


@pytest.mark.parametrize("url, reason", [
    ("http://elsewhere.test/", "net::ERR_BLOCKED_BY_CLIENT"), ("http://[", "invalid URL"),
    ("file:///etc/passwd", "not an http address"), ("http://", "not an http"), ("script:a()", "open_url")])
def test_a_refused_open_url_is_an_action_error(web, url, reason):
    with pytest.raises(ActionError, match=reason):
        do(web, f"open_url('{url}')")
    if "net::" in reason:
        web.wait_for_url("chrome-error://**")  # comes a little later and would stop the next open_url
    do(web, f"open_url('{SITE}/b')")
    assert web.title() == f"{SITE}/b"


def test_playwrights_own_errors_pass_through(web):
    from playwright.sync_api import Error, TimeoutError
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        do(web, f"open_url('{SITE}/slow')", timeout=0.5)
    assert time.perf_counter() - start < 15
    web.close()
    with pytest.raises(Error):
        do(web, "click(x=1, y=2)")
