"""The rules that say how an episode failed."""

import pytest
from fabricated import clicks, episode, step

from records.failures import failure_mode


def scrolls(shots):
    return [step("swipe(direction='up')", f"shots/{shot}.png") for shot in shots]


A = (10, 10)
B = (80, 80)
C = (150, 20)
END = step("terminate()", "shots/9.png")
FAILURES = [  # (episode, mode, rule)
    (dict(steps=[step("response(answer='x')")]), "no real attempt", "stopped without acting"),
    (dict(steps=[step([]), step("wait()"), step([])], status="unparsable"), "no real", "nothing that could"),
    (dict(steps=clicks(A, B, shots="zz")), "no real attempt", "page never changed"),
    (dict(steps=clicks(B, A, (12, 9), (5, 15), C), status="max_steps"), "stuck midway", "1 action three"),
    (dict(steps=clicks(C, A, B, A, B, A, B), status="max_steps"), "stuck midway", "2 actions three"),
    (dict(steps=clicks(A, A, A) + [END]), "stuck midway", "1 action three"),
    (dict(steps=clicks(A, A, A, B) + [END]), "stopped at the wrong place", "by terminate"),
    (dict(steps=clicks(A, B) + [step("response(answer='7')")]), "stopped at the wrong place", "by response"),
    (dict(steps=clicks(A, B)), "stopped at the wrong place", "the page ended"),
    (dict(steps=clicks(A, (30, 10), (50, 10), (70, 10)), status="max_steps"), "other", "steps used up"),
    (dict(steps=clicks(A, B, B, C), status="max_steps"), "other", "steps used up"),
    (dict(steps=scrolls("01234"), status="max_steps"), "other", "steps used up"),
    (dict(steps=scrolls("00000"), status="max_steps"), "stuck midway", "1 action three"),
    (dict(steps=clicks(A, B) + [step([])] * 3, status="unparsable"), "other", "three unreadable"),
]


@pytest.mark.parametrize("parts, mode, rule", FAILURES)
def test_failure_modes(parts, mode, rule):
    found = failure_mode(episode(**parts))
    assert found[0].startswith(mode) and rule in found[1]
