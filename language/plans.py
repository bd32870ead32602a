"""A plan's text <-> its subtasks (section 3.2), and the teacher's answer -> plan and analysis (appendix A).

PAPER-GAP 10: the plan is the list `1. title: goal`, as `format_plan` writes it; the decomposer writes the
same form and the actor reads it.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Subtask:
    """One item of a plan: a short title, and what has to be true once it is done."""
    title: str
    goal: str = ""


@dataclass(frozen=True)
class Annotation:
    """A teacher's answer. `unnecessary` is "" where every action was needed."""
    analysis: str
    subtasks: tuple[Subtask, ...]
    unnecessary: str = ""


# ------------------------------------------------------------------------------------------------------ plans
def format_plan(subtasks) -> str:
    """`1. title: goal` per line, the only textual form of a plan: the decomposer's target, the actor's
    prompt. Line breaks become spaces and a colon inside a title becomes a dash, so that `parse_plan` reads it
    back."""
    lines = []
    for k, subtask in enumerate(subtasks, 1):
        title = re.sub(r":(?=\s|$)", " -", " ".join(subtask.title.split()))
        goal = " ".join(subtask.goal.split())
        lines.append(f"{k}. {title}" + (f": {goal}" if goal else ""))
    return "\n".join(lines)


def parse_plan(text: str, limit: int = 5) -> list[Subtask]:
    """A plan's text -> its subtasks; [] where it is malformed (no list, not numbered 1..n, an empty title,
    too long).

    Reads `format_plan`'s list and appendix A's form. Words before the list are passed over; further lines of
    an item belong to it.
    """
    if _SUBTASK.search(text):
        sections: list[str] = _SECTION.split(text)
        bodies: dict[str, str] = dict(zip((name.upper() for name in sections[1::2]), sections[2::2]))
        subtasks = _appendix_subtasks(bodies.get("SUBTASKS", sections[0]))
    else:
        pieces = re.split(r"^[ \t]*(\d+)[.)][ \t]+", text, flags=re.M)
        if [int(n) for n in pieces[1::2]] != list(range(1, len(pieces) // 2 + 1)):
            return []
        items = (" ".join(item.split()).partition(": ") for item in pieces[2::2])
        subtasks = [Subtask(title.strip(), goal.strip()) for title, _, goal in items]
    return subtasks if 1 <= len(subtasks) <= limit and all(s.title for s in subtasks) else []


# ------------------------------------------------------------------------------------------- teacher's answer
SECTIONS = ["SUBGOAL ANALYSIS", "SUBTASKS", "UNNECESSARY ACTIONS"]
_SECTION = re.compile(rf"^[ \t#*_]*\[({'|'.join(SECTIONS)})\][ \t:*_]*", re.M | re.I)
_SUBTASK = re.compile(r"^[ \t#*_]*SUBTASK[ \t]+\w+[ \t*_]*:", re.M | re.I)
_GOAL = re.compile(r"^[ \t*•-]*Goal[ \t*_]*:", re.M | re.I)
_OTHER_HEADING = re.compile(r"[#*_ ]*\[(?!NONE\]|YES\])([A-Z][A-Z -]+)\][:*_ ]*|#{1,6} +(?!\W*SUBTASK)(.+)")


def parse_teacher(text: str, limit: int = 5) -> Annotation:
    """Appendix A's answer -> Annotation. Raises ValueError that says what is wrong, for the retry."""
    _, *sections = _SECTION.split(re.sub(r"^[ \t]*```\w*[ \t]*$", "", text, flags=re.M))
    names = [name.upper() for name in sections[::2]]
    bodies = sections[1::2]
    for name in SECTIONS:
        if names.count(name) != 1:
            raise ValueError(f"the section [{name}] is {'there twice' if name in names else 'missing'}")
    if names != SECTIONS:
        raise ValueError("its sections are not in the order " + ", ".join(f"[{name}]" for name in SECTIONS))
    for body in bodies:
        _no_other_heading(body)
    analysis = " ".join(bodies[0].split())
    if not analysis:
        raise ValueError("the analysis is empty")
    subtasks = _appendix_subtasks(bodies[1])
    if not 1 <= len(subtasks) <= limit:
        raise ValueError(f"it has {len(subtasks)} subtasks, and 1 to {limit} are allowed")
    for k, subtask in enumerate(subtasks, 1):
        if not subtask.title or not subtask.goal:
            raise ValueError(f"subtask {k} has no {'goal' if subtask.title else 'title'}")
    return Annotation(analysis, tuple(subtasks), _unnecessary(bodies[2]))


def _no_other_heading(body: str) -> None:
    """Raise ValueError for a section nobody asked for: [CAPITALS] or a markdown heading alone on a line. A
    line after one that ends in a colon (`SUBTASK n:`, `Goal:`) is that field's text, whatever it looks
    like."""
    before = ""
    for line in filter(None, map(str.strip, body.splitlines())):
        heading = _OTHER_HEADING.fullmatch(line)
        if heading and not before.endswith(":"):
            raise ValueError(f"it has a section [{heading[1] or heading[2]}] that was not asked for")
        before = line.rstrip("*_ ")


def _appendix_subtasks(body: str) -> list[Subtask]:
    """The blocks `SUBTASK n:` title `- Goal:` text, with or without line breaks, brackets and stars."""
    fields = (_GOAL.split(block, maxsplit=1) for block in _SUBTASK.split(body)[1:])
    return [Subtask(_plain(title), _plain(" ".join(goal))) for title, *goal in fields]


def _plain(text: str) -> str:
    """One line without the stars around it and without one pair of square brackets around the whole."""
    text = " ".join(text.split()).strip("*_ ")
    inner = re.fullmatch(r"\[([^\[\]]*)\]", text)
    return (inner[1] if inner else text).strip()


def _unnecessary(text: str) -> str:
    """NONE, [NONE], <NONE> -> ""; YES ..., [YES ...], <YES> ... -> what follows. Raises ValueError
    otherwise."""
    text = " ".join(text.split()).strip("*_ ")
    verdict = re.match(r"[\[<(]?\s*(NONE|YES)\b\s*[\]>)]?[\s:;,.*–—-]*", text, re.I)
    if not verdict:
        raise ValueError("[UNNECESSARY ACTIONS] must say NONE, or YES and the actions")
    rest = text[verdict.end():].strip()
    if rest.endswith("]") and rest.count("]") > rest.count("["):
        rest = rest[:-1].strip()
    if (verdict[1].upper() == "NONE") == bool(rest):
        raise ValueError("[UNNECESSARY ACTIONS] must be NONE alone, or YES and the actions by name")
    return rest
