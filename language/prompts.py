"""The texts that a model reads, filled with what they are about (sections 3.1-3.3, appendix A).

`load_prompts()` gives the texts of texts.py; `load_prompts("mine.json")` replaces any of them by name. A file
in the shape of ScaleCUA's prompt templates is read too: its names and placeholders are translated. Prompts
are text only: the caller puts the screenshot first in the user's turn. Placeholders are filled by `fill`
alone, in one pass, so braces in a task or a page are never taken for a placeholder.

PAPER-GAP 10: the plan stands under its own heading right after the task; without a plan the prompt is exactly
the single-model one (table 2's ablation).
PAPER-GAP 11: the history is one line per earlier step, `None` when there is none.
PAPER-GAP (last screenshot): a step after which no screenshot was recorded says so in words.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from language.plans import format_plan
from language.texts import TEXTS
from runtime import UserError

# ScaleCUA's names -> ours. A file whose planning prompt has {task_instruction} is one for its planner.
SCALECUA = {"sys_prompt_planning_cot": "actor_system_think", "sys_prompt_planning_withoutcot": "actor_system",
            "user_prompt_planning": "actor_user", "sys_prompt_grounding": "grounder_system",
            "user_prompt_grounding": "grounder_user"}
SCALECUA_PLANNER = {"sys_prompt_planning_cot": "planner_system", "user_prompt_planning": "planner_user"}
SCALECUA_PLACEHOLDERS = {"{instruction}": "{instruction}{plan}", "{actions}": "{history}",
                         "{ref_expr}": "{description}", "{task_instruction}": "{instruction}"}


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
        parts: list = [""]
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
    given = _read_texts(path) if path else {}
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


def _read_texts(path: str) -> dict[str, str]:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"prompts file {path}: {e}; give a JSON object of texts by name") from None
    if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
        raise UserError(f"prompts file {path}: not a JSON object of strings")
    return given


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
