"""Every text between the user, the models and the pages; no browser and no tensor is known here.

    prompts.py    what every model reads, filled with a task, its plan and its history; begin here
    texts.py      the wording of it
    plans.py      a plan's text <-> its subtasks, and what is read out of the teacher's answer
    actions.py    the grammar of actions: text -> calls
    dialects.py   the same for agents that write actions in a form of their own
"""
