"""What an episode is, in memory: a task's plans, their episodes, the steps of each and what was asked in
them.

Group > Plan and Episode > Step > Sample (model/inputs.py). episode_log.py writes them down.
"""

from dataclasses import dataclass, field

from language.plans import format_plan, parse_plan
from model.inputs import Sample
from web.environment import Task


@dataclass
class Plan:
    k: int
    text: str = ""                                # what the actor reads: the list, or a malformed text
    subtasks: list = field(default_factory=list)  # g_1 … g_L, [] when malformed
    malformed: bool = False
    sample: Sample | None = None                  # the answer that it is, None where nobody was asked


@dataclass
class Step:
    png: bytes                                    # o_k, the screenshot the action was chosen from
    samples: list[Sample] = field(default_factory=list)   # all answers of this step, in the order of asking
    acted: int = 0                                # which of them is the action
    line: str = ""                                # this step in later prompts' history (PAPER-GAP 11)
    calls: tuple = ()                             # with page coordinates
    error: str = ""

    @property
    def sample(self) -> Sample:
        """The answer that acted."""
        return self.samples[self.acted]


@dataclass
class Episode:
    group: "Group" = field(repr=False)
    plan: Plan
    m: int
    seed: int
    steps: list[Step] = field(default_factory=list)
    status: str = "infra"
    reward: float | None = None
    reason: str = ""
    answer: str = ""
    seconds: float = 0.0
    error: str = ""                               # traceback of the fault that made it infra
    fault: str = ""                               # its kind, "" where there is none
    retried: list[str] = field(default_factory=list)  # kinds of the faults of earlier attempts
    rewards: dict = field(default_factory=dict)   # of the same episode by other rules, if there are any
    details: dict = field(default_factory=dict)   # what the environment wants to be kept
    secrets: set = field(default_factory=set, repr=False)  # texts that no file may hold
    final_png: bytes | None = None


@dataclass
class Group:
    """All episodes of one task in one rollout batch: K plans, K x M episodes."""
    task: Task
    run: int = 0
    instruction: str = ""
    png: bytes = b""                              # o_0, what the decomposer saw
    plans: list[Plan] = field(default_factory=list)
    episodes: list[list[Episode]] = field(default_factory=list)


def read_plan(k: int, sample: Sample) -> Plan:
    """A sampled plan as the actor will read it; a malformed one as it is, clipped (PAPER-GAP 10)."""
    subtasks = parse_plan(sample.text)
    text = format_plan(subtasks) if subtasks else sample.text.strip()[:1000]
    return Plan(k, text, subtasks, not subtasks, sample)


def all_episodes(groups: list[Group]) -> list[Episode]:
    """The groups' episodes, in an order that does not depend on when one finished."""
    return [episode for group in groups for row in group.episodes for episode in row]


def all_samples(groups: list[Group]) -> list[Sample]:
    """Every answer of the groups' plans and steps, in the same order."""
    plans = [plan.sample for group in groups for plan in group.plans if plan.sample is not None]
    return plans + [sample for e in all_episodes(groups) for step in e.steps for sample in step.samples]
