"""WebArena's tasks and sites. `environment.py` is the environment (begin here), `tasks.py` reads task files,
`replicas.py` leases copies of the sites, `score.py` computes rewards by the rules of `rules.py`;
`check.py` (`python -m sites.webarena check`) looks for problems in a task file.
"""

from sites.webarena.environment import make

__all__ = ["make"]
