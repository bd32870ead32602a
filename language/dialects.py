"""How other agents write an action, and in which space their coordinates are, read into actions.py's grammar.

A native agent was trained to answer in a form of its own (table 1 compares with three of them):

    scalecua   <think>, <operation>, <action> blocks with our own calls
    uitars     Thought: ... Action: click(start_box='(84,120)'), also with box tokens, <point>x y</point> and
               boxes of two corners; left_double, right_single, drag, type, hotkey, scroll, wait, finished
    guilibra   <think> or <thinking>, <answer> with JSON: action_description, action_type, value, point_2d

`scroll down` there shows what is below; our swipe names the finger's way, which is up. What a dialect cannot
say in our grammar is an error of that answer, as everywhere (PAPER-GAP 12). `read_point` finds the place in a
grounding model's answer, whichever of the usual forms it has.
"""

import json
import re
from dataclasses import replace

from language import actions
from language.actions import Action, ActionError
from runtime import UserError

SPACES = {  # the setting `coordinates` -> (width, height) of the space that a model's coordinates are in
    "image": lambda image, page: image,         # pixels of the image as the model sees it
    "page": lambda image, page: page,           # pixels of the page
    "0-1": lambda image, page: (1, 1),
    "0-1000": lambda image, page: (1000, 1000),
}
NUMBER = r"-?\d{1,6}(?:\.\d{1,9})?"         # no longer than actions.as_number takes
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def space(name: str):
    """`(image size, page size) -> size` for the setting `coordinates`; UserError for an unknown one."""
    if name not in SPACES:
        raise UserError(f"--coordinates {name}: the conventions are {', '.join(SPACES)}")
    return SPACES[name]


def reader(name: str):
    """`text -> Action` for the setting `dialect`; UserError for an unknown one."""
    if name not in READERS:
        raise UserError(f"--dialect {name}: the dialects are {', '.join(READERS)}")
    return READERS[name]


def centre(numbers: list[str]) -> list:
    """The point (two numbers), or the middle of the box (four)."""
    x, y, *corner = map(actions.as_number, numbers)
    return [(x + corner[0]) / 2, (y + corner[1]) / 2] if corner else [x, y]


# -------------------------------------------------------------------------------------------------- UI-TARS
_MARKS = re.compile(r"<\|box_(?:start|end)\|>|</?(?:point|bbox|box)>")
_BOX = re.compile(rf"\b(?:start_|end_)?(?:box|point)\s*=\s*(['\"]?)[\[(\s]*"
                  rf"({NUMBER}(?:[\s,]+{NUMBER})(?:[\s,]+{NUMBER}[\s,]+{NUMBER})?)[\])\s]*\1")
_CALLS = [(re.compile(rf"^(\s*){pattern}", re.M), ours) for pattern, ours in (
    (r"left_double\(", r"\1doubleClick("), (r"right_single\(", r"\1rightClick("),
    (r"type\(", r"\1write("), (r"wait\(\s*\)", r"\1wait(seconds=5)"),  # its prompt says 5 s
    (r"finished\(\s*\)", r"\1terminate()"), (r"finished\(", r"\1response("),
    (r"drag\(\s*(\[.*?\])\s*,\s*(\[.*?\])\s*\)", r"\1moveTo(\2)\n\1dragTo(\3)"),
    (r"hotkey\(\s*\w+\s*=\s*(['\"])(.*?)\2\s*\)",
     lambda m: f"{m[1]}hotkey({', '.join(map(repr, m[3].split()))})"),
    (r"scroll\((?:\s*(\[.*?\])\s*,)?\s*direction\s*=\s*['\"]?(\w+)['\"]?\s*\)",
     lambda m: f"{m[1]}swipe({f'from_coord={m[2]}, ' * bool(m[2])}"
               f"direction={OPPOSITE.get(m[3].lower(), m[3])!r})"))]


def read_uitars(text: str) -> Action:
    """The thought is also the operation, for it ends by naming the step. Each action begins a line."""
    starts = list(re.finditer(r"^[ \t]*Action:", text, re.M))
    thought, calls = (text[:starts[-1].start()], text[starts[-1].end():]) if starts else ("", text)
    thought = re.sub(r"^\s*Thought:", "", thought).strip()
    calls = _BOX.sub(lambda m: str(centre(re.findall(NUMBER, m[2]))), _MARKS.sub("", calls)).strip()
    for pattern, ours in _CALLS:
        calls = pattern.sub(ours, calls)
    return replace(actions.parse(f"<action>{calls}</action>"), think=thought, operation=thought)


# ------------------------------------------------------------------------------------------------- GUI-Libra
def read_guilibra(text: str) -> Action:
    """One JSON object, whose description of the action is the operation."""
    think = re.search(r"<think(?:ing)?>(.*?)(?:</think(?:ing)?>|(?=<answer>)|\Z)", text, re.S | re.I)
    body = re.search(r"<answer>(.*?)(?:</answer>|\Z)", text, re.S | re.I)
    found = re.search(r"\{.*\}", body[1] if body else text, re.S)
    operation = ""
    try:
        said = json.loads(found[0], strict=False) if found else None
        if not isinstance(said, dict):
            raise ActionError(f"no JSON object in {text.strip()[-80:]!r}")
        operation = str(said.get("action_description") or "")
        calls = tuple(actions.bind(name, [], args) for name, args in libra_calls(said))
        return Action(calls, operation, think[1].strip() if think else "", "")
    except (ValueError, RecursionError) as e:
        error = f"no JSON object: {e}"
    except ActionError as e:
        error = str(e)
    return Action((), operation, think[1].strip() if think else "", error)


def libra_calls(said: dict) -> list[tuple[str, dict]]:
    """Our names and arguments for one of its actions. A point below 0 or none at all means: no place."""
    kind = re.sub(r"[^a-z]", "", str(said.get("action_type", "")).lower())
    value = "" if said.get("value") in (None, "None") else str(said["value"])
    point = said.get("point_2d")
    there = isinstance(point, list) and len(point) == 2 and all(isinstance(n, (int, float)) and n >= 0
                                                                for n in point)
    at = dict(zip("xy", point)) if there else {}
    if kind in ("click", "select", "longpress") and not at:
        raise ActionError(f"{kind}: point_2d {str(point)[:40]} is no place")
    keys = ("hotkey", {"args": [value]}) if "+" in value.strip("+") else ("press", {"keys": value})
    known = {"click": [("click", at)], "select": [("click", at)], "longpress": [("long_press", at)],
             "write": [("click", at)] * bool(at) + [("write", {"message": value})], "keyboardpress": [keys],
             "scroll": [("swipe", {"direction": OPPOSITE.get(value.lower(), value)})],
             "swipe": [("swipe", {"direction": value})], "wait": [("wait", {"seconds": value or 3})],
             "navigateback": [("go_backward", {})], "back": [("go_backward", {})],
             "navigatehome": [("navigate_home", {})], "openapp": [("open_app", {"app_name": value})],
             "answer": [("response", {"answer": value})], "terminate": [("terminate", {"info": value})]}
    if kind not in known:
        raise ActionError(f"unknown action {str(said.get('action_type'))[:40]}")
    return known[kind]


READERS = {"scalecua": actions.parse, "uitars": read_uitars, "guilibra": read_guilibra}

# ------------------------------------------------------------------------------------------------- grounding
_XY = re.compile(rf"x\s*=\s*({NUMBER})\s*,\s*y\s*=\s*({NUMBER})")
_BRACKET = re.compile(rf"[\[(>]\s*({NUMBER})[\s,]+({NUMBER})(?:[\s,]+({NUMBER})[\s,]+({NUMBER}))?\s*[\])<]")


def read_point(text: str) -> list[float] | None:
    """The last place that a grounding model names, as x=84, y=120 or (84, 120) or [84, 120] or
    <point>84 120</point> or the middle of [[x1, y1, x2, y2]]; None where there is none."""
    found = _XY.findall(text) or _BRACKET.findall(text)
    return centre([n for n in found[-1] if n]) if found else None
