"""What an action does to a page: one call of the grammar (actions.py) on a Playwright page (sync API).

`perform` does it at once; session.py waits for its consequences. EFFECTS says which calls a browser knows;
the others are an ActionError, whose text is for the model. Nothing here imports Playwright.
"""

import re
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


def perform(call: Call, page, settings: ActionSettings = ActionSettings()) -> None:
    """Do the call on a Playwright page; coordinates are page pixels. A final call has no effect.

    ActionError: the call asks for what cannot be done. Playwright's errors (a crash, a timeout) pass through.
    """
    if is_final(call):
        return
    if call.name not in EFFECTS:
        raise ActionError(f"{call.name} cannot be done in a browser")
    EFFECTS[call.name](page, settings, **{param: call[param] for param in SIGNATURES[call.name]})


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
        page.evaluate(SHOW_OPTIONS, [x, y])


CLOSED_SELECT = """([x, y]) =>
    document.elementFromPoint(x, y)?.closest('select:not([multiple])')?.size <= 1"""
# No screenshot shows a select's popup. So the closed list becomes an open one, over the page and inside the
# window, that closes itself after use.
SHOW_OPTIONS = """([x, y]) => {
    const select = document.elementFromPoint(x, y)?.closest('select');
    if (!select || document.activeElement !== select) return;  // disabled, or the page's own way with clicks
    const before = ['size', 'style'].map(name => [name, select.getAttribute(name)]);
    const close = () => before.forEach(([name, value]) =>
        value === null ? select.removeAttribute(name) : select.setAttribute(name, value));
    const width = select.getBoundingClientRect().width + 'px';
    Object.assign(select.style, {position: 'absolute', width, height: 'auto', zIndex: 2147483647});
    select.size = Math.max(2, Math.min(select.querySelectorAll('option, optgroup').length, 30));
    const rows = Math.floor(select.size * innerHeight / select.getBoundingClientRect().height);
    if (rows < select.size) select.size = Math.max(2, rows);
    const box = select.getBoundingClientRect(), hidden = Math.min(box.bottom - innerHeight, box.top);
    if (hidden > 0) select.style.marginTop = -hidden + 'px';
    for (const event of ['change', 'click', 'blur']) select.addEventListener(event, close, {once: true});
}"""


def _drag(page, settings, x, y, button):
    """From where the mouse is, in small moves: pages take it for a drag only after some."""
    if x is None:
        raise ActionError("dragTo: x and y are missing")
    page.mouse.down(button=button)
    page.mouse.move(x, y, steps=10)
    page.mouse.up(button=button)


TOWARDS = {"up": (0, 1), "down": (0, -1), "left": (1, 0), "right": (-1, 0)}  # finger up, page down


def _swipe(page, settings, from_coord, to_coord, direction, amount):
    """At from_coord the wheel turns, so whatever lies there scrolls; without it the window does."""
    sides, amount = page.evaluate("[innerWidth, innerHeight]"), min(max(amount, 0), 1)
    shift = [side * sign * amount for side, sign in zip(sides, TOWARDS[direction])]
    if from_coord is None:
        page.evaluate("([left, top]) => scrollBy({left, top, behavior: 'instant'})", shift)
    else:
        if to_coord is not None:
            shift = [start - stop for start, stop in zip(from_coord, to_coord)]
        page.mouse.move(*from_coord)
        page.mouse.wheel(*shift)


def _scroll(page, settings, clicks, x, y):
    if x is not None:
        page.mouse.move(x, y)
    page.mouse.wheel(0, -100 * clicks)  # positive is up, as the training prompt says


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


EFFECTS = {  # what is missing here is not done in a browser
    "click": _click,
    "doubleClick": partial(_click, clicks=2),
    "rightClick": partial(_click, button="right"),
    "moveTo": lambda page, settings, x, y: page.mouse.move(x, y),
    "dragTo": _drag,
    "swipe": _swipe,
    "scroll": _scroll,
    "press": _press,
    "hotkey": _hotkey,
    "keyDown": lambda page, settings, key: page.keyboard.down(key_name(key)),
    "keyUp": lambda page, settings, key: page.keyboard.up(key_name(key)),
    "write": _write,
    "wait": lambda page, s, seconds: page.wait_for_timeout(1000 * min(seconds, s.max_wait)),
    "open_url": _open_url,
    "go_backward": lambda page, s: page.go_back(timeout=1000 * s.timeout, wait_until="commit"),
    "go_forward": lambda page, s: page.go_forward(timeout=1000 * s.timeout, wait_until="commit"),
}
