"""The whole model as stage 2 trains it: one module, on several ranks sharded by FSDP2 (the paper's ZeRO-3)
with float32 masters, float32 reduction and compute in a smaller dtype; its checkpoints, and its export as a
plain Hugging Face directory.
"""

import contextlib
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from model.attention import pieces_to, separate_records
from model.backbone import forward_hidden, load_model, recompute_activations
from model.inputs import Inputs
from model.paths import alone, load_sharded
from model.policy import GumbelSampler, decode, token_logp
from runtime import atomic_directory, drop_old_checkpoints, gather_objects, latest_checkpoint

# N rows of a micro-batch, S positions of a row, n target tokens of all examples


# ------------------------------------------------------------------------------------------------- the module
class TargetLogp(nn.Module):
    """The model as training needs it: a micro-batch of examples.collate -> log π of its target tokens.

    A module, so that FSDP2 gathers around it.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch: dict):
        """(n,) log-probs of the targets; only the positions that predict them are projected."""
        h_NSH = forward_hidden(self.model, batch["inputs"] | {"pieces": batch["pieces"]})
        y = batch["y"]
        return token_logp(h_NSH.flatten(0, 1)[batch["where"]], self.model.lm_head.weight, y, 1.0, y[:0])

    def decode(self, inputs: dict, limit: int, sampler: GumbelSampler, stop_ids: list[int]):
        """policy.decode, one answer for every row of `inputs`; FSDP2 gathers around this method too."""
        n = len(inputs["input_ids"])
        return decode(self.model, inputs, list(range(n)), [limit] * n, sampler, stop_ids)


def on_device(batch: dict, device) -> dict:
    """What the module needs of a micro-batch, on `device`."""
    def move(tensor):
        return tensor.to(device, non_blocking=True)
    return {"inputs": {k: move(t) for k, t in batch["inputs"].items()}, "y": move(batch["y"]),
            "where": move(batch["where"]), "pieces": batch["pieces"] and pieces_to(batch["pieces"], device)}


def answers(module: TargetLogp, prompts: list[list[int]], images: dict, limit: int,
            inputs: Inputs) -> list[str]:
    """What the model writes after each prompt, greedily, in at most `limit` tokens: drawn by the policy's own
    loop, so as stages 3 and 4 draw. `images`: pixel_values and image_grid_thw of all of them."""
    device = images["pixel_values"].device
    texts = {k: t.to(device) for k, t in inputs.texts(prompts, left=True).items()}
    grids = images["image_grid_thw"]
    positions, _ = module.model.model.get_rope_index(image_grid_thw=grids, **texts)
    n = len(prompts)
    sampler = GumbelSampler([0] * n, [0.0] * n, torch.tensor(inputs.banned, device=device), device)
    asked = texts | {"pixel_values": images["pixel_values"], "image_grid_thw": grids,
                     "position_ids": positions}
    drawn = module.decode(asked, limit, sampler, inputs.stop_ids)
    return [inputs.tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in drawn]


def clip_and_step(module, optimizer, lr: float, max_norm: float) -> float:
    """Clip, step with learning rate `lr`, clear the gradients; returns the norm before the clip."""
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# --------------------------------------------------------------------------------------------------- sharding
def build(cfg, world) -> TargetLogp:
    """The model, ready to train on this rank: float32 parameters, sharded where there are several ranks.
    `cfg`: model, dtype, freeze_vision, checkpointing."""
    model = separate_records(load_model(cfg.model, world.device, "float32"))
    if cfg.freeze_vision:
        model.model.visual.blocks.requires_grad_(False)
        model.model.visual.patch_embed.requires_grad_(False)
    if cfg.checkpointing:
        recompute_activations(model)
    module = TargetLogp(model.train())
    return shard(module, getattr(torch, cfg.dtype)) if world.size > 1 else module


def shard(module: TargetLogp, dtype: torch.dtype) -> TargetLogp:
    """FSDP2 over all ranks, one group of parameters per decoder layer and vision block, the rest in one."""
    whole = MixedPrecisionPolicy(dtype, torch.float32)
    # a block's inputs keep their dtype: the vision tower's rotary angles are float32
    inner = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in [*module.model.model.language_model.layers, *module.model.model.visual.blocks]:
        fully_shard(block, mp_policy=inner)
    fully_shard(module, mp_policy=whole)
    register_fsdp_forward_method(module, "decode")
    return module


@contextlib.contextmanager
def gathered(module):
    """Within, what a forward pass gathers stays: ranks may then generate different numbers of tokens without
    waiting for one another."""
    sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]     # the first is the whole module
    for m in sharded[1:]:
        m.set_reshard_after_forward(False, recurse=False)
    yield
    for m in sharded[1:]:
        m.set_reshard_after_forward(True, recurse=False)
    for m in sharded:
        m.reshard()


# ------------------------------------------------------------------------------------------------ checkpoints
class Checkpoints:
    """Sharded checkpoints of model and optimizer: copied to the host while the run waits, written to disk
    while it goes on, and there under their number only when they are complete."""

    def __init__(self, directory: Path, module, inputs: Inputs, optimizer, world, keep: int):
        self.directory = directory
        self.module = module
        self.inputs = inputs                      # written beside, as in any model directory
        self.optimizer = optimizer
        self.world = world
        self.keep = keep
        self.pending = None                       # what is being written,
        self.step = 0                             # and the state after how many steps that is
        # the writer's collectives run beside those of the training loop, so they need a group of their own
        self.group = torch.distributed.new_group(backend="gloo") if world.size > 1 else None

    def state(self) -> dict:
        """Of this rank."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self) -> int:
        """Load the newest checkpoint, if there is one, also on another number of ranks; returns its step."""
        newest = latest_checkpoint(self.directory)
        if newest is None:
            return 0
        state = self.state()
        load_sharded(state, newest, self.world)
        set_state_dict(self.module, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        return int(newest.name)

    def save(self, step: int) -> None:
        """Begin to write the state after `step` steps."""
        self.finish()
        self.step = step
        if self.world.main:
            shutil.rmtree(self.temporary, ignore_errors=True)
        gather_objects(None, self.world)
        self.pending = dcp.async_save(self.state(), checkpoint_id=self.temporary, process_group=self.group,
                                      no_dist=alone(self.world))

    def finish(self, wait: bool = True) -> None:
        """Give a written checkpoint its name. Rank 0 writes last of all, once every shard is there."""
        if not self.pending or not (wait or self.pending.done()):
            return
        self.pending.result()
        self.pending = None
        if self.world.main:
            self.module.model.config.save_pretrained(self.temporary)
            self.module.model.generation_config.save_pretrained(self.temporary)
            self.inputs.save(self.temporary)
            self.temporary.replace(self.directory / f"{self.step:06d}")
            drop_old_checkpoints(self.directory, self.keep)

    @property
    def temporary(self) -> Path:
        """Where a checkpoint is written."""
        return self.directory / f".{self.step:06d}.tmp"


def write_hf(module, inputs: Inputs, directory: Path, dtype, world) -> None:
    """The whole model as a Hugging Face directory: weights, tokenizer, chat template, image processor."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.main:
        with atomic_directory(directory) as tmp:
            state = {k.removeprefix("model."): v.to(getattr(torch, dtype)) for k, v in state.items()}
            module.model.config.dtype = getattr(torch, dtype)
            module.model.save_pretrained(tmp, state_dict=state)
            inputs.save(tmp)
