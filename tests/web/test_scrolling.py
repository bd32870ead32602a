"""What scrolls where an action says so, and what the agent is told where nothing does."""

import pytest

from language import actions
from language.actions import ActionError
from web import effects

LONG = "<div style=height:5000px;width:5000px>long</div>"
DOWN, UP = "swipe(direction='up', amount=0.5)", "swipe(direction='down', amount=0.5)"  # the finger's way
RIGHT, LEFT = "swipe(direction='left', amount=0.5)", "swipe(direction='right', amount=0.5)"
BOX = "position:absolute; overflow:auto;"
APP = f"""<!doctype html><body style="margin:0; height:100vh; overflow:hidden">
    <main id=s style="height:100vh; overflow:auto">{LONG}</main>"""


def note(page, text):
    """Do one action; what the agent is told about it."""
    call, = actions.parse(text).calls
    return effects.perform(call, page)


def at(page, expression="s"):
    """Scroll position of an element."""
    return page.evaluate(f"(e => [e.scrollLeft, e.scrollTop].map(Math.round))({expression})")


def window_at(page):
    return page.evaluate("[scrollX, scrollY].map(Math.round)")


@pytest.mark.parametrize("text, position", [
    (DOWN, [0, 360]), (RIGHT, [640, 0]), ("scroll(-3)", [0, 300]), ("hscroll(2)", [200, 0]),
    ("scroll(clicks=-1000000)", [0, 4280])])
def test_without_a_place_the_pages_inner_scroller_scrolls(page, text, position):
    page.set_content(APP)
    assert note(page, text) == "" and at(page) == position and window_at(page) == [0, 0]


def test_the_window_goes_first_then_what_lies_under_the_middle(page):
    page.set_content(f"""<!doctype html><body style="margin:0; height:1000px">
        <div style="{BOX} position:fixed; left:400px; top:200px; width:400px; height:300px" id=s>{LONG}</div>
        <div style="{BOX} left:0; top:0; width:300px; height:900px" id=other>{LONG}</div>""")
    for text, window, middle in [(DOWN, 280, 0), (DOWN, 280, 360), ("scroll(-1)", 280, 460),
                                 (UP, 0, 460), (UP, 0, 100), ("scroll(1)", 0, 0)]:
        assert note(page, text) == "" and (window_at(page)[1], at(page)[1]) == (window, middle), text
    assert note(page, DOWN) == "" and window_at(page)[1] == 280  # and so on


def test_where_the_middle_has_none_the_largest_scroller_that_is_in_sight_scrolls(page):
    page.set_content(f"""<!doctype html><body style="margin:0; overflow:hidden">
        <nav style="{BOX} left:0; top:0; width:150px; height:700px" id=small>{LONG}</nav>
        <div style="{BOX} left:900px; top:0; width:380px; height:700px" id=s>{LONG}</div>
        <div style="{BOX} left:-3000px; top:0; width:2900px; height:700px" id=away>{LONG}</div>""")
    assert note(page, DOWN) == "" and (at(page), at(page, "small")) == ([0, 360], [0, 0])
    page.evaluate("s.scrollTop = 1e6")
    assert note(page, DOWN) == "" and at(page, "small") == [0, 360] and at(page, "away") == [0, 0]


def test_what_a_fixed_layer_covers_does_not_scroll(page):
    page.set_content(APP + "<div style='position:fixed; inset:0; background:#0003'><p>Accept?</div>")
    assert "nothing on the page" in note(page, DOWN) and at(page) == [0, 0]
    page.set_content(APP.replace("long</div>", "<div style='position:fixed; inset:0'>Accept?</div></div>"))
    assert "nothing on the page" in note(page, DOWN) and at(page) == [0, 0]


@pytest.mark.parametrize("text, way", [(UP, "up"), ("scroll(2)", "up"), (LEFT, "left"),
                                       ("scroll(2, x=640, y=300)", "up")])
@pytest.mark.parametrize("content", [APP, f"<body style='margin:0'>{LONG}"])
def test_the_end_of_the_page_is_told(page, content, text, way):
    page.set_content(content)
    where = "there" if "x=" in text else "on the page"
    assert note(page, text) == f"{text.split('(')[0]}: nothing {where} scrolls further {way}"


def test_an_end_that_is_reached_is_told_the_next_time(page):
    page.set_content(APP.replace("height:5000px", "height:800px"))
    assert note(page, DOWN) == "" and at(page) == [0, 80]
    assert note(page, DOWN) == "swipe: nothing on the page scrolls further down" and note(page, UP) == ""


@pytest.mark.parametrize("head, across, down", [
    ("<!doctype html><body style='overflow:hidden'>", False, False),
    ("<!doctype html><body style='overflow-x:hidden'>", False, True),
    ("<!doctype html><html style='overflow:hidden'>", False, False),
    ("<!doctype html><html style='overflow-y:clip; overflow-x:auto'>", True, False),
    ("<body style='overflow:hidden'>", False, False), ("<body>", True, True)])
def test_a_window_without_scroll_bars_stays_where_it_is(page, head, across, down):
    page.set_content(head + LONG)
    assert (note(page, DOWN) == "") == down == bool(window_at(page)[1])
    assert (note(page, RIGHT) == "") == across == bool(window_at(page)[0])


SHADOW = """<!doctype html><body style="margin:0"><x-app>INSIDE</x-app><script>
    const shadow = document.querySelector('x-app').attachShadow({mode: 'open'});
    shadow.innerHTML = `<div style="height:100vh; overflow:auto">SHADOW</div>`;
    const s = shadow.firstChild;</script>"""


@pytest.mark.parametrize("content", [
    SHADOW.replace("SHADOW", LONG),
    SHADOW.replace("INSIDE", LONG).replace("SHADOW", "<slot></slot>")])
def test_a_scroller_in_a_shadow_root_scrolls(page, content):
    page.set_content(content)
    assert note(page, DOWN) == "" and at(page) == [0, 360]
    assert note(page, "scroll(-1, x=300, y=300)") == "" and "left" in note(page, LEFT)
    page.wait_for_function("s.scrollTop === 460")


def test_a_frame_of_the_pages_own_site_scrolls(page):
    page.set_content(f"""<!doctype html><body style="margin:0; overflow:hidden">
        <iframe id=f style="position:absolute; left:300px; top:50px; width:700px; height:600px; border:9px
        solid" srcdoc="<body style='margin:0'>{LONG}"></iframe>""")
    page.wait_for_function("f.contentDocument.body.innerText === 'long'")
    inside = "f.contentDocument.documentElement"
    assert note(page, DOWN) == "" and at(page, inside) == [0, 360]
    assert note(page, "scroll(1, x=500, y=300)") == ""
    page.wait_for_function("f.contentWindow.scrollY === 260")
    assert note(page, "scroll(1, x=100, y=300)") == "scroll: nothing there scrolls further up"
    page.evaluate("f.style.left = '-600px'")  # no more under the middle, yet the largest
    assert note(page, UP) == "" and at(page, inside) == [0, 0] and "further up" in note(page, UP)


def test_a_frame_of_another_site_is_scrolled_by_the_wheel_and_nothing_is_claimed(page):
    pages = {"http://site.test/": """<!doctype html><body style="margin:0; overflow:hidden">
        <iframe src="http://other.test/" style="width:1200px; height:700px"></iframe>""",
             "http://other.test/": f"<!doctype html><body style='margin:0'>{LONG}"}
    page.route("**/*", lambda route: route.fulfill(content_type="text/html", body=pages[route.request.url]))
    page.goto("http://site.test/")
    frame = page.frames[1]
    frame.wait_for_function("document.body?.innerText === 'long'")
    assert note(page, DOWN) == ""
    frame.wait_for_function("scrollY === 360")
    assert note(page, "scroll(1, x=600, y=300)") == ""
    frame.wait_for_function("scrollY === 260")
    page.unroute_all()
    page.route("**/*", lambda route: route.abort())
    page.evaluate("document.querySelector('iframe').src = 'http://dead.test/'")
    assert note(page, DOWN) == "" and note(page, "scroll(1, x=600, y=300)") == ""


def test_a_page_from_right_to_left_and_a_list_from_the_bottom_up(page):
    page.set_content(f"<!doctype html><body dir=rtl style='margin:0'>{LONG}")
    assert note(page, RIGHT) == "swipe: nothing on the page scrolls further right"
    assert note(page, LEFT) == "" and window_at(page) == [-640, 0] and note(page, RIGHT) == ""
    page.set_content(f"""<body style="margin:0"><div id=s style="{BOX} width:900px; height:700px;
        display:flex; flex-direction:column-reverse"><div style="flex:none; height:5000px">x</div></div>""")
    assert "further down" in note(page, DOWN) and "further down" in note(page, "scroll(-1, x=500, y=300)")
    assert note(page, UP) == "" and at(page) == [0, -360]


def test_a_list_that_snaps(page):
    cards = "<div style='flex:none; width:900px; height:500px; scroll-snap-align:start'>card</div>" * 3
    page.set_content(f"""<body style="margin:0"><div id=s style="{BOX} width:900px; height:600px;
        display:flex; scroll-snap-type:x mandatory">{cards}</div>""")
    assert note(page, RIGHT) == "" and at(page) == [900, 0]
    assert "there scrolls further down" in note(page, "scroll(-1, x=500, y=300)")
    assert note(page, "swipe(from_coord=[500, 300], to_coord=[0, 300])") == ""
    page.wait_for_function("s.scrollLeft === 1800")
    assert "there scrolls further right" in note(page, "swipe([500, 300], direction='left')")
    assert "hscroll: nothing there scrolls further right" == note(page, "hscroll(9, x=500, y=300)")


def test_at_a_place_the_note_knows_what_the_wheel_will_do(page):
    page.set_content(f"""<!doctype html><body style="margin:0; height:1500px">
        <div id=s style="{BOX} left:0; top:0; width:300px; height:300px">{LONG}</div>
        <div id=kept style="{BOX} overscroll-behavior:contain; left:400px; top:0; width:300px; height:300px">
        {LONG}</div>
        <div id=map style="position:absolute; left:800px; top:0; width:300px; height:300px"></div>""")
    assert note(page, "scroll(1, x=100, y=100)") == "scroll: nothing there scrolls further up"
    page.evaluate("[s, kept].forEach(e => e.scrollTop = 1e6)")
    assert note(page, "scroll(-1, x=500, y=100)") == "scroll: nothing there scrolls further down"
    assert note(page, "scroll(-1, x=100, y=100)") == ""  # the window goes on where the inner one ends
    page.wait_for_function("scrollY === 100")
    page.evaluate("""() => { scrollTo(0, 0);
        map.addEventListener('wheel', event => { event.preventDefault(); map.zoom = event.deltaY }) }""")
    assert note(page, "scroll(5, x=900, y=100)") == "" and page.evaluate("map.zoom") == -500
    assert "further up" in note(page, "scroll(5, x=1200, y=100)")


def test_trying_does_not_disturb_the_wheel(page):
    page.set_content(APP)
    for i in range(1, 31):
        assert note(page, f"scroll(-1, x=600, y={300 + i})") == ""
        page.wait_for_function("at => s.scrollTop === at", arg=100 * i)


@pytest.mark.parametrize("text, why", [
    ("scroll(0)", "a distance of 0"), ("scroll(0, x=5, y=5)", "a distance of 0"),
    ("swipe(direction='up', amount=0)", "a distance of 0"), ("swipe([5, 5], [5, 5])", "a distance of 0"),
    ("swipe(direction='up', amount=-0.5)", "amount=-0.5 is below 0"), ("wait(-3)", "-3 seconds are below 0"),
    ("wait(seconds=-0.01)", "below 0"), ("wait(-1000000)", "below 0")])
def test_numbers_that_mean_nothing_are_told_and_do_nothing(page, capfd, text, why):
    page.set_content(APP)
    with pytest.raises(ActionError, match=why):
        note(page, text)
    assert at(page) == [0, 0] and capfd.readouterr() == ("", "")  # the driver has nothing to warn of


@pytest.mark.parametrize("text", ["scroll(1e6, x=5, y=5)", "scroll(-1e6, x=5, y=5)", "scroll(-0.5)",
                                  "swipe([5, 5], direction='up', amount=1e6)", "wait(0)"])
def test_large_and_broken_numbers_do_no_harm(page, capfd, text):
    page.set_content(APP)
    note(page, text)
    assert page.evaluate("1 + 1") == 2 and capfd.readouterr() == ("", "")
