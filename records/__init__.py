"""What is on disk between the stages; the docstring of the file that writes an artefact defines its fields.

    trajectories.py   GUI recordings, stage 1's decompositions
    examples.py       recordings -> stage 2's training examples
    episode_log.py    episodes.jsonl and screenshots, written by stages 3 and 4; begin here
    results.py        result files and the statistics on them; viewer.html shows every episode
"""
