"""Every text that a model reads, and a plan's text <-> its subtasks (sections 3.1-3.3, appendix A).

`load_prompts()` gives the texts below; `load_prompts("mine.json")` replaces any of them by name. A file in
the shape of ScaleCUA's prompt templates is read too: its names and placeholders are translated. Prompts are
text only: the caller puts the screenshot first in the user's turn. Placeholders are filled by `fill` alone,
in one pass, so braces in a task or a page are never taken for a placeholder.

PAPER-GAP 10: the plan is the list `1. title: goal` (`format_plan`) under its own heading right after the
task, and the decomposer writes the same form; without a plan the prompt is exactly the single-model one
(table 2's ablation).
PAPER-GAP 11: the history is one line per earlier step, `None` when there is none.
PAPER-GAP (teacher's order): the appendix puts the guidelines after the screenshots; ours come first, so that
all calls share a prefix that a provider can cache. `--prompt_file` takes a text in any order, the paper's
included.
PAPER-GAP (last screenshot): a step after which no screenshot was recorded says so in words.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from runtime import UserError

ACTION_SPACE = """\
click(x, y, clicks=1, button="left")        click at a point; button is "left", "right" or "middle"
doubleClick(x, y)                           two quick clicks
rightClick(x, y)                            open what the right button opens
moveTo(x, y)                                move the pointer there
dragTo(x, y, button="left")                 drag from the pointer's position to a point
swipe(from_coord=None, to_coord=None, direction="up", amount=0.5)
                                            swipe from one [x, y] to another, or the whole view: "up" shows
                                            what is below; amount is the share of the screen, 0 to 1
press(keys, presses=1)                      press a key, or a list of keys one after another
hotkey(*keys)                               hold keys together, e.g. hotkey("ctrl", "a")
write(message)                              type a text where the cursor is
wait(seconds=3)                             do nothing for a while
response(answer)                            give the answer that the task asks for
terminate(status="success", info=None)      stop; status is "success" or "failure"
"""

ACTOR = """\
You operate a web browser for somebody else. At each step you see the current screenshot and read the task, \
the operations so far and, where there is one, a plan. Decide the next operation and answer with the call \
that carries it out.

## Calls
""" + ACTION_SPACE + """
Coordinates are pixels of the screenshot that you see, counted from its top left corner.

## Form of your answer
%s<operation>
one sentence: what you do now and to what end
</operation>
<action>
one call from the list
</action>

Use only calls of the list. Follow the plan's order where it fits what you see. When the task is done, \
answer it with response if it asks for something, otherwise terminate.
"""

TEXTS = {
    "decomposer_system": """\
You plan for an agent that operates a graphical user interface. You see the screen as it is at the start and \
read the task. Split the task into at most five subtasks in the order in which they have to be done. A \
subtask is a step that visibly changes the page or its state; put small related actions (several filters, \
the fields of one form) into one subtask, and leave out scrolling, hovering and the like. Use fewer than \
five where fewer are enough.

Answer with a numbered list and nothing else, one line per subtask:
1. short title: what has to be true once it is done
""",
    "decomposer_user": "Task: {instruction}",
    "actor_system": ACTOR % "",
    "actor_system_think": ACTOR % "<think>\nwhat you see and why the next operation follows\n</think>\n",
    "actor_user": "What is the next operation?\n\nTask: {instruction}{plan}\n\nOperations so far:\n{history}",
    "plan_block": "\n\nPlan:\n{plan}",
    "history_line": "Step {k}: {line}",
    "no_history": "None",
    "teacher": """\
You read recordings of people and programs working on a screen, and write down the high-level subtasks that \
such a task breaks into.

How to choose the subtasks

1. Essential subgoals only
- A subgoal is a significant step of the user: acting on it leads to another page, or changes the state of \
the system in a way that can be seen in the screenshot.
- Actions that belong closely together, such as setting several filters or ticking several options, are one \
subgoal and not one each.
- Keep what progress depends on most. Minor or dispensable actions (a scroll, a hover) are no subgoals.

2. A concise analysis first
- Before the subtasks, write one short paragraph that sums up the main subgoals. Stress the transitions that \
matter and what happens at the level of whole pages.

3. Goals that can be checked
- Where several related actions were made (filters 1, 2 and 3, say), join them into one subgoal and say by \
which criteria one sees that every required condition holds.
- List essential steps only and leave unnecessary actions out. Five critical subtasks are the most; where \
fewer describe the task well, give fewer.

At the end, judge from your analysis and subtasks whether the recording has unnecessary or redundant \
actions, ones that the task does not need. If every action matters write NONE; otherwise write YES and name \
those actions.

Form of the answer

First the analysis in a single paragraph, then the subtasks that follow from it. Use exactly these markers, \
number the subtasks from 1, and add no other section:

[SUBGOAL ANALYSIS]

One paragraph: the key subgoals and why they follow one another in completing the task.

[SUBTASKS]

SUBTASK 1:

Short title of the action or goal

  - Goal:

A brief description of the subgoal at this point, with the purpose of the action.

[UNNECESSARY ACTIONS]

NONE, or YES and the unnecessary actions

The recording

Task: {TASK}

Screenshot at the start:
{STARTING_IMAGE}

The actions, in order, each with the screenshot after it:

Step {i}: {STEP_i}
Screenshot after step {i}:
{IMAGE_AFTER_STEP_i}
""",
    "teacher_retry": "That answer cannot be used: {problem}. Write the whole answer again in the form asked \
for above.",
    "judge_system": "You grade carefully and answer in the form asked for, without a word more.",
    "judge_answer": """\
A student was asked a question and gave an answer. Compare it with the reference answer: it counts when it \
means the same, however it is worded. The string N/A stands for "cannot be achieved".

question: {question}
reference answer: {reference}
student's answer: {answer}

Answer with exactly one of: correct, incorrect, partially correct.""",
    "judge_reason": """\
A task cannot be carried out, and the reference says why. A student also reported why. Do both name the same \
reason? Other words for it, or an implied reason, count as the same; a student who reports success does not.

task: {question}
reference reason: {reference}
student's report: {answer}

Answer with exactly one of: same, different.""",
    "judge_subgoals": """\
An agent worked on a task by the plan below. From its actions and the screenshots, in order, judge for every \
subtask of the plan whether it was accomplished at some point of the episode.

Task: {instruction}

Plan:
{plan}

Actions:
{history}

Answer with one line per subtask and nothing else: its number, a colon, and done or not done. For example:
1: done
2: not done""",
    "planner_system": """\
You direct the work on a screen step by step. Each time you see the current screenshot, and you decide the \
one next action.

## Calls
""" + ACTION_SPACE + """
Answer with one python code block of exactly two lines: a comment that describes the target and the action \
in words, then one call with named arguments. Do not repeat an action that changed nothing.

Task: {instruction}
""",
    "planner_user": "This is the screen now. What is the next action?",
    "grounder_system": """\
You find things on a screen. Read the description, look at the screenshot, and answer with the call at that \
place:
<action>
click(x=..., y=...)
</action>
Coordinates are pixels of the screenshot that you see.
""",
    "grounder_user": "{description}",
}

# ScaleCUA's names -> ours. The file whose planning prompt has {task_instruction} is for
# its planner.
SCALECUA = {"sys_prompt_planning_cot": "actor_system_think", "sys_prompt_planning_withoutcot": "actor_system",
            "user_prompt_planning": "actor_user", "sys_prompt_grounding": "grounder_system",
            "user_prompt_grounding": "grounder_user"}
SCALECUA_PLANNER = {"sys_prompt_planning_cot": "planner_system", "user_prompt_planning": "planner_user"}
SCALECUA_PLACEHOLDERS = {"{instruction}": "{instruction}{plan}", "{actions}": "{history}",
                         "{ref_expr}": "{description}", "{task_instruction}": "{instruction}"}


@dataclass(frozen=True)
class Subtask:
    title: str
    goal: str = ""


@dataclass(frozen=True)
class Annotation:
    """A teacher's answer. `unnecessary` is "" where every action was needed."""
    analysis: str
    subtasks: tuple[Subtask, ...]
    unnecessary: str = ""


# ------------------------------------------------------------------------------------------------------ texts
def fill(template: str, **values) -> str:
    """Replace {name} by values[name] in one pass: unknown names stay, and no value is read as a template."""
    return re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), template)


@dataclass(frozen=True)
class Prompts:
    """All texts by name. Every method that asks one model returns (system, user)."""
    texts: dict[str, str]
    think: bool = False     # ask the actor for <think> as well

    def decomposer(self, instruction: str) -> tuple[str, str]:
        return self.texts["decomposer_system"], fill(self.texts["decomposer_user"], instruction=instruction)

    def actor(self, instruction: str, history: list[str], plan: str = "") -> tuple[str, str]:
        """`history`: one line per earlier step; `plan`: as `format_plan` writes it, "" for none."""
        block = fill(self.texts["plan_block"], plan=plan) if plan else ""
        user = fill(self.texts["actor_user"], instruction=instruction, plan=block,
                    history=self._history(history))
        return self.texts["actor_system_think" if self.think else "actor_system"], user

    def teacher(self, task: str, steps: list[str], images) -> list[str | int]:
        """Appendix A's message as parts: a str is text, an int i stands for the screenshot after step i (0:
        the one at the start). `images`: the i for which there is one."""
        words = {"TASK": task} | {f"STEP_{k}": step for k, step in enumerate(steps, 1)}
        shots = {"STARTING_IMAGE": 0} | {f"IMAGE_AFTER_STEP_{k}": k for k in range(1, len(steps) + 1)}
        parts = [""]
        for i, piece in enumerate(re.split(r"\{(\w+)\}", _unroll(self.texts["teacher"], len(steps)))):
            if i % 2 and shots.get(piece) in images:
                parts += [shots[piece], ""]
            elif i % 2:
                parts[-1] += "(none was recorded)" if piece in shots else words.get(piece, f"{{{piece}}}")
            else:
                parts[-1] += piece
        return [p for p in parts if not isinstance(p, str) or p.strip()]

    def retry(self, problem: str) -> str:
        """What the teacher is told after an answer that could not be read."""
        return fill(self.texts["teacher_retry"], problem=problem)

    def judge_answer(self, question: str, reference: str, answer: str) -> tuple[str, str]:
        """Asks for correct / incorrect / partially correct."""
        return self._judge("judge_answer", question=question, reference=reference, answer=answer)

    def judge_reason(self, question: str, reference: str, answer: str) -> tuple[str, str]:
        """Asks for same / different: two reasons why a task cannot be done."""
        return self._judge("judge_reason", question=question, reference=reference, answer=answer)

    def judge_subgoals(self, instruction: str, subtasks, history: list[str]) -> tuple[str, str]:
        """Asks for one line `n: done` or `n: not done` per subtask; the caller adds the screenshots."""
        return self._judge("judge_subgoals", instruction=instruction, plan=format_plan(subtasks),
                           history=self._history(history))

    def planner(self, instruction: str) -> tuple[str, str]:
        return fill(self.texts["planner_system"], instruction=instruction), self.texts["planner_user"]

    def grounder(self, description: str) -> tuple[str, str]:
        return self.texts["grounder_system"], fill(self.texts["grounder_user"], description=description)

    def digest(self, *names: str) -> str:
        """12 hex digits over the named texts (all of them by default): artefacts say by it what was asked."""
        chosen = {name: self.texts[name] for name in names or sorted(self.texts)}
        return hashlib.sha256(json.dumps([chosen, self.think]).encode()).hexdigest()[:12]

    def _history(self, lines: list[str]) -> str:
        numbered = [fill(self.texts["history_line"], k=k, line=line) for k, line in enumerate(lines, 1)]
        return "\n".join(numbered) or self.texts["no_history"]

    def _judge(self, name: str, **values) -> tuple[str, str]:
        return self.texts["judge_system"], fill(self.texts[name], **values)


def load_prompts(path: str = "", think: bool = False, literal: bool = False, **texts: str) -> Prompts:
    """The default texts, with those of a JSON file and then those of `texts` in their place.

    `literal` keeps the two characters `\\n` that ScaleCUA's planning prompts hold in place of newlines, for a
    faithful re-run of its evaluation; by default they become newlines, as in its training. Raises UserError
    for an unknown name, a text that lost a placeholder, or a file that is no JSON object of strings.
    """
    given = {}
    if path:
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"prompts file {path}: {e}; give a JSON object of texts by name") from None
        if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
            raise UserError(f"prompts file {path}: not a JSON object of strings")
        if given.keys() & SCALECUA.keys():
            given = _from_scalecua(given, literal)
    given |= texts
    for name, text in given.items():
        if name not in TEXTS:
            raise UserError(f"prompts: no text is called {name!r}; the names are {', '.join(TEXTS)}")
        wanted = {"TASK", "STARTING_IMAGE"} if name == "teacher" else _placeholders(TEXTS[name])
        if lost := sorted(wanted - _placeholders(text)):
            raise UserError(f"prompts: the text {name!r} must contain {{{'}, {'.join(lost)}}}")
    prompts = Prompts(TEXTS | given, think)
    _unroll(prompts.texts["teacher"], 1)
    return prompts


def _placeholders(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


def _from_scalecua(given: dict, literal: bool) -> dict:
    """ScaleCUA's template file -> our names and placeholders. Its evaluation begins with an empty history."""
    planner = "{task_instruction}" in given.get("sys_prompt_planning_cot", "")
    out = {} if planner else {"no_history": ""}
    for name, text in given.items():
        if not literal:
            text = text.replace("\\n", "\n").replace("\\'", "'")
        for theirs, ours in SCALECUA_PLACEHOLDERS.items():
            text = text.replace(theirs, ours)
        out[(SCALECUA_PLANNER if planner else SCALECUA).get(name, name)] = text
    return out


def _unroll(template: str, n: int) -> str:
    """Repeat the teacher text's step block n times: the lines from {STEP_i} to {IMAGE_AFTER_STEP_i}, or, as
    the paper prints it, from {STEP_1} to the last {IMAGE_AFTER_STEP_N} with everything between."""
    block = re.search(r"^[^\n]*\{STEP_(1|i)\}.*?\{IMAGE_AFTER_STEP_\1\}", template, re.S | re.M)
    if not block:
        raise UserError("teacher prompt: {STEP_i} (or {STEP_1}) and then {IMAGE_AFTER_STEP_i} must be in it")
    end = [m.end() for m in re.finditer(r"\{IMAGE_AFTER_STEP_\w+\}", template)][-1]
    number = re.compile(r"\{i\}|(?<![A-Za-z0-9])" + block[1] + r"(?![A-Za-z0-9])")
    steps = "\n\n".join(number.sub(str(k), block[0]) for k in range(1, n + 1))
    return template[:block.start()] + steps + template[end:]


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
        sections = _SECTION.split(text)
        bodies = dict(zip((name.upper() for name in sections[1::2]), sections[2::2]))
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
    names, bodies = [name.upper() for name in sections[::2]], sections[1::2]
    for name in SECTIONS:
        if names.count(name) != 1:
            raise ValueError(f"the section [{name}] is {'there twice' if name in names else 'missing'}")
    if names != SECTIONS:
        raise ValueError("its sections are not in the order " + ", ".join(f"[{name}]" for name in SECTIONS))
    for body in bodies:
        _no_other_heading(body)
    analysis, subtasks = " ".join(bodies[0].split()), _appendix_subtasks(bodies[1])
    if not analysis:
        raise ValueError("the analysis is empty")
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
