"""What an environment is: tasks that begin on a page and end with a reward; and the settings of an episode.

`load_environment` finds one by name: sites/NAME.py or sites/NAME/. sites/miniwob.py is the shortest example.
"""

import importlib
import importlib.util
import re
from dataclasses import dataclass, field

from runtime import UserError, check, need_directories
from web.session import Session


@dataclass(frozen=True)
class Task:
    id: str                                       # unique within its environment
    site: str                                     # the column of a table that it counts in
    instruction: str = ""                         # x; "" where the page makes it up when it opens
    seed: int = 0                                 # instance of a generated task
    data: dict = field(default_factory=dict, compare=False)
    changes_state: bool = False                   # its episodes must not share a site replica (PAPER-GAP 18)
    leaves_traces: bool = False                   # no reset: the site's later tasks find what it changed


@dataclass
class Verdict:
    reward: float | None                          # R in {0, 1}; None: unknown (an outage of the judge, say)
    reason: str = ""
    rewards: dict = field(default_factory=dict)   # the same episode by other rules: name -> 0, 1 or None


class Environment:
    """What the pool needs of an environment. Methods with a session run in that session's thread."""
    name = ""
    width, height, scale = 1280, 720, 1.0         # viewport in CSS pixels; screenshot pixels per CSS pixel
    fresh_context = True                          # False only where pages keep no state of their own
    quick = False                                 # True where an action on a page requests nothing
    browser_args: list[str] = []                  # further switches of Chromium

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split, in order; UserError for an unknown one."""
        raise NotImplementedError

    def origins(self, task: Task) -> list[str]:
        """Addresses (scheme://host:port) the browser may navigate to during this task."""
        raise NotImplementedError

    def open(self, task: Task, session: Session) -> str:
        """Bring the session's page to the start of the task; returns the instruction x."""
        raise NotImplementedError

    def done(self, session: Session) -> bool:
        """Whether the page itself has ended the episode."""
        return False

    def judge(self, task: Task, session: Session, answer: str) -> Verdict:
        """The terminal reward; called once, after the last step. Without one, the episode is run again."""
        raise NotImplementedError

    def leave(self, session: Session) -> dict:
        """The attempt at an episode is over, well or not; returns what its record should keep (`details`)."""
        return {}

    def close(self) -> None:
        """Stop what the environment started."""


@dataclass(frozen=True)
class RolloutConfig:
    """The settings of stages 3 and 4 that say where and how episodes happen; a system's Config extends it."""
    env: str = "webarena"                         # environment: miniwob or webarena (sites/NAME)
    split: str = "train647"                       # which tasks (docs/webarena.md); miniwob: train, eval
    tasks: str = ""                               # miniwob: page names; webarena: task file or folder
    instances: int = 100                          # miniwob: instances per page and split
    scale: float = 1.0                            # miniwob: screenshot pixels per CSS pixel
    any_reward: bool = False                      # miniwob: a part of the reward is a success, as published
    sites: str = "sites.json"                     # webarena: addresses, accounts, replicas, resets
    patch: str = ""                               # webarena: file with repairs of tasks, by task_id
    auth: str = ""                                # webarena: directory of storage states of logins
    leases: str = ""                              # webarena: directory of locks that all nodes share
    profile: str = "fixed"                        # webarena: evaluator; or scalecua_v2, vab, webarena
    also: str = ""                                # webarena: further profiles to score by, by commas
    judge_model: str = ""                         # webarena: model that grades answers; "": none
    judge_base_url: str = ""                      # webarena: the judge's server; "": OpenAI's
    judge_api: str = "responses"                  # webarena: its protocol: responses or chat
    judge_cache: str = ""                         # webarena: directory of the judge's answers
    prompts: str = ""                             # JSON file that replaces texts of language/texts.py
    threads: int = 8                              # browsers
    max_steps: int = 15                           # T, actions per episode, sec. 4.3
    retries: int = 2                              # further attempts at an episode that browser or site broke
    retry_wait: float = 1.0                       # s before another attempt at a site that is down, doubled
    call_timeout: float = 15.0                    # s, any single browser call, also a navigation
    open_timeout: float = 120.0                   # s, opening a task's start page, or judging an episode
    deadline: float = 600.0                       # s, one attempt at an episode with everything in it
    settle: float = 3.0                           # s, longest wait for a page to become quiet after an action
    quiet: float = 0.1                            # s without a change of the page that count as quiet
    fixed_wait: float = 0.0                       # s after every action, as ScaleCUA; 0: as long as needed
    extra_origins: str = ""                       # further addresses where pages may go, by commas; * for all
    recycle: int = 200                            # a new browser after as many episodes
    browser_ws: str = ""                          # remote Playwright servers, ws://…, by commas; "": local
    memory: float = 2000.0                        # MB that the processes of one browser may take
    max_batch: int = 64                           # requests answered by one forward pass
    cpu_threads: int = 1                          # torch's, where models run on the CPU beside browsers
    coordinates: str = "image"                    # an action's: pixels of image or page, 0-1 or 0-1000
    dialect: str = "scalecua"                     # form of an action; or uitars, guilibra, qwen

    def __post_init__(self):
        check(self, "threads", "instances", "max_steps", "max_batch", "cpu_threads")
        need_directories(self, "auth", "leases", "judge_cache")
        if set("@?") & set(self.browser_ws):
            raise UserError("--browser_ws: no password or token in an address, it would be written down; "
                            "forward the port (ssh -L) and give ws://127.0.0.1:PORT/")


def load_environment(cfg: RolloutConfig) -> Environment:
    """`make(cfg)` of sites/NAME.py: a new environment needs such a file (or folder) and nothing else."""
    if not re.fullmatch(r"\w+", cfg.env) or importlib.util.find_spec(f"sites.{cfg.env}") is None:
        raise UserError(f"--env {cfg.env}: there is no sites/{cfg.env}; there are miniwob and webarena")
    return importlib.import_module(f"sites.{cfg.env}").make(cfg)
