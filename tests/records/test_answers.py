"""How good an actor's answer to a record is."""

from pathlib import Path

import pytest

from records import recordings
from records.answers import score


def test_scores():
    def record(**more):
        return recordings.Record("", "", Path(), [], "", more.pop("calls", ()), "", 56, 56, "step", "", "",
                                   **more)

    def calls(text):
        return recordings.actions.parse(text).calls
    click = record(calls=calls("click(x=0.5, y=0.5)"))
    near = score("click(x=28, y=29)", click, (56, 56))
    assert near == {"type": 1, "point": 1, "distance": pytest.approx(1 / 56, abs=1e-3)}
    assert score("click(x=28, y=50)", click, (56, 56))["point"] == 0
    ended = score("terminate(status='success')", click, (56, 56))
    assert ended == {"type": 0, "point": 0, "distance": 1}
    write = record(calls=calls("write(message='a')"))
    assert score("write(message='a')", write, (56, 56)) == {"type": 1, "argument": 1}
    assert score("write(message='b')", write, (56, 56)) == {"type": 1, "argument": 0}
    box = record(box=(0.25, 0.25, 0.75, 0.5))
    assert score('{"bbox_2d": [20, 15, 30, 25]}', box, (56, 56))["point"] == 1
    assert score('{"bbox_2d": [0, 0, 10, 10]}', box, (56, 56))["point"] == 0
    assert score("nonsense", box, (56, 56)) == {"type": 0, "point": 0, "distance": 1}
    point = record(box=(0.5, 0.5))
    assert score('{"point_2d": [28, 29]}', point, (56, 56))["point"] == 1
    assert score('{"point_2d": [28, 40]}', point, (56, 56))["point"] == 0
