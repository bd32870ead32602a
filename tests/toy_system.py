"""Tests' system: a frozen helper describes the page, a writer acts, a critic values; both learn in turns."""

import sys
from dataclasses import dataclass

import grpo_hier
import rollout
from grpo_hier import clipped, draw, ratio, rewards  # noqa: F401  (a system has what it keeps)
from model.roles import Role
from model.update import Credit, Row
from records.episode import all_episodes


@dataclass(frozen=True)
class Config(grpo_hier.Config):
    helper: str = ""                     # checkpoint of each role
    writer: str = ""                     # likewise
    critic: str = ""                     # likewise
    use_plan: bool = False               # nobody plans


def roles(cfg):
    return [Role("helper", cfg.helper, trained=False, temperature=0.0, max_tokens=4),
            Role("writer", cfg.writer, temperature=0.8, max_tokens=8, lr=cfg.lr),
            Role("critic", cfg.critic, kind="critic", heads=("v",), reads="writer", told=("error",))]


class Agent(rollout.Agent):
    def act(self, png, ask):
        seen = ask("helper", "Say what is there.", self.instruction, png)
        sample = ask("writer", "Act.", f"{self.instruction} {seen.text} {len(self.history)}", png)
        return sample, self.read(sample.text)


def credit(groups, cfg, networks):
    rows = {"writer": [], "critic": []}
    for e in all_episodes(groups):
        for sample, R in zip([step.sample for step in e.steps], rewards(e)):
            place = {"v": [len(sample.prompt_ids) - 1]}
            V = float(networks["critic"].estimate([sample], [place])[0]["v"])
            ramp = [(u + 1) * (R + 1 - V) for u in range(len(sample.response_ids))]
            rows["writer"].append(Row(sample, ramp))
            rows["critic"].append(Row(sample, places=place, target={"v": R + 1}))
    return Credit(rows, {"steps_seen": (len(rows["writer"]), 1)}, [{} for _ in all_episodes(groups)])


def loss(role, m, B, cfg):
    if role == "critic":
        error = sum((v["v"][0] - row.target["v"]).square() for v, row in zip(m.values, m.rows))
        return error / B, {"error": error.detach()}
    term_NT = clipped(ratio(m.logp_NT, m.logp_old_NT), m.adv_NT, cfg.eps)
    return -(term_NT * m.mask_NT).sum() / B, {"clip": 0.0, "kl": 0.0}


def trains(batch, cfg):
    return ["writer"] if batch % 2 == 0 else ["critic"]


if __name__ == "__main__":
    grpo_hier.launch_system(sys.modules[__name__])
