"""What an actor is to write for a record, and how good an answer is: of stage 2's paper, and of other systems
whose roles act.

PAPER-GAP, what grounding data become (formats of ScaleCUA's 7B recipe): a call is learnt as an action, a box
or a point as JSON in pixels of the image as the model sees it.
"""

import json
import re

from language import actions
from records.recordings import Record

HIT = 0.05                               # a predicted point this close, as a share of each side, counts


def target(record: Record, plan: str, size: tuple[int, int]) -> str:
    """What the actor is to write, whatever the plan is: thought and operation where the record has them, then
    the calls, or the box or point, in pixels of `size`."""
    if record.box:
        pixels = [min(round(v * side), side - 1) for v, side in zip(record.box, (*size, *size))]
        return json.dumps({"bbox_2d" if len(pixels) == 4 else "point_2d": pixels})
    parts = {"think": record.think, "operation": record.operation, "action": record.action(*size)}
    return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for tag, text in parts.items() if text)


def score(text: str, record: Record, size: tuple[int, int]) -> dict[str, float]:
    """How good an answer is: `type` (1: the right actions), `point` (1: inside the true box, or within HIT of
    the true point), `distance` to it, the larger of its shares of width and height, `argument` (1: all others
    equal). What does not apply is absent; a missing point has distance 1."""
    if record.box:
        return _score_place(text, record, size)
    return _score_calls(text, record, size)


def _score_place(text: str, record: Record, size: tuple[int, int]) -> dict[str, float]:
    """Of a box or a point, which is right where its middle lies."""
    found = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(bbox|point)_2d", "", text))
    numbers = [float(v) / size[i % 2] for i, v in enumerate(found)]
    if len(numbers) != len(record.box):
        return {"type": 0.0, "point": 0.0, "distance": 1.0}
    mine = _middle(numbers)
    away = max(abs(a - b) for a, b in zip(mine, _middle(record.box)))
    inside = away <= HIT
    if len(record.box) == 4:
        inside = all(low <= at <= high for low, at, high in zip(record.box[:2], mine, record.box[2:]))
    return {"type": 1.0, "point": float(inside), "distance": min(away, 1.0)}


def _middle(box) -> list[float]:
    """Of 4 numbers; a point is its own."""
    return [sum(box[i::2]) / len(box[i::2]) for i in (0, 1)]


def _score_calls(text: str, record: Record, size: tuple[int, int]) -> dict[str, float]:
    calls = [actions.rescale(c, size, (1, 1)) for c in actions.parse(text).calls]
    same = [c.name for c in calls] == [c.name for c in record.calls]
    scores = {"type": float(same)}
    if true := _numbers(record.calls):
        mine = _numbers(calls)
        away = 1.0
        if same and len(mine) == len(true):
            away = max(abs(a - b) for a, b in zip(mine, true))
        scores |= {"point": float(away <= HIT), "distance": away}
    others = _others(record.calls)
    if any(others):
        scores["argument"] = float(same and _others(calls) == others)
    return scores


def _numbers(calls) -> list[float]:
    """All coordinates, in their order."""
    return [n for call in calls for values in actions.coordinates(call).values() for n in values]


def _others(calls) -> list[dict]:
    """Of each call the arguments that are no coordinates."""
    return [{k: v for k, v in call.args.items() if k not in actions.AXES} for call in calls]
