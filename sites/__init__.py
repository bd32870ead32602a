"""The environments, found by name: `--env NAME` is sites/NAME.py (or a folder), whose `make(cfg)` gives one.

    miniwob.py    130 small pages on this machine; the shortest example of an environment
    miniwob_rewards.py   when an episode on one of them is a success
    webarena/     WebArena, Lite, Lite-v2: tasks, replicas of sites, how a result is scored
What an environment must do says web/environment.py.
"""
