"""What an action does to a page: one call of the grammar (actions.py) on a Playwright page (sync API).

`perform` does it at once; session.py waits for its consequences. EFFECTS says which calls a browser knows;
the others are an ActionError, whose text is for the model. Nothing here imports Playwright.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from language.actions import SIGNATURES, ActionError, Call, as_key_list, is_final


@dataclass(frozen=True)
class ActionSettings:
    clear_before_write: bool = False  # delete what the focused field holds before write() types
    show_select: bool = True          # lay the options of a clicked <select> over the page
    max_wait: float = 10.0            # s, upper limit of wait()
    max_repeats: int = 50             # upper limit of clicks= and presses=
    timeout: float = 15.0             # s, navigation by open_url, go_backward, go_forward


def perform(call: Call, page, settings: ActionSettings = ActionSettings()) -> str:
    """Do the call on a Playwright page; coordinates are page pixels. A final call has no effect.

    Returns what the agent should be told about it: "" mostly, for a scroll that moves nothing a sentence.
    ActionError: the call asks for what cannot be done. Playwright's errors (a crash, a timeout) pass through.
    """
    if is_final(call):
        return ""
    if call.name not in EFFECTS:
        raise ActionError(f"{call.name} cannot be done in a browser")
    return EFFECTS[call.name](page, settings, **{param: call[param] for param in SIGNATURES[call.name]}) or ""


KEYS = {name.lower(): name for name in """Enter Tab Escape Backspace Delete Insert Home End PageUp PageDown
    Space ArrowUp ArrowDown ArrowLeft ArrowRight Shift Control Alt Meta CapsLock NumLock ScrollLock Pause
    PrintScreen ContextMenu F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12""".split()}
KEYS |= {alias: name for name, aliases in {
    "Enter": "return", "Escape": "esc", "Delete": "del", "Insert": "ins", "PageUp": "pgup",
    "PageDown": "pgdn", "Space": "spacebar", "ArrowUp": "up", "ArrowDown": "down", "ArrowLeft": "left",
    "ArrowRight": "right", "Control": "ctrl ctrlleft ctrlright", "Shift": "shiftleft shiftright",
    "Alt": "altleft altright option", "Meta": "win winleft winright command cmd super", "ContextMenu": "apps",
}.items() for alias in aliases.split()} | {"\n": "Enter", "\t": "Tab", " ": "Space"}


def key_name(name: str) -> str:
    """pyautogui's or a browser's name of a key, in any case -> Playwright's; a visible ASCII sign stays."""
    if len(name) == 1 and "!" <= name <= "~":
        return name
    key = KEYS.get(name) or KEYS.get(re.sub(r"[\s_-]", "", name.lower()))  # 'Page Down', 'page_down'
    if key is None:
        raise ActionError(f"unknown key {name[:40]!r}")
    return key


def _press(page, settings, keys, presses):
    keys = [key_name(key) for key in as_key_list(keys)]
    for key in keys * min(presses, settings.max_repeats):
        page.keyboard.press(key)


def _hotkey(page, settings, args):
    """Down in order, up in reverse. 'Ctrl-Shift-C' and 'ctrl+a' are several keys."""
    keys = [key_name(key.lower()) for arg in args for key in re.split(r"(?<=\w)[+-](?=.)", arg)]
    for key in keys:
        page.keyboard.down(key)
    for key in reversed(keys):
        page.keyboard.up(key)


def _write(page, settings, message):
    if settings.clear_before_write:
        page.keyboard.press("Control+A")
        page.keyboard.press("Backspace")
    page.keyboard.type(message)


def _click(page, settings, x, y, clicks=1, button="left"):
    clicks = min(clicks, settings.max_repeats)
    if x is None:  # where the mouse is
        for n in range(1, clicks + 1):
            page.mouse.down(button=button, click_count=n)
            page.mouse.up(button=button, click_count=n)
        return
    # asked before the click: after it the page may be about to leave
    closed = settings.show_select and button == "left" and page.evaluate(CLOSED_SELECT, [x, y])
    page.mouse.click(x, y, button=button, click_count=clicks)
    if closed:
        page.evaluate(SHOW_OPTIONS)


# The element at a point, also inside open shadow roots and frames of the page's own site.
UNDER = """const under = (x, y) => {
    const seen = new Set();
    let root = document, element = null;
    while (root) {
        const next = root.elementFromPoint(x, y);
        if (!next || seen.has(next)) break;
        seen.add(next);
        element = next;
        root = element.contentDocument || element.shadowRoot;
        if (element.contentDocument) {
            const box = element.getBoundingClientRect();
            x -= box.left + element.clientLeft;
            y -= box.top + element.clientTop;
        }
    }
    return element;
};
"""
CLOSED_SELECT = f"""([x, y]) => {{
    {UNDER}
    const select = under(x, y)?.closest('select:not([multiple])');
    if (!(select?.size <= 1)) return false;
    window[Symbol.for('clicked select')] = select;  // by now it lies here; the click may move it
    return true;
}}"""
# No screenshot shows a select's popup. So the closed list becomes an open one, over the page and inside the
# window, that closes itself after use. It lies where the select is once the click has had its effect.
SHOW_OPTIONS = """() => {
    const select = window[Symbol.for('clicked select')];
    delete window[Symbol.for('clicked select')];
    // disabled, gone, or the page's own way with clicks
    if (!select?.isConnected || select.getRootNode().activeElement !== select) return;
    const height = select.ownerDocument.defaultView.innerHeight;
    const before = ['size', 'style'].map(name => [name, select.getAttribute(name)]);
    const close = () => before.forEach(([name, value]) => {
        select.setAttribute(name, value ?? '');  // a style that was never read is emptied, not removed
        if (value === null) select.removeAttribute(name);
    });
    const closed = select.getBoundingClientRect();
    const styled = rules => Object.entries(rules).forEach(([name, value]) =>
        select.style.setProperty(name, value, 'important'));
    styled({position: 'fixed', left: 0, top: 0, right: 'auto', bottom: 'auto', margin: 0, transition: 'none',
            width: closed.width + 'px', height: 'auto', 'max-height': 'none', 'z-index': 2147483647});
    select.size = Math.max(2, Math.min(select.querySelectorAll('option, optgroup').length, 30));
    const rows = Math.floor(select.size * height / select.getBoundingClientRect().height);
    if (rows < select.size) select.size = Math.max(2, rows);
    const open = select.getBoundingClientRect();  // not at 0, 0 where an element around it is the measure
    const top = Math.max(0, Math.min(closed.top, height - open.height));
    styled({left: closed.left - open.left + 'px', top: top - open.top + 'px'});
    for (const event of ['change', 'click', 'blur']) select.addEventListener(event, close, {once: true});
}"""


def _drag(page, settings, x, y, button):
    """From where the mouse is, in small moves: pages take it for a drag only after some."""
    if x is None:
        raise ActionError("dragTo: x and y are missing")
    page.mouse.down(button=button)
    page.mouse.move(x, y, steps=10)
    page.mouse.up(button=button)


# Scrolls by (dx, dy) pixels as a person would, and says whether it did: 'moved' | 'still', or 'frame' where
# another site's frame is in the way, which nobody can ask. Tried in turn: the window; what lies under the
# middle of the window, innermost first; the rest, the largest first. What has no scroll bar in that direction
# (overflow: hidden) does not count. With a place it only tries: whether the wheel will move anything there.
SCROLL = f"""([dx, dy, x, y]) => {{
    {UNDER}
    const placed = x !== null;
    const move = ({{thing, style, bars}}) => {{
        const where = () => [thing.scrollX ?? thing.scrollLeft, thing.scrollY ?? thing.scrollTop];
        const left = bars.test(style.overflowX) ? dx : 0, top = bars.test(style.overflowY) ? dy : 0;
        if (!left && !top) return false;
        const before = where();
        thing.scrollBy({{left, top, behavior: 'instant'}});
        const moved = where().some((at, axis) => Math.abs(at - before[axis]) >= 1);
        if (moved && placed) thing.scrollTo({{left: before[0], top: before[1], behavior: 'instant'}});
        return moved;
    }};
    const bars = /auto|scroll/;
    const windowOf = view => {{  // its rules are those of html, or of body where html has none
        const {{documentElement: html, body}} = view.document;
        const own = getComputedStyle(html);
        const style = own.overflow === 'visible' && body ? getComputedStyle(body) : own;
        return {{thing: view, style, bars: /auto|scroll|visible/}};
    }};
    const around = element => {{
        const found = [];
        while (element) {{
            const style = getComputedStyle(element), view = element.ownerDocument.defaultView;
            found.push({{thing: element, style, bars}});
            const axis = dy ? 'Y' : 'X';  // a scroller may keep its end to itself
            if (bars.test(style['overflow' + axis]) && style['overscrollBehavior' + axis] !== 'auto') break;
            element = style.position === 'fixed' ? null
                : element.assignedSlot || element.parentElement || element.getRootNode().host;
            if (element) continue;
            found.push(windowOf(view));
            element = view.frameElement;
        }}
        return found;
    }};
    if (!placed && move(windowOf(window))) return 'moved';
    const element = placed ? under(x, y) : under(innerWidth / 2, innerHeight / 2);
    if (/^I?FRAME$/.test(element?.tagName) && !element.contentDocument) return 'frame';
    if (around(element).some(move)) return 'moved';
    if (placed) {{  // unless the page does something of its own with the wheel: see HANDLED
        const view = element?.ownerDocument.defaultView ?? window;
        view.addEventListener('wheel', event => {{ window[Symbol.for('wheel')] = event; }},
                              {{once: true, capture: true, passive: true}});
        return 'still';
    }}
    const seen = new Map();  // by how many points of a grid lie in them, so that nothing covered counts
    for (let i = 0.5; i < 16; i++)
        for (let j = 0.5; j < 12; j++)
            for (const bar of around(under(innerWidth * i / 16, innerHeight * j / 12))) {{
                const known = seen.get(bar.thing) ?? {{...bar, points: 0}};
                known.points++;
                seen.set(bar.thing, known);
            }}
    return [...seen.values()].sort((a, b) => b.points - a.points).some(move) ? 'moved' : 'still';
}}"""
HANDLED = """() => {
    const event = window[Symbol.for('wheel')];
    delete window[Symbol.for('wheel')];
    return Boolean(event?.defaultPrevented);
}"""


def _move(page, name, dx, dy, place=None) -> str:
    """Scroll by so many pixels, at a place with the wheel there. Returns a note where nothing moves."""
    if not (dx or dy):
        raise ActionError(f"{name}: a distance of 0")
    if place:
        page.mouse.move(*place)
    state = page.evaluate(SCROLL, [dx, dy, *(place or (None, None))])
    if state == "frame" and not place:
        page.mouse.move(page.viewport_size["width"] / 2, page.viewport_size["height"] / 2)
    if state == "frame" or place:
        page.mouse.wheel(dx, dy)
    if state != "still" or place and page.evaluate(HANDLED):
        return ""
    way = ("down" if dy > 0 else "up") if abs(dy) >= abs(dx) else ("right" if dx > 0 else "left")
    return f"{name}: nothing {'there' if place else 'on the page'} scrolls further {way}"


TOWARDS = {"up": (0, 1), "down": (0, -1), "left": (1, 0), "right": (-1, 0)}  # finger up, page down


def _swipe(page, settings, from_coord, to_coord, direction, amount):
    if from_coord and to_coord:
        shift = [start - stop for start, stop in zip(from_coord, to_coord)]
    elif amount < 0:
        raise ActionError(f"swipe: amount={amount} is below 0; directions are up, down, left and right")
    else:
        sides = page.viewport_size["width"], page.viewport_size["height"]
        shift = [side * sign * min(amount, 1) for side, sign in zip(sides, TOWARDS[direction])]
    return _move(page, "swipe", *shift, from_coord)


def _scroll(page, settings, clicks, x, y):
    """Positive is up, as the training prompt says."""
    return _move(page, "scroll", 0, -100 * clicks, None if x is None else (x, y))


def _hscroll(page, settings, clicks, x, y):
    return _move(page, "hscroll", 100 * clicks, 0, None if x is None else (x, y))


def _wait(page, settings, seconds):
    if seconds < 0:
        raise ActionError(f"wait: {seconds} seconds are below 0")
    page.wait_for_timeout(1000 * min(seconds, settings.max_wait))


def _back(page, settings):
    page.go_back(timeout=1000 * settings.timeout, wait_until="commit")


def _forward(page, settings):
    page.go_forward(timeout=1000 * settings.timeout, wait_until="commit")


def _open_url(page, settings, url):
    url = url if "://" in url else f"http://{url}"
    if not re.match(r"https?://[^/]", url, re.I):
        raise ActionError(f"open_url: {url[:80]!r} is not an http address")
    try:
        page.goto(url, timeout=1000 * settings.timeout, wait_until="commit")
    except Exception as e:  # known by its text, so that this room needs no Playwright; others pass through
        if not re.search(r"net::ERR_|invalid URL|Download is starting|interrupted by", str(e)):
            raise
        raise ActionError(f"open_url: {str(e).splitlines()[0][:200]}") from e


EFFECTS: dict[str, Callable] = {  # what is missing here is not done in a browser; what one returns is a note
    "click": _click,
    "doubleClick": partial(_click, clicks=2),
    "tripleClick": partial(_click, clicks=3),
    "rightClick": partial(_click, button="right"),
    "middleClick": partial(_click, button="middle"),
    "moveTo": lambda page, settings, x, y: page.mouse.move(x, y),
    "dragTo": _drag,
    "swipe": _swipe,
    "scroll": _scroll,
    "hscroll": _hscroll,
    "press": _press,
    "hotkey": _hotkey,
    "keyDown": lambda page, settings, key: page.keyboard.down(key_name(key)),
    "keyUp": lambda page, settings, key: page.keyboard.up(key_name(key)),
    "write": _write,
    "wait": _wait,
    "open_url": _open_url,
    "go_backward": _back,
    "go_forward": _forward,
}
