"""How a failed episode failed: rules over its actions and screenshots (paper 4.6), for analysis.py."""

import functools

from language import actions

TURNING = ("swipe", "scroll", "wait")  # repeating one is a repetition only while the picture stays the same


def failure_mode(e: dict, near: int = 12) -> tuple[str, str]:
    """(mode, rule) of a failed episode: the first rule that holds, in the order of this code. Clicks at most
    `near` pixels apart are the same action."""
    calls = [read_calls(tuple(s["calls"])) for s in e["steps"]]
    stopped = bool(calls) and any(map(actions.is_final, calls[-1]))
    if not any(c.name != "wait" and not actions.is_final(c) for step in calls for c in step):
        return "no real attempt", "stopped without acting" if stopped else "nothing that could be carried out"
    shots = {s["shot"] for s in e["steps"]}
    if e.get("final_shot"):
        shots.add(e["final_shot"])
    if len(shots) == 1:
        return "no real attempt", "the page never changed"
    signs = [(step, s["shot"] if any(c.name in TURNING for c in step) else "")
             for step, s in zip(calls, e["steps"])]
    if period := cycle(signs[:len(signs) - stopped], near, at_end=e["status"] == "failure"):
        return "stuck midway", f"{period} action{'s' * (period > 1)} three times over"
    if e["status"] == "failure":
        rule = f"by {calls[-1][-1].name}" if stopped else "the page ended the episode"
        return "stopped at the wrong place", rule
    rules = {"unparsable": "three unreadable answers in a row", "max_steps": "steps used up"}
    return "other", rules.get(e["status"], str(e["status"]))


def cycle(signs: list, near: int, at_end: bool) -> int:
    """The least p <= 4 so that p actions were done three times over, anywhere or (`at_end`) last; else 0."""
    for p in (1, 2, 3, 4):
        run = 0
        for t in range(p, len(signs)):
            run = run + 1 if same_action(signs[t], signs[t - p], near) else 0
            if run >= 2 * p and (not at_end or t == len(signs) - 1):
                return p
    return 0


def same_action(a: tuple, b: tuple, near: int) -> bool:
    """The same calls on the same picture. `a`, `b`: (calls, screenshot, or "" where it does not matter)."""
    calls_a, shot_a = a
    calls_b, shot_b = b
    if shot_a != shot_b or len(calls_a) != len(calls_b) or not calls_a:
        return False
    return all(same_call(c, d, near) for c, d in zip(calls_a, calls_b))


def same_call(c: actions.Call, d: actions.Call, near: int) -> bool:
    """The same name and arguments, coordinates at most `near` pixels apart."""
    def same(key, x, y):
        coordinates = key in ("x", "y") and x is not None and y is not None
        return abs(x - y) <= near if coordinates else x == y
    return (c.name == d.name and c.args.keys() == d.args.keys()
            and all(same(key, c.args[key], d.args[key]) for key in c.args))


@functools.lru_cache(maxsize=100_000)
def read_calls(texts: tuple[str, ...]) -> tuple:
    """The calls that one step's texts say."""
    return tuple(call for text in texts for call in actions.parse(text).calls)
