"""Stage 2's data: records on disk -> examples -> the micro-batches of an optimizer step, in worker processes.

`Examples` says what a role learns: which records, asked how, to write what. A system names its own.
`write_index` reads all records once and keeps seven numbers of each; the records stay in their files. It is
good for one set of plans, which `read_index` makes sure of.
`Steps` is a data set whose item is one optimizer step's share of a rank, ready to go to the device. Which
records a step takes is a function of (seed, epoch, step, global_batch) alone; ranks share them so that each
gets about as many tokens, and neither ranks, workers, packing nor micro-batches change the set. Item k needs
no other item, so a resumed run goes on with exactly the next record.

A packed row holds whole records one after another up to `row_tokens`, each with its own M-RoPE positions from
0; without packing a micro-batch is `batch_size` records, padded on the right, which causal attention needs no
mask for. A record over `max_length` tokens is left out whole, one with a broken or impossible image too; the
item says so.
"""

import ctypes
import hashlib
import io
import json
import math
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import runtime
from language.prompts import Prompts
from model.attention import pieces_of
from model.inputs import Inputs, plain
from records import recordings, trajectories

# N records or rows of a micro-batch, S positions of a row, P patches of an image, n target tokens
KINDS = ("step", "step_no_history", "grounding", "box", "point")
FILE, OFFSET, NUMBER, PLAN, COST, GROUP, KIND = range(7)           # columns of the index; PLAN -1: none


# --------------------------------------------------------------------------------------------- what is learnt
@dataclass(frozen=True)
class Examples:
    """What a role learns from the records. A system's EXAMPLES holds one for each of its roles, by name."""
    texts: Callable                      # (record, plan, prompts, the same with thoughts) -> (system, user)
    target: Callable                     # (record, plan, (width, height) as the model sees it) -> its answer
    one_a_trajectory: bool = False       # first record of each that has a plan; else all with something to do
    scored: bool = False                 # answers to held-out records are scored as actions (answers.score)


# ------------------------------------------------------------------------------------------------------ index
def write_index(path: Path, learns: Examples, meta: str, plans: dict[str, str], inputs: Inputs,
                quarantine: recordings.Quarantine) -> None:
    """One row per example, in file order. Of every record with something to do, as often as its data set
    says, with its trajectory's plan where there is one; or of the first record of each planned trajectory."""
    plan_at = plans_of_records(meta, plans, first_only=learns.one_a_trajectory)
    groups: dict[str, int] = {}
    rows = []
    for file, offset, r in recordings.located_records(meta, quarantine, repeat=not learns.one_a_trajectory):
        plan = plan_at.get(r.where, -1)
        wanted = plan >= 0 if learns.one_a_trajectory else r.calls or r.box
        if wanted:
            number = int(r.where.rpartition(":")[2])
            group = groups.setdefault(r.trajectory, len(groups))
            rows.append((file, offset, number, plan, cost(r, inputs), group, KINDS.index(r.kind)))
    runtime.write_atomic(path.with_suffix(".plans"), fingerprint(plans))
    with open(path.with_suffix(".tmp"), "wb") as f:
        np.save(f, np.array(rows, dtype=np.int64).reshape(-1, 7))
    path.with_suffix(".tmp").replace(path)


def plans_of_records(meta: str, plans: dict[str, str], first_only: bool) -> dict[str, int]:
    """Where a record of a planned trajectory stands -> the plan's position in `plans`."""
    if not plans:
        return {}
    number = {id: n for n, id in enumerate(plans)}
    found: dict[str, int] = {}
    for t in trajectories.TrajectoryFiles(meta, recordings.Quarantine()):
        if t.id in plans:
            steps = t.steps[:1] if first_only else t.steps
            found |= {step.where: number[t.id] for step in steps}
    return found


def read_index(path: Path, plans: dict[str, str]) -> np.ndarray:
    """Raises UserError where the index is of other plans: a row has its plan's position among them."""
    of = path.with_suffix(".plans")
    if not of.exists() or of.read_text(encoding="utf-8") != fingerprint(plans):
        raise runtime.UserError(f"{path} was made with other decompositions: give back those that this run "
                                f"began with, or choose another --run_dir")
    return np.load(path, mmap_mode="r")


def fingerprint(plans: dict[str, str]) -> str:
    """Of the plans in their order."""
    return hashlib.sha256(json.dumps(list(plans.items())).encode()).hexdigest()


def cost(record: recordings.Record, inputs: Inputs) -> int:
    """About how many tokens the example has; only the ranks' shares are balanced by it."""
    try:
        width, height = inputs.resized(record.width, record.height)
    except ValueError:                          # a shape that no image may have: left out when it is read
        return 0
    text = len(record.instruction) + len(record.think) + len(record.operation) + sum(map(len, record.history))
    return width * height // inputs.cell ** 2 + text // 4


def split(table: np.ndarray, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows to train on, rows to evaluate on): of each kind, one record of `held_out` trajectories; nothing
    of these trajectories is trained on."""
    dice = random.Random(f"{seed} held out")
    chosen: list[int] = []
    for kind in range(len(KINDS)):
        rows = np.flatnonzero(table[:, KIND] == kind)
        if held_out and len(rows):
            mixed = rows[dice.sample(range(len(rows)), len(rows))]
            _, first = np.unique(table[mixed, GROUP], return_index=True)
            chosen += mixed[np.sort(first)[:held_out]].tolist()
    held = np.array(sorted(chosen), dtype=np.int64)
    return np.flatnonzero(~np.isin(table[:, GROUP], table[held, GROUP])), held


@lru_cache(maxsize=2)
def order_of(n: int, epoch: int, seed: int) -> np.ndarray:
    """The epoch's order of n examples: a function of (seed, epoch) alone."""
    return np.array(random.Random(f"{seed} {epoch}").sample(range(n), n), dtype=np.int64)


# --------------------------------------------------------------------------------------------------- examples
@dataclass
class Encoded:
    """One example as numbers; `target_ids` ends with <|im_end|>, which is learnt like every other token."""
    prompt_ids: list[int]
    target_ids: list[int]
    pixels: torch.Tensor                 # (P, 1176)
    grid: torch.Tensor                   # (1, 3) patches over time, height, width
    size: tuple[int, int]                # pixels of the image as the model sees it
    record: recordings.Record | None

    def __len__(self):
        return len(self.prompt_ids) + len(self.target_ids)


class Source:
    """The examples of a role: number in the index -> Encoded."""

    def __init__(self, table, learns: Examples, meta: str, plans: list[str], prompts: Prompts,
                 thinking: Prompts, inputs: Inputs, max_length: int, dtype: torch.dtype):
        self.table = table
        self.learns = learns
        self.entries = recordings.read_meta(meta)
        self.plans = plans
        self.prompts = prompts
        self.thinking = thinking
        self.inputs = inputs
        self.max_length = max_length
        self.dtype = dtype

    def record(self, i: int) -> recordings.Record:
        file, offset, number = self.table[i, :PLAN].tolist()
        entry = self.entries[file]
        with open(entry.annotation, "rb") as f:
            f.seek(offset)
            return recordings.parse_record(f.readline(), entry, f"{entry.annotation}:{number}")

    def texts(self, r: recordings.Record, plan: str) -> tuple[str, str]:
        """(system, user) of an example."""
        return self.learns.texts(r, plan, self.prompts, self.thinking)

    def __getitem__(self, i: int) -> Encoded:
        """Raises ValueError with the reason for an image that cannot be used, OverflowError when too long."""
        r = self.record(i)
        plan = self.plans[self.table[i, PLAN]] if self.table[i, PLAN] >= 0 else ""
        image, _ = recordings.read_image(r.image)
        prompt_ids, size = self.inputs.encode(*self.texts(r, plan), image)
        text = self.learns.target(r, plan, size)
        try:
            return self._encoded(prompt_ids, text, image, size, r)
        except recordings.IMAGE_ERRORS as e:
            raise ValueError(f"image {r.image}: {e}") from None

    def _encoded(self, prompt_ids, text: str, image: bytes, size, record=None) -> Encoded:
        tokens = self.inputs.tokenizer(plain(text), add_special_tokens=False)["input_ids"]
        target_ids = tokens + [self.inputs.end_id]
        length = len(prompt_ids) + len(target_ids)
        if length > self.max_length:
            raise OverflowError(f"{length} tokens; --max_length is {self.max_length}")
        pixels = self.inputs.pixels([image])
        return Encoded(prompt_ids, target_ids, pixels["pixel_values"].to(self.dtype),
                       pixels["image_grid_thw"], size, record)

    def blank(self) -> Encoded:
        """An example of nothing, for a rank that has fewer micro-batches than another; its weight is 0."""
        png = io.BytesIO()
        Image.new("RGB", (2 * self.inputs.cell,) * 2).save(png, "PNG")
        prompt_ids, size = self.inputs.encode("", "", png.getvalue())
        return self._encoded(prompt_ids, "", png.getvalue(), size)


# ------------------------------------------------------------------------------------------------------ steps
@dataclass(frozen=True)
class Shape:
    """How a rank's records become micro-batches: a matter of memory and speed, never of the result."""
    packing: bool
    row_tokens: int
    batch_size: int


class Steps(torch.utils.data.Dataset):
    """Item k: this rank's share of optimizer step k, as a dict: `batches` (see `collate`), `left_out`
    [(where, reason)], `too_long`, `records`, `targets`, `tokens`, `positions` (tokens and padding)."""

    def __init__(self, source: Source, rows: np.ndarray, global_batch: int, shape: Shape, rank: int,
                 ranks: int, seed: int | None):
        self.source = source
        self.rows = rows
        self.global_batch = global_batch
        self.shape = shape
        self.rank = rank
        self.ranks = ranks
        self.seed = seed                          # None: always in the order of the rows

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(len(self.rows) / self.global_batch)

    def __getitem__(self, step: int) -> dict:
        epoch, at = divmod(step, len(self))
        if self.seed is None:
            order = np.arange(len(self.rows))
        else:
            order = order_of(len(self.rows), epoch, self.seed)
        chosen = self.rows[order[at * self.global_batch:(at + 1) * self.global_batch]]
        mine = share(self.source.table[chosen, COST].tolist(), self.ranks)[self.rank]
        encoded = []
        left_out = []
        too_long = 0
        for i in chosen[mine].tolist():
            try:
                encoded.append(self.source[i])
            except OverflowError as e:
                left_out.append((self.where(i), str(e)))
                too_long += 1
            except ValueError as e:
                left_out.append((self.where(i), str(e)))
        batches = [collate(part, self.source.inputs, self.shape.packing) for part in cut(encoded, self.shape)]
        return {"batches": batches, "left_out": left_out, "too_long": too_long, "records": len(encoded),
                "targets": sum(len(e.target_ids) for e in encoded), "tokens": sum(map(len, encoded)),
                "positions": sum(b["inputs"]["input_ids"].numel() for b in batches)}

    def where(self, i: int) -> str:
        file, _, number = self.source.table[i, :PLAN].tolist()
        return f"{self.source.entries[file].annotation}:{number}"

    def load(self, first: int, last: int, workers: int, device: str):
        """Items first .. last - 1 in order, made ahead by `workers` processes (0: in this one)."""
        return torch.utils.data.DataLoader(
            self, batch_size=None, sampler=range(first, last), collate_fn=_same, num_workers=workers,
            worker_init_fn=_end_with_parent, pin_memory=device.startswith("cuda"),
            prefetch_factor=2 if workers else None)


def _end_with_parent(worker: int) -> None:
    """A worker does not outlive a trainer that was killed: its full queue would hold it back for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)    # PR_SET_PDEATHSIG


def _same(item):
    return item


def share(costs: list[int], ranks: int) -> list[list[int]]:
    """Positions of `costs` for every rank: the largest first, each to the rank that has the least."""
    loads = [0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += costs[i]
        parts[rank].append(i)
    return parts


def cut(encoded: list[Encoded], shape: Shape) -> list[list[Encoded]]:
    """Records -> micro-batches, the longest first: packed rows (first fit), or `batch_size` of about one
    length."""
    ordered = sorted(encoded, key=len, reverse=True)
    if not shape.packing:
        return [ordered[i:i + shape.batch_size] for i in range(0, len(ordered), shape.batch_size)]
    rows: list[list[Encoded]] = []
    room: list[int] = []
    for e in ordered:
        at = next((i for i, free in enumerate(room) if free >= len(e)), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(shape.row_tokens)
        rows[at].append(e)
        room[at] -= len(e)
    return rows


def collate(examples: list[Encoded], inputs: Inputs, packing: bool) -> dict:
    """One micro-batch: `inputs` of the model, `pieces` of a packed row (else None), `where` (positions of the
    flattened rows that predict) and `y` (n,) the targets; `lengths` and `grids` to count with; `examples`."""
    S = sum(map(len, examples)) if packing else max(map(len, examples))
    N = 1 if packing else len(examples)
    ids = torch.full((N * S,), inputs.pad_id)
    position_ids = torch.zeros((3, N * S), dtype=torch.long)
    where = []
    begin = 0
    for e in examples:
        here = slice(begin, begin + len(e))
        ids[here] = torch.tensor(e.prompt_ids + e.target_ids)
        position_ids[:, here] = positions(len(e), e.prompt_ids.index(inputs.image_id), e.grid[0].tolist(),
                                          inputs.images.merge_size)
        where.append(torch.arange(len(e.target_ids)) + begin + len(e.prompt_ids) - 1)
        begin += len(e) if packing else S
    tensors = {"input_ids": ids.view(N, S), "position_ids": position_ids.view(3, N, S),
               "mm_token_type_ids": (ids == inputs.image_id).long().view(N, S),
               "pixel_values": torch.cat([e.pixels for e in examples]),
               "image_grid_thw": torch.cat([e.grid for e in examples])}
    return {"inputs": tensors, "pieces": pieces_of(list(map(len, examples))) if packing else None,
            "where": torch.cat(where), "y": torch.tensor([t for e in examples for t in e.target_ids]),
            "lengths": list(map(len, examples)), "grids": [e.grid[0].tolist() for e in examples],
            "examples": [(e.prompt_ids, e.target_ids, e.size, e.record) for e in examples]}


def positions(length: int, image_at: int, grid: list[int], merge: int) -> torch.Tensor:
    """(3, S) M-RoPE positions of a record with one image: text counts on, an image's cells count rows and
    columns, and the text after it goes on behind the longer side."""
    h = grid[1] // merge
    w = grid[2] // merge
    image = torch.stack([torch.zeros(h * w, dtype=torch.long), torch.arange(h).repeat_interleave(w),
                         torch.arange(w).repeat(h)])
    after = length - image_at - h * w
    return torch.cat([torch.arange(image_at).expand(3, -1), image + image_at,
                      torch.arange(after).expand(3, -1) + image_at + max(h, w)], 1)
