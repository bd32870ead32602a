"""What actions do to a page, in a real Chromium."""

import time

import pytest

from language import actions
from language.actions import ActionError
from web import effects
from web.effects import ActionSettings

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
        effects.perform(call, page, ActionSettings(**settings))


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
    do(page, "middleClick(x=190, y=160)")
    assert seen(page, "auxclick")[-1] == ["auxclick", 190, 160]
    page.set_content("<p>one two. three</p><p>four</p>")
    do(page, "tripleClick(x=20, y=25)")
    assert page.evaluate("getSelection().toString().trim()") == "one two. three"


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
    for key in [*effects.KEYS, *map(chr, range(33, 127))]:
        page.keyboard.down(effects.key_name(key))
        page.keyboard.up(effects.key_name(key))


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


# what a page may do with a select that is about to open -> where the click finds it
MOVES = {
    "pushed down by its focus": "<style>#s:focus { margin-top: 120px }</style>@",
    "pushed down by what appears above": "<div id=above></div>@<script>s.addEventListener('mousedown', () => "
                                         "{ above.style.height = '150px' })</script>",
    "moved away": "@<script>s.addEventListener('focus', () => "
                  "{ s.style.transform = 'translate(400px, 300px)' })</script>",
    "scrolled": "<div style='height:900px'></div>@<div style='height:900px'></div><script>scrollTo(0, 700);"
                "s.addEventListener('focus', () => scrollTo(0, 850))</script>",
    "centred in a row": "<div style='display:flex; justify-content:center; gap:99px'><p>a</p>@<p>b</p></div>",
    "in a clipped box": "<div style='position:relative; overflow:hidden; height:25px'>@</div>",
    "in a box that is the measure": "<div style='transform:translate(90px, 70px)'>@</div>",
    "with rules of its own": "<style>select { margin: 20px !important; height: 22px !important;"
                             "max-height: 22px; position: static !important; transition: all 9s }</style>@",
    "in a shadow root": "<div id=host></div><script>host.attachShadow({mode: 'open'}).innerHTML = `@`;"
                        "</script>",
    "in a frame": "<iframe id=f style='margin:40px; width:500px; height:600px' srcdoc=\"@\"></iframe>",
}
FIND = """() => window.s || (window.host ? host.shadowRoot : f.contentDocument).querySelector('select')"""


@pytest.mark.parametrize("kind", MOVES)
def test_a_select_is_shown_wherever_its_opening_moves_it(page, kind):
    options = "".join(f"<option>o{i}</option>" for i in range(20))
    page.set_content("<!doctype html>" + MOVES[kind].replace("@", f"<select id=s>{options}</select>"))
    page.wait_for_function(f"({FIND})()?.options.length === 20")
    select = page.evaluate_handle(FIND).as_element()
    box = select.bounding_box()
    do(page, f"click(x={box['x'] + 15}, y={box['y'] + 8})")
    box = select.bounding_box()
    assert select.evaluate("s => s.size") == 20 and box["height"] > 250
    assert box["x"] >= 0 and box["y"] >= 0 and box["y"] + box["height"] <= 720
    do(page, f"click(x={box['x'] + 15}, y={box['y'] + box['height'] * 12.5 / 20})")
    assert select.evaluate("s => [s.value, s.size]") == ["o12", 0]
    assert select.evaluate("s => s.getAttribute('style')") == (None if kind != "moved away" else
                                                               "transform: translate(400px, 300px);")


def test_a_select_that_its_click_removes_or_disables_is_left_alone(page):
    for change in ("s.remove()", "s.disabled = true", "s.replaceWith(s.cloneNode(true))"):
        page.set_content(SELECT.replace("TOP", "50"))
        page.evaluate(f"s.addEventListener('mousedown', () => {{ {change} }})")
        do(page, "click(x=150, y=65)")
        assert page.locator("select").evaluate_all("found => found.every(s => s.size === 0)")


def test_wait_is_bounded(page):
    start = time.perf_counter()
    do(page, "wait(seconds=0.3)")
    assert time.perf_counter() - start >= 0.3
    do(page, "wait(seconds=60)", max_wait=0.2)
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
