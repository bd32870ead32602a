"""The environments, found by name: `--env NAME` is sites/NAME.py (or a folder), whose `make(cfg)` gives one.

    miniwob.py    130 small pages on this machine; the shortest example of an environment
    webarena/     WebArena, Lite, Lite-v2: tasks, replicas of sites, how a result is scored
What an environment must do says web/environment.py.
"""
