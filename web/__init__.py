"""What happens in a browser.

    session.py    the page that an agent sees: opened, acted on, waited for, confined; begin here
    chromium.py   starts, watches and ends browsers; what counts as the web's own fault
"""
