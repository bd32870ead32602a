"""What happens in a browser.

    environment.py   what a task, a reward and an environment are; the settings of an episode; begin here
    session.py       the page that an agent sees: opened, acted on, looked at, confined
    settle.py        the wait after an action: for what it caused, and no longer
    effects.py       what each action does to a page
    chromium.py      starts, watches and ends browsers; what counts as the web's own fault
"""
