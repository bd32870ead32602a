"""How other agents write an action, and in which space their coordinates are, read into actions.py's grammar.

A native agent was trained to answer in a form of its own (table 1 compares with some of them):

    scalecua   <think>, <operation>, <action> blocks with our own calls
    uitars     Thought: ... Action: click(start_box='(84,120)'), also with box tokens, <point>x y</point> and
               boxes of two corners; left_double, right_single, drag, type, hotkey, scroll, wait, finished
    guilibra   <think> or <thinking>, <answer> with JSON: action_description, action_type, value, point_2d
    qwen       Qwen2.5-VL and Qwen3-VL as they come, and models made of them: a thought, then
               <tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate":
               [84, 120]}}</tool_call>, one or several; also without tags, with single quotes, a comma too
               many, arguments in a string, a box for a point. Coordinates: `image` for Qwen2.5-VL, `0-1000`
               for Qwen3-VL. PROMPTS asks for it, with the tool's description where the model knows it.

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
    at = dict(zip("xy", point or ())) if there else {}
    if kind in ("click", "select", "longpress") and not at:
        raise ActionError(f"{kind}: point_2d {str(point)[:40]} is no place")
    keys = ("hotkey", {"args": [value]}) if "+" in value.strip("+") else ("press", {"keys": value})
    known: dict[str, list] = {
             "click": [("click", at)], "select": [("click", at)], "longpress": [("long_press", at)],
             "write": [("click", at)] * bool(at) + [("write", {"message": value})], "keyboardpress": [keys],
             "scroll": [("swipe", {"direction": OPPOSITE.get(value.lower(), value)})],
             "swipe": [("swipe", {"direction": value})], "wait": [("wait", {"seconds": value or 3})],
             "navigateback": [("go_backward", {})], "back": [("go_backward", {})],
             "navigatehome": [("navigate_home", {})], "openapp": [("open_app", {"app_name": value})],
             "answer": [("response", {"answer": value})], "terminate": [("terminate", {"info": value})]}
    if kind not in known:
        raise ActionError(f"unknown action {str(said.get('action_type'))[:40]}")
    return known[kind]


# ----------------------------------------------------------------------------------------------------- Qwen
QWEN_ACTIONS = {  # its name -> our name, {its argument: ours}; `coordinate` is where the action is
    "left_click": ("click", {}), "right_click": ("rightClick", {}), "middle_click": ("middleClick", {}),
    "double_click": ("doubleClick", {}), "triple_click": ("tripleClick", {}), "mouse_move": ("moveTo", {}),
    "left_click_drag": ("dragTo", {}),  # from where the mouse is
    "type": ("write", {"text": "message"}), "key": ("hotkey", {"text": "args", "keys": "args"}),
    "scroll": ("scroll", {"pixels": "clicks"}), "hscroll": ("hscroll", {"pixels": "clicks"}),
    "wait": ("wait", {"time": "seconds"}), "answer": ("response", {"text": "answer"}),
    "terminate": ("terminate", {"status": "status", "answer": "info", "text": "info"}),
    "visit_url": ("open_url", {"url": "url"}), "history_back": ("go_backward", {}),  # Fara's
}


def read_qwen(text: str) -> Action:
    """What stands before the first call is the thought, and the operation: of it, what follows "Action:"."""
    think = re.search(r"<think>(.*?)(?:</think>|\Z)", text, re.S)
    rest = text[think.end():] if think else text
    blocks = re.findall(r"<tool_call>(.*?)(?=</?tool_call>|\Z)", rest, re.S)
    thought = re.split("<tool_call>" if blocks else r"```|\{", rest, maxsplit=1)[0].strip()
    operation = thought.rpartition("Action:")[2].strip()
    thought = think[1].strip() if think else thought
    try:
        calls = tuple(qwen_call(said) for block in blocks or [rest] for said in objects(block))
    except ActionError as e:
        return Action((), operation, thought, str(e))
    return Action(calls, operation, thought, "")


def objects(text: str) -> list[dict]:
    """The JSON objects of a text, one after another."""
    found = re.search(r"\{.*\}", text, re.S)
    whole = as_object(found[0]) if found else None
    parts = re.split(r"(?<=\})\s*(?=\{)", found[0]) if found and whole is None else []
    said = [as_object(part) for part in parts] or [whole]
    if not all(isinstance(one, dict) for one in said):
        raise ActionError(f"no JSON object in {text.strip()[-80:]!r}")
    return said


def as_object(text: str):
    """JSON as it should be, else with a comma too many, else in single quotes; None where it is neither."""
    no_comma = re.sub(r",(\s*[}\]])", r"\1", text)
    quoted = re.sub(r"(?<=[{\[,:\s])'(.{0,2000}?)'(?=\s*[,:\]}])",
                    lambda m: '"' + m[1].replace("\\'", "'").replace('"', '\\"') + '"', no_comma)
    for reading in (text, no_comma, quoted):
        try:
            return json.loads(reading, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


def qwen_call(said: dict) -> actions.Call:
    """One call of its tool as ours. ActionError where it has no such action, or not what that needs."""
    given = said.get("arguments", said)
    given = as_object(given) if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise ActionError(f"the arguments {str(given)[:80]!r} are no JSON object")
    action = str(given.get("action") or said.get("name"))
    if action not in QWEN_ACTIONS:
        raise ActionError(f"unknown action {action[:40]}")
    name, known = QWEN_ACTIONS[action]
    args = {ours: given[theirs] for theirs, ours in known.items() if given.get(theirs) is not None}
    place = given.get("coordinate")
    if "x" in actions.SIGNATURES[name] and place is not None:
        args["x"] = re.findall(NUMBER, place) if isinstance(place, str) else place
    if action in ("scroll", "hscroll"):   # pixels; a click of ours is a hundred
        args["clicks"] = pixels(action, args.get("clicks")) / 100
    return actions.bind(name, [], args)


def pixels(action: str, given) -> float:
    try:
        return actions.as_number(given)
    except (ValueError, TypeError):
        raise ActionError(f"{action}: pixels={str(given)[:40]!r} is not a number") from None


QWEN_TOOL = {"type": "function", "function": {
    "name": "computer_use",
    "description": "Operates a web browser with mouse and keyboard. You see it in a screenshot of "
                   "{width}x{height} pixels; coordinates are counted from its top left corner.",
    "parameters": {"type": "object", "required": ["action"], "properties": {
        "action": {"type": "string", "enum": [name for name in QWEN_ACTIONS if name not in
                                              ("visit_url", "history_back", "hscroll", "triple_click")],
                   "description":
                       "left_click, right_click, middle_click, double_click: at `coordinate`. mouse_move: "
                       "put the pointer on `coordinate`. left_click_drag: drag from the pointer to "
                       "`coordinate`. type: enter `text` where the cursor is. key: press `keys` together. "
                       "scroll: turn the wheel by `pixels`, at `coordinate` or the page as a whole. wait: "
                       "for `time` seconds. answer: give the `text` that the task asks for, which ends it. "
                       "terminate: end the task with a `status`."},
        "coordinate": {"type": "array", "items": {"type": "integer"}, "description": "[x, y] in pixels"},
        "text": {"type": "string", "description": "for type and answer"},
        "keys": {"type": "array", "items": {"type": "string"},
                 "description": "for key, e.g. [\"ctrl\", \"a\"]"},
        "pixels": {"type": "number", "description": "for scroll: positive is up, negative down"},
        "time": {"type": "number", "description": "for wait: seconds"},
        "status": {"type": "string", "enum": ["success", "failure"], "description": "for terminate"}}}}}
QWEN_SYSTEM = f"""\
You carry out a task in a web browser for somebody else, one action at a time.

# Tools

You act by calling this function:
<tools>
{json.dumps(QWEN_TOOL)}
</tools>

Answer with one sentence that says what you do now and to what end, then with the call, a JSON object with \
the function's name and its arguments between <tool_call> tags:
<tool_call>
{{"name": "computer_use", "arguments": {{"action": "left_click", "coordinate": [x, y]}}}}
</tool_call>

When the task is done, call answer if it asks for something, otherwise terminate.
"""
PROMPTS = {"qwen": {"actor_system": QWEN_SYSTEM, "actor_system_think": QWEN_SYSTEM}}
READERS = {"scalecua": actions.parse, "uitars": read_uitars, "guilibra": read_guilibra, "qwen": read_qwen}

# ------------------------------------------------------------------------------------------------- grounding
_XY = re.compile(rf"x\s*=\s*({NUMBER})\s*,\s*y\s*=\s*({NUMBER})")
_BRACKET = re.compile(rf"[\[(>]\s*({NUMBER})[\s,]+({NUMBER})(?:[\s,]+({NUMBER})[\s,]+({NUMBER}))?\s*[\])<]")


def read_point(text: str) -> list[float] | None:
    """The last place that a grounding model names, as x=84, y=120 or (84, 120) or [84, 120] or
    <point>84 120</point> or the middle of [[x1, y1, x2, y2]]; None where there is none."""
    found = _XY.findall(text) or _BRACKET.findall(text)
    return centre([n for n in found[-1] if n]) if found else None
