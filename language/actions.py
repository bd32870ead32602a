"""The actor's action grammar: a model's text -> calls -> effects on a page; and the screen's coordinates.

A response may hold <think>, <operation> and <action> blocks; the action block holds calls such as
`click(x=84, y=120)`. Names and arguments are those of ScaleCUA's web and training prompts (paper, sec. 3.1).

    parse         any text -> Action; never raises. Reads what models really write: no tags, a code fence, an
                  unclosed block, several calls in a line, positional arguments, other names of an argument, a
                  missing ")", a quote or a line break inside a quote. What it cannot read it names in
                  Action.error, and then there is no call: nothing half understood is done (PAPER-GAP 12).
    format_call   the canonical text, of which parse gives back the same call
    smart_resize, rescale   the model's pixels are those of a resized screenshot; here they become the page's
    perform       one call on a Playwright page (sync API); session.py waits for the page afterwards

SIGNATURES is the grammar: names, arguments, types and defaults are written there and nowhere else.
"""

import ast
import itertools
import math
import re
from dataclasses import dataclass
from functools import partial


class ActionError(Exception):
    """An action that cannot be read or done, by its own fault; the text says why and is fit for the model."""


@dataclass(frozen=True)
class Call:
    """One action: canonical name and the arguments that were written; `call[param]` adds the defaults."""
    name: str
    args: dict

    def __getitem__(self, param: str):
        return self.args.get(param, SIGNATURES[self.name][param][1])


@dataclass(frozen=True)
class Action:
    """What one response says. `error` is "" when it could be read; otherwise `calls` is empty."""
    calls: tuple[Call, ...]
    operation: str
    think: str
    error: str


@dataclass(frozen=True)
class ActionSettings:
    clear_before_write: bool = False  # delete what the focused field holds before write() types
    show_select: bool = True          # lay the options of a clicked <select> over the page
    max_wait: float = 10.0            # s, upper limit of wait()
    max_repeats: int = 50             # upper limit of clicks= and presses=
    timeout: float = 15.0             # s, navigation by open_url, go_backward, go_forward


# ---------------------------------------------------------------------------------------------- the grammar
def as_number(value):
    """An int or a float, also from text. No coordinate, count or duration is beyond a million, or NaN."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value) else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e6:
        raise ValueError
    return value


def as_count(value):
    if as_number(value) < 1:
        raise ValueError
    return int(as_number(value))


def as_point(value):
    x, y = value
    return [as_number(x), as_number(y)]


def as_text(value):
    return "" if value is None else str(value)


def as_key_list(value):
    if not isinstance(value, (list, tuple)):
        return [as_text(value)]
    if not value:
        raise ValueError
    return [key for item in value for key in as_key_list(item)]


def as_keys(value):
    """One key stays one key; lists, also in lists, become one list."""
    return as_key_list(value) if isinstance(value, (list, tuple)) else as_text(value)


REQUIRED = object()
XY = {"x": (as_number, None), "y": (as_number, None)}
XY_REQUIRED = {"x": (as_number, REQUIRED), "y": (as_number, REQUIRED)}
BUTTON = {"button": (("left", "right", "middle"), "left")}
SIGNATURES = {  # name: {argument: (type or the allowed words, default)}, in the order of the positional form
    "click": XY | {"clicks": (as_count, 1)} | BUTTON,
    "doubleClick": XY | BUTTON,
    "rightClick": XY,
    "moveTo": XY_REQUIRED,
    "dragTo": XY | BUTTON,
    "swipe": {"from_coord": (as_point, None), "to_coord": (as_point, None),
              "direction": (("up", "down", "left", "right"), "up"), "amount": (as_number, 0.5)},
    "press": {"keys": (as_keys, REQUIRED), "presses": (as_count, 1)},
    "hotkey": {"args": (as_key_list, REQUIRED)},  # variadic: hotkey('ctrl', 'a')
    "write": {"message": (as_text, REQUIRED)},
    "wait": {"seconds": (as_number, 3)},
    "response": {"answer": (as_text, REQUIRED)},
    "terminate": {"status": (("success", "failure"), "success"), "info": (as_text, None)},
    # only in the training prompts: web, desktop, mobile, mind2web
    "keyDown": {"key": (as_text, REQUIRED)},
    "keyUp": {"key": (as_text, REQUIRED)},
    "open_url": {"url": (as_text, REQUIRED)},
    "go_forward": {},
    "go_backward": {},
    "call_user": {},
    "scroll": {"clicks": (as_number, REQUIRED)} | XY,
    "long_press": XY_REQUIRED | {"duration": (as_number, 1)},
    "open_app": {"app_name": (as_text, REQUIRED)},
    "navigate_home": {},
    "navigate_back": {},
    "select_option": XY_REQUIRED | {"value": (as_text, REQUIRED)},
}
NAMES = {name.lower().replace("_", ""): name for name in SIGNATURES}
NAMES |= {"answer": "response", "goback": "go_backward", "goforward": "go_forward"}
TIMING = {"duration", "interval", "tween"}  # pyautogui's arguments that mean nothing here


def bind(name: str, positional: list, named: dict) -> Call:
    """Arguments as written -> Call. ActionError names what is missing, unknown or of a wrong type."""
    signature, params = SIGNATURES[name], list(SIGNATURES[name])
    if name == "hotkey" and positional:
        positional = [positional]
    if len(positional) > len(params):
        raise ActionError(f"{name}: {len(positional)} arguments where it takes {len(params)}")
    given = dict(zip(params, positional))
    for key, value in named.items():
        if key in signature:
            given[key] = value
        elif params and params[0] not in given | named:  # hotkey(keys=['ctrl', 'a']), write(text='a')
            given[params[0]] = value
        elif key not in TIMING:
            raise ActionError(f"{name}: unknown argument {key}")
    if "y" in set(params) - set(given) and isinstance(given.get("x"), (list, tuple)) and len(given["x"]) == 2:
        given["x"], given["y"] = given["x"]  # click([84, 120])
    args = {p: _typed(name, p, given[p]) for p in params if p in given}
    for p in params:
        if p not in args and signature[p][1] is REQUIRED:
            raise ActionError(f"{name}: {p} is missing")
    if "y" in params and (args.get("x") is None) != (args.get("y") is None):
        raise ActionError(f"{name}: of x and y one is missing")
    return Call(name, args)


def _typed(name, param, value):
    kind, default = SIGNATURES[name][param]
    if value is None and default is not REQUIRED:
        return default
    try:
        if callable(kind):
            return kind(value)
        return next(word for word in kind if re.fullmatch(rf"\s*{word[:4]}\w*\s*", value, re.I))  # 'fail'
    except (ValueError, TypeError, StopIteration):
        kind = f"a {kind.__name__[3:].replace('_', ' ')}" if callable(kind) else f"one of {', '.join(kind)}"
        raise ActionError(f"{name}: {param}={str(value)[:80]!r} is not {kind}") from None


def format_call(call: Call) -> str:
    """Canonical text, e.g. click(x=84, y=120): the arguments that the call holds, in the grammar's order."""
    if call.name == "hotkey":
        return f"hotkey({', '.join(map(repr, call['args']))})"
    written = (f"{param}={call.args[param]!r}" for param in SIGNATURES[call.name] if param in call.args)
    return f"{call.name}({', '.join(written)})"


# -------------------------------------------------------------------------------------------- text -> calls
_NAME = r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)\("  # also pyautogui.click(
_BEGIN = re.compile(rf"[^\w#\n]*(?:(?:\d+|[Aa]ctions?)[^\w#\n]+)?{_NAME}")  # "1. click(", "Action: click("
_CLOSE = re.compile(rf"\)(?=[ \t\r]*(?:[;,.]?[ \t\r]*(?:\n|\Z|#|{_NAME})|[`\])<]))")  # where a call may end
_ESCAPE = re.compile(r"\\(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U00(?:0[\da-fA-F]|10)[\da-fA-F]{4}"
                     r"|[\\'\"abfnrtv0-7\n])?")
_QUOTED = re.compile(r"((?:(?:write|response|answer)\(|terminate\((?:[^,]*,)?)\s*(?:\w+\s*=\s*)?)"
                     r"(['\"])(.*)(?<!\\)\2\s*\)", re.S | re.I)
MAX_READINGS = 200  # of one call, so that a hostile text costs milliseconds


def parse(text: str) -> Action:
    """A model's whole response -> Action; never raises."""
    think, rest = _cut(text, "think")
    operation, rest = _cut(rest, "operation")
    block = (re.search(r"<action>(.*?)(?:</action>|\Z)", rest, re.S | re.I)
             or re.search(r"```(?:python)?(.*?)(?:```|\Z)", rest, re.S | re.I))
    try:
        return Action(_read_calls(block[1] if block else rest), operation, think, "")
    except ActionError as e:
        return Action((), operation, think, str(e))


def _cut(text, tag):
    """Inside of the first <tag> block, and the text without it. Unclosed, it ends where the next begins."""
    m = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S | re.I)
         or re.search(rf"<{tag}>(.*?)(?=<(?:operation|action)>|\Z)", text, re.S | re.I))
    return (m[1].strip(), text[:m.start()] + text[m.end():]) if m else ("", text)


def _read_calls(text):
    """The calls of an action block. A call begins a line or follows another call; other lines are remarks."""
    calls, at = [], 0
    while at < len(text):
        if begin := _BEGIN.match(text, at):
            name, node, at = _read_call(text, begin)
            calls.append(bind(name, [_value(name, arg) for arg in node.args],
                              {str(k.arg).lower(): _value(name, k.value) for k in node.keywords}))
        else:
            at = text.find("\n", at) + 1 or len(text)
    if not calls:
        raise ActionError(f"no action in {text.strip()[:80]!r}")
    return tuple(calls)


def _read_call(text, begin):
    """Canonical name, syntax tree and end of the call that begins here: the first reading that is Python."""
    name, start = NAMES.get(begin[1].lower().replace("_", "")), begin.start(1)
    if name is None:
        raise ActionError(f"unknown action {begin[1][:40]}")
    candidates = list(itertools.islice(_candidates(text, start), MAX_READINGS))
    for mend in (str, lambda call: call.replace("\n", "\\n"), _escape_quotes):  # 2nd: a line break in a quote
        for candidate, end in candidates:
            if node := _syntax(mend(candidate)):
                return name, node, end
    raise ActionError(f"cannot read {text[start:start + 80]!r}")


def _candidates(text, start):
    """What the call may be, and its end: up to each ")" that may end one, then the line and what it lacks."""
    for close in _CLOSE.finditer(text, start):
        yield text[start:close.end()], close.end()
    line = (text + "\n").index("\n", start)
    for bracket in (")", "])"):
        yield text[start:line].rstrip() + bracket, line


def _escape_quotes(call):
    r"""write(message='it's') -> write(message='it\'s'), for the actions that take free text; else ""."""
    m = _QUOTED.fullmatch(call)
    if not m or re.search(rf"\n\s*{_NAME}", m[3]):  # a quote that reaches into the next call was never closed
        return ""
    body = re.sub(r"\\.|['\"]", lambda c: c[0] if len(c[0]) > 1 else "\\" + c[0], m[3], flags=re.S)
    return f"{m[1]}{m[2]}{body}{m[2]})".replace("\n", "\\n")


def _syntax(text):
    r"""The tree of a text that is one call, else None. A backslash that escapes nothing stays: 'C:\d'."""
    try:
        node = ast.parse(_ESCAPE.sub(lambda m: m[0] if m[1] else "\\\\", text), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return node if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _value(name, node):
    """A literal; a bare word is taken as text: press(keys=enter)."""
    if isinstance(node, ast.Name):
        return None if node.id.lower() in ("none", "null") else node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ActionError(f"{name}: an argument is not a plain value") from None


# ---------------------------------------------------------------------------------------------- coordinates
AXES = {"x": [0], "y": [1], "from_coord": [0, 1], "to_coord": [0, 1]}


def smart_resize(width: int, height: int, min_pixels: int = 3136, max_pixels: int = 2109744,
                 factor: int = 28) -> tuple[int, int]:
    """(width, height) in pixels of the image Qwen2.5-VL sees: 1280 x 720 -> 1288 x 728. Limits: ScaleCUA's.

    Each side becomes the nearest multiple of `factor`, halves the even one. Where the area leaves the limits,
    the image is scaled instead, rounding towards their inside. ValueError: a side over 200 times the other.
    """
    if min(width, height) < 1 or max(width, height) > 200 * min(width, height):
        raise ValueError(f"an image of {width} x {height}: no side may be empty or over 200 times the other")
    sides = [round(side / factor) * factor for side in (width, height)]
    if math.prod(sides) > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)]
    elif math.prod(sides) < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        sides = [math.ceil(side * grow / factor) * factor for side in (width, height)]
    return sides[0], sides[1]


def coordinates(call: Call) -> dict:
    """{argument: its numbers, by AXES} for the coordinates that the call has."""
    given = {p: call.args[p] for p in AXES if call.args.get(p) is not None}
    return {p: list(value) if isinstance(value, (list, tuple)) else [value] for p, value in given.items()}


def is_fraction(call: Call) -> bool:
    """Whether the coordinates are fractions of the image, not pixels: at most 1, and at least one a float."""
    numbers = sum(coordinates(call).values(), [])
    return any(isinstance(n, float) for n in numbers) and all(0 <= n <= 1 for n in numbers)


def rescale(call: Call, src: tuple, dst: tuple) -> Call:
    """The call with its coordinates moved from an image of size `src` to one of size `dst`, (width, height).

    Pixels are rounded and clamped inside `dst`. The size (1, 1) stands for fractions, with 4 decimals as in
    ScaleCUA's records; as a source they are recognised whatever `src` says (is_fraction).
    """
    src = (1, 1) if is_fraction(call) else src

    def move(value, axis):
        value = value * dst[axis] / src[axis]
        return round(min(max(value, 0), 1), 4) if max(dst) == 1 else min(max(round(value), 0), dst[axis] - 1)

    moved = {p: [move(n, axis) for n, axis in zip(old, AXES[p])] for p, old in coordinates(call).items()}
    return Call(call.name, call.args | {p: new if len(new) == 2 else new[0] for p, new in moved.items()})


# ----------------------------------------------------------------------------------------- calls -> effects
def is_final(call: Call) -> bool:
    """Whether the call ends the episode (PAPER-GAP 13)."""
    return call.name in ("response", "terminate")


def answer(calls) -> str:
    """The episode's answer: the last response's, else the last terminate's info, else ""."""
    said = ([call["answer"] for call in calls if call.name == "response"]
            or [call["info"] for call in calls if call.name == "terminate"])
    return said[-1] or "" if said else ""


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
