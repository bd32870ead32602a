"""What is on disk between the stages; the docstring of the file that writes an artefact defines its fields.

    episode.py        a task's plans, episodes and steps in memory; begin here
    episode_log.py    the same in episodes.jsonl and screenshots, written by stages 3 and 4
    training_log.py   log.jsonl, one object per rollout batch
    results.py        result files and the statistics on them
    tables.py         the paper's tables, ours beside them; figures.py: curves and figure 2
    failures.py       how a failed episode failed
    viewer.py         viewer.html filled with episodes: one page that shows every step
    ledger.py         stage 1's output and the two files beside it, what it cost and when it stops
    recordings.py     GUI recordings, one record per step
    trajectories.py   records -> trajectories; stage 1's decompositions
    examples.py       records -> stage 2's training examples
    answers.py        what an actor is to write for a record, and how good an answer is
"""
