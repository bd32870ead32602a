"""Every text a model reads; a plan's text <-> its subtasks; the teacher's answers in all their spellings."""

import json
from pathlib import Path

import pytest

from language.plans import Annotation, Subtask, format_plan, parse_plan, parse_teacher
from language.prompts import load_prompts
from language.texts import TEXTS
from runtime import UserError

DATA = Path(__file__).resolve().parents[2].parent / "shared"
TEMPLATES = DATA / "data/scalecua/webarena_lite_v2/prompt_template"
PAPER = DATA / "seeds/000_085da43796ecbd44.txt"
ANSWER = """[SUBGOAL ANALYSIS]

First the page, then the button.

[SUBTASKS]

SUBTASK 1:

Open the page

  - Goal:

The page is open.

SUBTASK 2:

Press the button

  - Goal:

It has been pressed.

[UNNECESSARY ACTIONS]

NONE
"""
EXPECTED = Annotation("First the page, then the button.", (
    Subtask("Open the page", "The page is open."), Subtask("Press the button", "It has been pressed.")))


# ------------------------------------------------------------------------------------------------------ texts
def test_values_are_never_read_as_templates():
    p = load_prompts()
    system, user = p.actor("Find {plan} in {history} {0} {", ["typed {instruction}"], "1. use {history}")
    for text in ("Find {plan} in {history} {0} {", "typed {instruction}", "1. use {history}"):
        assert text in user
    parts = p.teacher("{STEP_1} {TASK}", ["{IMAGE_AFTER_STEP_1}"], {0, 1})
    assert parts[1] == 0 and parts[3] == 1
    assert "{STEP_1} {TASK}" in parts[0] and "{IMAGE_AFTER_STEP_1}" in parts[2]


def test_actor_without_plan_is_the_single_model_prompt():
    p = load_prompts()
    with_plan, without = p.actor("Buy it", ["a", "b"], "1. x: y")[1], p.actor("Buy it", ["a", "b"])[1]
    assert without == with_plan.replace("\n\nPlan:\n1. x: y", "")
    assert with_plan.index("Buy it") < with_plan.index("1. x: y") < with_plan.index("Step 1: a\nStep 2: b")
    assert p.actor("Buy it", [])[1].endswith("None")


def test_actor_prompt_names_every_call_of_the_evaluation():
    calls = "click doubleClick rightClick moveTo dragTo swipe press hotkey write wait response terminate"
    for think in (False, True):
        system = load_prompts(think=think).actor("x", [])[0]
        assert all(f"\n{call}(" in system for call in calls.split()) and ("<think>" in system) == think


def test_replacing_texts(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"actor_user": "{history}|{instruction}|{plan}"}))
    p = load_prompts(str(file))
    assert p.actor("t", ["h"])[1] == "Step 1: h|t|" and p.digest() != load_prompts().digest()
    assert p.digest("teacher") == load_prompts().digest("teacher")
    file.write_text(json.dumps({"actor_user": '{"task": {instruction}{plan}, "before": {history}, 0: {}}'}))
    assert load_prompts(str(file)).actor("t", ["h"])[1] == '{"task": t, "before": Step 1: h, 0: {}}'
    for bad, message in ((dict(actor="x"), "no text is called 'actor'"), (dict(actor_user="x"), "{history}"),
                         (dict(teacher="{TASK}{STARTING_IMAGE}"), "STEP_i"), (["x"], "not a JSON object"),
                         (dict(actor_user=3), "not a JSON object of strings")):
        file.write_text(json.dumps(bad))
        with pytest.raises(UserError, match=message):
            load_prompts(str(file))
    with pytest.raises(UserError, match="absent.json"):
        load_prompts(str(tmp_path / "absent.json"))


@pytest.mark.skipif(not TEMPLATES.exists(), reason="shared/data is absent")
def test_scalecua_templates():
    p = load_prompts(str(TEMPLATES / "ours_web.json"), think=True)
    system, user = p.actor("Buy {it}", [], "1. x")
    assert "\n\n## Action Space\ndef click(\n" in system and "\\n" not in system and "('left'" in system
    assert user == ("Please generate the next move according to the UI screenshot, the task and previous "
                    "operations.\n\nTask:\nBuy {it}\n\nPlan:\n1. x\n\nPrevious operations:\n")
    literal = load_prompts(str(TEMPLATES / "ours_web.json"), think=True, literal=True).actor("x", [])[0]
    assert literal.count("\\n") == 98 and literal.count("\\'") == 24
    assert p.grounder("the {button}")[1] == "the {button}" and "Action Space" in p.grounder("x")[0]
    planner = load_prompts(str(TEMPLATES / "gpt_planner.json"))
    assert planner.planner("Buy it")[0].endswith("complete the following task: Buy it")
    assert planner.texts["actor_user"] == TEXTS["actor_user"]


# ---------------------------------------------------------------------------------------------------- teacher
def test_teacher_interleaves_texts_and_screenshots():
    parts = load_prompts().teacher("Buy it", ["one", "two", "three"], {0, 1})
    assert [p for p in parts if not isinstance(p, str)] == [0, 1]
    assert parts[0].endswith("Task: Buy it\n\nScreenshot at the start:\n") and "Step 1: one\n" in parts[2]
    assert "Step 2: two\nScreenshot after step 2:\n(none was recorded)\n\nStep 3: three" in parts[4]
    for marker in ("[SUBGOAL ANALYSIS]", "[SUBTASKS]", "SUBTASK 1:", "  - Goal:", "[UNNECESSARY ACTIONS]"):
        assert parts[0].count(marker) == 1
    other = load_prompts().teacher("Other", ["x"], {0})
    assert parts[0].split("Task:")[0] == other[0].split("Task:")[0]  # the prefix that a provider can cache


@pytest.mark.skipif(not PAPER.exists(), reason="shared/seeds is absent")
def test_the_papers_own_prompt_is_taken():
    text = PAPER.read_text()
    text = text[text.index("You are an AI assistant tasked"):text.index("B P OLICY")]
    parts = load_prompts(teacher=text).teacher("T", ["a", "b", "c", "d"], range(4))
    assert [p for p in parts if not isinstance(p, str)] == [0, 1, 2, 3]
    assert "Step 4: d\nImage URL after step 4:\n(none was recorded)" in parts[-1] and "{" not in parts[-1]
    assert "..." not in "".join(p for p in parts[:-1] if isinstance(p, str))
    assert "filters 1, 2, and 3" in parts[-1]


SPELLINGS = {
    "as asked": ANSWER,
    "brackets": ANSWER.replace("Open the page", "[Open the page]").replace("NONE", "[NONE]"),
    "one line": ANSWER.replace("1:\n\n", "1: ").replace("Goal:\n\n", "Goal: ").replace("NONE", "<NONE>"),
    "bold": ANSWER.replace("[SUBTASKS]", "**[SUBTASKS]**").replace("SUBTASK 2:", "**SUBTASK 2:**").replace(
        "- Goal:", "- **Goal:**").replace("NONE", "None."),
    "headings": ANSWER.replace("[SUB", "### [SUB").replace("SUBTASK 1", "# SUBTASK 1").replace("[U", "## [U"),
    "lower case": ANSWER.replace("[SUBTASKS]", "[Subtasks]:").replace("- Goal", "• goal"),
    "fenced": f"Here it is:\n```text\n{ANSWER}```\n",
    "crlf": ANSWER.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_an_answer(name):
    assert parse_teacher(SPELLINGS[name]) == EXPECTED
    assert parse_plan(SPELLINGS[name]) == list(EXPECTED.subtasks)


@pytest.mark.parametrize("text", [
    "YES the scroll [step 3]", "[YES: the scroll [step 3]]", "<YES> the scroll [step 3]",
    "[YES] the scroll [step 3]", "**YES** – the scroll [step 3]", "Yes, the scroll [step 3]",
    "YES\n\n- the scroll\n  [step 3]"])
def test_spellings_of_unnecessary_actions(text):
    assert parse_teacher(ANSWER.replace("NONE", text)).unnecessary == "the scroll [step 3]"


@pytest.mark.parametrize("text, problem", [
    ("", r"\[SUBGOAL ANALYSIS\] is missing"),
    ("I cannot help.", "is missing"),
    (ANSWER[:ANSWER.index("[UNN")], r"\[UNNECESSARY ACTIONS\] is missing"),
    (ANSWER + ANSWER, "twice"),
    (ANSWER.replace("SUBGOAL ANALYSIS", "X").replace("UNNECESSARY ACTIONS", "SUBGOAL ANALYSIS").replace(
        "[X]", "[UNNECESSARY ACTIONS]"), "order"),
    (ANSWER + "\n[NOTES]\n\nSlow.", r"\[NOTES\] that was not asked for"),
    (ANSWER.replace("SUBTASK 2:", "## Verification\n\nSUBTASK 2:"), "Verification"),
    (ANSWER.replace("First the page, then the button.", ""), "analysis is empty"),
    (ANSWER.replace("SUBTASK 1", "1").replace("SUBTASK 2", "2"), "0 subtasks"),
    (ANSWER.replace("[UNN", "SUBTASK 3: a\n- Goal: b\nSUBTASK 4: a\n- Goal: b\nSUBTASK 5: a\n- Goal: b\n"
                    "SUBTASK 6: a\n- Goal: b\n\n[UNN"), "6 subtasks"),
    (ANSWER.replace("It has been pressed.", ""), "subtask 2 has no goal"),
    (ANSWER.replace("Press the button", ""), "subtask 2 has no title"),
    (ANSWER.replace("NONE", "none of them, but step 3"), "NONE alone"),
    (ANSWER.replace("NONE", "YES"), "NONE alone"),
    (ANSWER.replace("NONE", "perhaps"), "must say"),
])
def test_malformed_answers_say_what_is_wrong(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_teacher(text)


def test_a_bracketed_title_in_capitals_is_no_section():
    assert parse_teacher(ANSWER.replace("Open the page\n", "[LOGIN]\n")).subtasks[0].title == "LOGIN"


# ------------------------------------------------------------------------------------------------------ plans
def test_plan_round_trip():
    plan = [Subtask("Open the page", "It is open: fully"), Subtask("Sort"),
            Subtask("See http://a:80/b", "1. of 2")]
    text = format_plan(plan)
    assert text == "1. Open the page: It is open: fully\n2. Sort\n3. See http://a:80/b: 1. of 2"
    assert parse_plan(text) == plan
    odd = format_plan([Subtask("Sort: by\nprice", "all\n2. items"), Subtask("Note:")])
    assert odd == "1. Sort - by price: all 2. items\n2. Note -" and format_plan(parse_plan(odd)) == odd


def test_plans_of_models():
    assert parse_plan("Sure, the plan:\n1) Open: it is open\n   and loaded\n2. Press\n") == [
        Subtask("Open", "it is open and loaded"), Subtask("Press")]
    five = "\n".join(f"{k}. step {k}" for k in range(1, 6))
    assert len(parse_plan(five)) == 5 and len(parse_plan(five + "\n6. more", limit=6)) == 6
    for malformed in ("", "Open the page", "2. Open", "1. a\n3. b", "1. a\n1. b", five + "\n6. more",
                      "1. : goal", "- a\n- b"):
        assert parse_plan(malformed) == [], malformed
