"""The actor's action grammar: a model's text -> calls; and the screen's coordinates.

A response may hold <think>, <operation> and <action> blocks; the action block holds calls such as
`click(x=84, y=120)`. Names and arguments are those of ScaleCUA's web and training prompts (paper, sec. 3.1).

    parse         any text -> Action; never raises. Reads what models really write: no tags, a code fence, an
                  unclosed block, several calls in a line, positional arguments, other names of an argument, a
                  missing ")", a quote or a line break inside a quote. What it cannot read it names in
                  Action.error, and then there is no call: nothing half understood is done (PAPER-GAP 12).
    format_call   the canonical text, of which parse gives back the same call
    smart_resize, rescale   the model's pixels are those of a resized screenshot; here they become the page's

web/effects.py does the calls on a page.
SIGNATURES is the grammar: names, arguments, types and defaults are written there and nowhere else.
"""

import ast
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any


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
    """Two numbers; of a box (four, or its two corners) the middle."""
    if isinstance(value, str):
        raise ValueError
    numbers = [as_number(n) for part in value for n in (part if isinstance(part, (list, tuple)) else [part])]
    if len(numbers) == 4:
        x1, y1, x2, y2 = numbers
        numbers = [_middle(x1, x2), _middle(y1, y2)]
    if len(numbers) != 2:
        raise ValueError
    return numbers


def _middle(a, b):
    return (a + b) // 2 if isinstance(a, int) and isinstance(b, int) else (a + b) / 2


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


REQUIRED: Any = object()
XY = {"x": (as_number, None), "y": (as_number, None)}
XY_REQUIRED = {"x": (as_number, REQUIRED), "y": (as_number, REQUIRED)}
BUTTON = {"button": (("left", "right", "middle"), "left")}
# name: {argument: (type or the allowed words, default)}, in the order of the positional form
SIGNATURES: dict[str, dict[str, tuple[Any, Any]]] = {
    "click": XY | {"clicks": (as_count, 1)} | BUTTON,
    "doubleClick": XY | BUTTON,
    "tripleClick": XY | BUTTON,
    "rightClick": XY,
    "middleClick": XY,
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
    "hscroll": {"clicks": (as_number, REQUIRED)} | XY,  # pyautogui's: positive is to the right
    "long_press": XY_REQUIRED | {"duration": (as_number, 1)},
    "open_app": {"app_name": (as_text, REQUIRED)},
    "navigate_home": {},
    "navigate_back": {},
    "select_option": XY_REQUIRED | {"value": (as_text, REQUIRED)},
}
NAMES = {name.lower().replace("_", ""): name for name in SIGNATURES}
NAMES |= {"answer": "response", "goback": "go_backward", "goforward": "go_forward", "leftclick": "click",
          "vscroll": "scroll", "typewrite": "write"}
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
    if "y" in params and given.get("y") is None and isinstance(given.get("x"), (list, tuple)):
        given["x"], given["y"] = _typed(name, "x", given["x"], as_point)  # click([84, 120]), click(x=BOX)
    args = {p: _typed(name, p, given[p]) for p in params if p in given}
    for p in params:
        if p not in args and signature[p][1] is REQUIRED:
            raise ActionError(f"{name}: {p} is missing")
    if "y" in params and (args.get("x") is None) != (args.get("y") is None):
        raise ActionError(f"{name}: of x and y one is missing")
    return Call(name, args)


def _typed(name, param, value, kind=None):
    default = SIGNATURES[name][param][1]
    kind = kind or SIGNATURES[name][param][0]
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
_QUOTED = re.compile(r"((?:(?:(?:type)?write|response|answer)\(|terminate\((?:[^,]*,)?)\s*(?:\w+\s*=\s*)?)"
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
            named = {str(k.arg).lower(): _value(name, k.value) for k in node.keywords}
            calls.append(bind(name, [_value(name, arg) for arg in node.args], named))
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


# ------------------------------------------------------------------------------------------- an episode's end
def is_final(call: Call) -> bool:
    """Whether the call ends the episode (PAPER-GAP 13)."""
    return call.name in ("response", "terminate")


def answer(calls) -> str:
    """The episode's answer: the last response's, else the last terminate's info, else ""."""
    said = ([call["answer"] for call in calls if call.name == "response"]
            or [call["info"] for call in calls if call.name == "terminate"])
    return said[-1] or "" if said else ""
