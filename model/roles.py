"""Roles as data: what a system's networks are, checked before anything starts, and built.

A system (grpo_hier.py, systems/NAME.py) lists its roles; everything behind it knows them by this list only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch

from model.backbone import need_model
from model.critic import Critic, need_critic
from model.paths import with_models
from model.policy import Policy
from runtime import UserError

KINDS = ("policy", "critic", "server")


@dataclass(frozen=True)
class Role:
    """One network of a system. `kind`: a policy on a frozen base with an adapter, a critic, or a model on a
    server, which is never trained."""
    name: str                                     # of its adapter, and of the option with its checkpoint
    checkpoint: str = ""                          # directory of a Qwen2.5-VL, the frozen base
    symbol: str = ""                              # in log keys (`loss_A`); "": the name
    kind: str = "policy"
    trained: bool = True                          # False: stays as it is
    temperature: float = 1.0                      # of sampling; 0: the likeliest token
    max_tokens: int = 512                         # new tokens of an answer
    lr: float = 1e-5                              # of its optimizer
    urls: str = ""                                # its servers, by commas: --engine vllm's, or a server's own
    model: str = ""                               # a server's name for it
    heads: tuple = ()                             # a critic's values, by name
    reads: str = ""                               # a critic: the policy whose samples it reads
    told: tuple = ("clip", "kl")                  # what its loss says beside the loss, for the log

    @property
    def mark(self) -> str:
        return self.symbol or self.name


@dataclass
class Request:
    """One question to one role."""
    role: str
    system: str
    user: str
    png: bytes
    seed: int
    temperature: float
    max_new_tokens: int
    earlier: list = field(default_factory=list)   # Steps before this one, for a model that sees them again


def check_roles(roles: list[Role]) -> None:
    """UserError for roles that cannot work together, or whose checkpoint is missing or of another kind."""
    names = [role.name for role in roles]
    if not 1 <= len(roles) <= 4:
        raise UserError(f"a system has one to four roles, this one {len(roles)}: {', '.join(names)}")
    for what, given in (("name", names), ("symbol", [role.mark for role in roles])):
        if twice := sorted({g for g in given if given.count(g) > 1}):
            raise UserError(f"two roles have the {what} {twice[0]!r}; adapters and log keys are kept by it: "
                            f"rename one of them in the system's roles()")
    for role in roles:
        if role.kind not in KINDS:
            raise UserError(f"the role {role.name} is a {role.kind!r}; a role is one of {', '.join(KINDS)}")
        if role.kind == "server" and not role.model:
            raise UserError(f"--{role.name}_model is missing: the name by which its server knows the model")
        if role.kind == "server":
            continue
        if not role.checkpoint:
            raise UserError(f"--{role.name} is missing: give the directory of the {role.name}'s stage-2 "
                            f"checkpoint")
        if role.kind == "policy":
            need_model(role.checkpoint)
    by_name = {role.name: role for role in roles}
    for role in (role for role in roles if role.kind == "critic"):
        if not role.heads or by_name.get(role.reads, role).kind != "policy":
            raise UserError(f"the critic {role.name} needs heads, and reads=, the policy whose samples it "
                            f"values; name them in the system's roles()")
        need_critic(role.checkpoint, by_name[role.reads].checkpoint)


def addresses(cfg, roles: list[Role]) -> dict[str, list[str]]:
    """The servers of each policy where `--engine vllm`. Raises UserError for one without, and for an address
    with a password: config.json and error texts would show it."""
    out = {}
    for role in (role for role in roles if cfg.engine == "vllm" and role.kind == "policy"):
        out[role.name] = [u.strip().rstrip("/") for u in role.urls.split(",") if u.strip()]
        if not out[role.name]:
            raise UserError(f"--engine vllm needs --{role.name}_url: the {role.name}'s servers, by commas, "
                            f"as http://HOST:8000/v1")
        if any("@" in urlsplit(url).netloc for url in out[role.name]):
            raise UserError(f"--{role.name}_url: no user or password in an address, it would be written "
                            f"down; set VLLM_API_KEY instead")
    return out


def with_checked_roles(cfg, roles_of: Callable):
    """The settings with each role's checkpoint in place of the stage-2 run that its option names. UserError
    for roles that cannot work; loads no weights."""
    cfg = with_models(cfg, *(role.name for role in roles_of(cfg) if role.checkpoint))
    check_roles(roles_of(cfg))
    addresses(cfg, roles_of(cfg))
    return cfg


def build(roles: list[Role], cfg, device: str) -> tuple[dict, dict]:
    """The roles' networks by name, and an optimizer for each role that is trained (PAPER-GAP 16).

    `cfg`: lora_r, lora_alpha, dtype, seed, checkpointing, adam_eps. A role on a server has no network here.
    """
    networks: dict[str, Policy | Critic] = {}
    optimizers = {}
    order = sorted(enumerate(roles), key=lambda item: item[1].kind == "critic")     # who reads comes after
    for i, role in order:
        settings = {"r": cfg.lora_r, "alpha": cfg.lora_alpha, "device": device, "dtype": cfg.dtype,
                    "seed": cfg.seed + i, "checkpointing": cfg.checkpointing}
        if role.kind == "policy":
            networks[role.name] = Policy(role.checkpoint, role.name, **settings)
        elif role.kind == "critic":
            reads = networks[role.reads].inputs
            networks[role.name] = Critic(role.checkpoint, role.name, role.heads, reads, **settings)
        if role.trained and role.kind != "server":
            parameters = networks[role.name].parameters().values()
            optimizers[role.name] = torch.optim.AdamW(parameters, lr=role.lr, betas=(0.9, 0.999),
                                                      eps=cfg.adam_eps, weight_decay=0.0)
    return networks, optimizers
