"""The order of rollout batches, and how one may be drawn while another is learnt from."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def schedule(tasks: list, epochs: int, size: int, seed: int) -> list[list]:
    """The rollout batches of a run, each of at most `size` tasks; every epoch is shuffled from (seed,
    epoch)."""
    out = []
    for epoch in range(epochs):
        order = random.Random(f"{seed} {epoch}").sample(tasks, len(tasks))
        out += [order[i:i + size] for i in range(0, len(order), size)]
    return out


def drawn_batches(batches: range, draw: Callable, sync: Callable, cfg):
    """Yields (batch, what `sync` told, what `draw` returned) for one rollout batch after the other. With
    `cfg.pipeline` the next one is under way, on the weights of now, while the caller trains on what it
    got."""
    import torch

    def timed(batch):
        start = time.monotonic()
        return sync(batch) | {"seconds_sync": time.monotonic() - start}
    ahead = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(cfg.cpu_threads,))
    coming = None
    try:
        for batch in batches:
            told, drawn = (coming[0], coming[1].result()) if coming else (timed(batch), draw(batch))
            if cfg.pipeline and batch + 1 in batches:
                coming = timed(batch + 1), ahead.submit(draw, batch + 1)
            yield batch, told, drawn
    finally:
        ahead.shutdown(wait=False)                        # the pool's end ends what is still being drawn
