"""This process among all of them: torchrun's environment, and what ranks tell each other."""

import contextlib
import datetime
import os
from dataclasses import dataclass

from runtime.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among all of them; `device` is a torch device string."""
    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def process_group():
    """torchrun's environment -> World, with an initialised process group; without torchrun a world of one."""
    import torch
    import torch.distributed as dist
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda:
        if local >= (n := torch.cuda.device_count()):
            raise UserError(f"process {local} has no GPU: torch sees {n} here; give --nproc_per_node={n}")
        torch.cuda.set_device(local)
    device = f"cuda:{local}" if cuda else "cpu"
    if "RANK" not in os.environ:
        yield World(device=device)
        return
    # after a restart by torchrun, its store still has the addresses of the processes before: one prefix each
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    # ranks wait for the slowest one's browsers in a gloo collective: minutes, on a bad day hours
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
                            timeout=datetime.timedelta(days=1))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def all_reduce_flat_(tensors: list) -> None:
    """Sum a list of same-dtype tensors over all ranks in place, in one collective:
    exact also where ranks have uneven work, which averaging per rank is not."""
    import torch
    import torch.distributed as dist
    if not dist.is_initialized() or dist.get_world_size() == 1 or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view_as(t))


def gather_objects(obj, world: World) -> list:
    """Every rank's `obj`, in rank order, on every rank."""
    import torch.distributed as dist
    if world.size == 1:
        return [obj]
    out = [None] * world.size
    dist.all_gather_object(out, obj)
    return out
