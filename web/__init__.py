"""What happens in a browser.

    session.py    the page that an agent sees: opened, acted on, waited for, confined; begin here
    effects.py    what each action does to a page
    chromium.py   starts, watches and ends browsers; what counts as the web's own fault
"""
