"""What a resumed run needs: networks, optimizers and the random state after a number of rollout batches."""

import pickle
from pathlib import Path

import torch

from runtime.errors import UserError
from runtime.files import atomic_directory, drop_old_checkpoints, latest_checkpoint
from runtime.process import World, gather_objects


def save_checkpoint(directory: Path, done: int, networks: dict, optimizers: dict, keep: int) -> None:
    """Write directory/NNNNNN, complete or not there at all: a folder for each network, with its optimizer
    where it has one."""
    with atomic_directory(directory / f"{done:06d}") as tmp:
        for name, network in networks.items():
            network.save(tmp / name)
            if name in optimizers:
                torch.save(optimizers[name].state_dict(), tmp / name / "optimizer.pt")
        torch.save(torch.get_rng_state(), tmp / "rng.pt")
    drop_old_checkpoints(directory, keep)


def load_checkpoint(directory: Path, networks: dict, optimizers: dict, world: World = World()) -> int:
    """Restore the newest checkpoint, if there is one; returns the number of finished rollout batches.
    UserError where ranks see different ones: rank 0 alone saves them."""
    newest = latest_checkpoint(directory)
    seen = gather_objects(newest and newest.name, world)
    if differ := [rank for rank, name in enumerate(seen) if name != seen[0]]:
        raise UserError(f"--run_dir {directory.parent} must be a directory that all nodes share: the newest "
                        f"checkpoint is {seen[0]} for rank 0, {seen[differ[0]]} for rank {differ[0]}")
    if newest is None:
        return 0
    for name, network in networks.items():
        network.load(newest / name)
    try:
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(torch.load(newest / name / "optimizer.pt", weights_only=True))
        torch.set_rng_state(torch.load(newest / "rng.pt", weights_only=True))
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as e:
        raise UserError(f"{newest} cannot be gone on from ({str(e)[:200]}): remove it, then the run goes on "
                        f"from the checkpoint before, if there is one") from e
    return int(newest.name)
