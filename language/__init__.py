"""Every text between the user, the models and the pages; no browser and no tensor is known here.

    prompts.py    what every model reads, and a plan's text <-> its subtasks; begin here
    actions.py    the grammar of actions: text -> calls
    dialects.py   the same for agents that write actions in a form of their own
"""
