"""Every text that a model reads, by name: what `prompts.load_prompts` gives where a file says nothing else.

Placeholders stand in braces; `prompts.py` fills them.

PAPER-GAP (teacher's order): the appendix puts the guidelines after the screenshots; ours come first, so that
all calls share a prefix that a provider can cache. `--prompt_file` takes a text in any order, the paper's
included.
"""

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
