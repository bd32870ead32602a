"""A discrete-event model of a whole RL run: GPU-hours and wall clock of the paper's design and of ours.

    python bench/simulate.py --paper                      # 647 tasks x 21 episodes on eight GPUs
    python bench/simulate.py --paper --gpu RESULT.json    # with what bench/gpu_7b.py rl measured on a GPU
    python bench/simulate.py --run_dir runs/demo              # how well it foretells a real run's wall clock

A rank is `threads` browsers that look at tasks (open, then wait for the K plans) and play the episodes of
those that have plans (open, then: wait for an answer, wait for the page) and one GPU, which does one thing at
a time: a batch of all requests that wait (at most `max_batch`) or, when none waits, a micro-batch of an
update that is under way (`pipeline`). Ranks meet after each rollout batch and update.
The paper's design is taken to be its lineage's: one task at a time on the node, its plans one after another,
M episodes in lock-step with a fixed wait after each action, a separate pass for the old log-probs, all
samples trained, on the GPUs that do not generate. That code steps its pages one by one; stepped together, the
model comes near the 720 GPU-hours that the paper reports, so this is what counts as its design here.

--run_dir fits page, generation and update costs to every other rollout batch of a run (log.jsonl, steps from
episodes.jsonl) and foretells the seconds of those between from the structure of their episodes: the speed of
a machine drifts, so halves would compare two machines. The first batch, which also starts the browsers, is
left out. Pages and generation are taken to be independent, which they are not where they share two cores.

The last line is JSON: paper_design_gpu_hours, ours_gpu_hours, assumed, measured; with --run_dir: error.
"""

import heapq
import json
import math
import random
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime


@dataclass
class Config:
    paper: bool = False                  # simulate the paper's run
    run_dir: str = ""                    # a run directory of grpo_hier.py to validate the model with
    gpu: str = ""                        # JSON that bench/gpu_7b.py rl wrote: generation and update costs
    tasks: int = 647                     # sec. 4.3
    K: int = 3                           # sec. 4.3
    M: int = 7                           # sec. 4.3
    gpus: int = 8                        # sec. 4.3
    steps: float = 9.0                   # assumed: mean steps of an episode, geometric, cut at max_steps
    max_steps: int = 15                  # sec. 4.3
    tokens: int = 128                    # assumed: tokens of an action or a plan
    threads: int = 42                    # setting: browsers of each GPU
    tasks_per_rank: int = 2              # setting: tasks of a rollout batch on each GPU
    max_batch: int = 64                  # setting: requests of one forward pass
    pipeline: int = 0                    # ours: one rollout batch ahead
    zero: float = 0.5                    # assumed: share of samples whose advantage is 0
    open_s: float = 3.0                  # assumed: s to open a task, lognormal
    page_s: float = 1.5                  # assumed: s of a page after an action, bounded waits, lognormal
    spread: float = 0.8                  # assumed: sigma of the lognormals
    fixed_s: float = 3.0                 # the paper's lineage: fixed wait after an action, WebAgent-R1's code
    prefill_s: float = 0.082             # assumed: s per prompt of 2,500 tokens: 40.6 TFLOP at 50 % of 989
    shared: float = 0.09                 # assumed: share of prompts that share another one's prefill
    decode_s: float = 0.027              # assumed: s per token step of a batch, launch-bound
    decode_row_s: float = 0.0001         # assumed: s per row of a token step
    train_s: float = 0.24                # assumed: s per sample and pass: 107 TFLOP at 45 % of 989
    micro: int = 8                       # samples of a micro-batch
    sync_s: float = 1.0                  # assumed: s per update for gradients, optimizer, files
    seed: int = 0                        # of the random draws


# -------------------------------------------------------------------------------------------------- the model
@dataclass
class Costs:
    """What things take, in seconds; functions of their sizes."""
    page: object                         # () -> after an action
    opening: object                      # () -> a task's first page
    generate: object                     # requests of one batch -> s
    micro: object                        # s of one micro-batch of an update


def rollout(tasks: list[list[int]], plans: int, threads: int, costs: Costs, max_batch: int, backlog: int = 0):
    """Tasks, each a list of its episodes' steps, on so many browsers and a GPU that has `backlog`
    micro-batches to do beside. A first look at a task asks for its plans; then its episodes go before
    further looks. Returns (seconds, of these in generation, micro-batches left)."""
    events, waiting, looks, ready = [], [], deque(tasks), deque()
    now, gpu_free, generation, n = 0.0, 0.0, 0.0, 0
    idle, left = threads, sum(map(len, tasks))

    def later(seconds, kind, job):
        nonlocal n
        n += 1
        heapq.heappush(events, (now + seconds, n, kind, job))
    later(0.0, "free", None)
    while left:
        while idle and (ready or looks):        # a job: steps left, and the episodes that a look lets begin
            later(costs.opening(), "ask", (ready.popleft(), []) if ready else (0, looks.popleft()))
            idle -= 1
        now, _, kind, job = heapq.heappop(events)
        if kind == "ask" and (plans or job[0]):
            waiting.append(job)
        elif kind == "answered":
            for steps, episodes in job:
                later(costs.page() if steps else 0.0, "ask" if steps > 1 else "over", (steps - 1, episodes))
        elif kind != "free":
            idle += 1
            left -= not job[1]
            ready += job[1]
        if gpu_free > now or events and events[0][0] <= now:
            continue                                           # busy; or more arrives at this very moment
        if waiting:
            batch, waiting = waiting[:max_batch], waiting[max_batch:]
            seconds = costs.generate(sum(1 if steps else plans for steps, _ in batch))
            generation += seconds
            later(seconds, "answered", batch)
        elif backlog and left:
            backlog, seconds = backlog - 1, costs.micro
            later(seconds, "free", None)
        else:
            continue
        gpu_free = now + seconds
    return now, generation, backlog


def lengths(n: int, cfg: Config, dice: random.Random) -> list[int]:
    """Steps of n episodes: geometric, cut at max_steps, with mean `steps` after the cut."""
    if cfg.steps >= cfg.max_steps:
        return [cfg.max_steps] * n
    low, high = 1e-9, 1.0                     # the chance to end at a step: the mean falls with it
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** cfg.max_steps) / p > cfg.steps else (low, p)
    return [min(cfg.max_steps, 1 + int(math.log(1 - dice.random()) / math.log(1 - p))) for _ in range(n)]


def drawn(mean: float, spread: float, dice: random.Random) -> float:
    """A lognormal number with this mean."""
    return mean and dice.lognormvariate(math.log(mean) - spread ** 2 / 2, spread)


def costs_of(cfg: Config, dice: random.Random) -> Costs:
    return Costs(lambda: drawn(cfg.page_s, cfg.spread, dice), lambda: drawn(cfg.open_s, cfg.spread, dice),
                 lambda n: (cfg.prefill_s * n * (1 - cfg.shared)
                            + cfg.tokens * (cfg.decode_s + cfg.decode_row_s * n)), cfg.train_s * cfg.micro)


def ours(cfg: Config) -> dict:
    """All rollout batches, one after another or one ahead; ranks wait for the slowest."""
    dice = random.Random(cfg.seed)
    costs, wall, spent = costs_of(cfg, dice), 0.0, defaultdict(float)
    tasks, backlog = cfg.tasks, [0] * cfg.gpus
    while tasks > 0:
        shares = [0] * cfg.gpus
        for i in range(min(tasks, cfg.gpus * cfg.tasks_per_rank)):
            shares[i % cfg.gpus] += 1
        tasks -= sum(shares)
        ends, updates = [], []
        for rank, share in enumerate(shares):
            mine = [lengths(cfg.K * cfg.M, cfg, dice) for _ in range(share)]
            seconds, generation, rest = rollout(mine, cfg.K, cfg.threads, costs, cfg.max_batch, backlog[rank])
            ends.append(seconds + rest * costs.micro)          # then what is left of the last update
            samples = sum(map(sum, mine)) + share * cfg.K
            work = 2 * math.ceil(samples * (1 - cfg.zero) / cfg.micro)
            updates.append(work * costs.micro)
            backlog[rank] = work if cfg.pipeline else 0
            spent["generation"] += generation
            spent["update"] += work * costs.micro
        wall += max(ends) + cfg.sync_s + (0.0 if cfg.pipeline else max(updates))
    wall += max(backlog) * costs.micro
    shares = {k: round(v / wall / cfg.gpus, 3) for k, v in spent.items()}
    shares["no work"] = round(1 - sum(shares.values()), 3)
    return {"gpu_hours": round(wall * cfg.gpus / 3600, 1), "wall_hours": round(wall / 3600, 2),
            "limits": max(shares, key=shares.get), "shares": shares}


def paper_design(cfg: Config, together: bool) -> dict:
    """The lineage's loop, one task at a time on the whole node; `together`: a round's pages are stepped at
    the same time."""
    dice, pages = random.Random(cfg.seed), max if together else sum
    costs, spent = costs_of(replace(cfg, shared=0.0), dice), defaultdict(float)
    for _ in range(cfg.tasks):
        samples = cfg.K
        spent["pages"] += costs.opening()
        spent["generation"] += costs.generate(cfg.K)
        for _ in range(cfg.K):
            live = lengths(cfg.M, cfg, dice)
            samples += sum(live)
            spent["pages"] += pages([costs.opening() for _ in live])
            while live:
                spent["generation"] += costs.generate(len(live))
                spent["pages"] += pages([cfg.fixed_s + costs.page() for _ in live])
                live = [s - 1 for s in live if s > 1]
        # forward for the old log-probs is a third of a pass; each pass waits for the gradient's sum
        spent["update"] += samples * cfg.train_s * (2 + 1 / 3) / (cfg.gpus - 1) + cfg.sync_s
    wall = sum(spent.values())
    return {"gpu_hours": round(wall * cfg.gpus / 3600, 1), "wall_hours": round(wall / 3600, 2),
            "limits": max(spent, key=spent.get), "shares": {k: round(v / wall, 3) for k, v in spent.items()}}


# ----------------------------------------------------------------------------------------- against a real run
def validate(directory: Path, spread: float) -> dict:
    """Costs fitted to every other of a run's batches; the others' seconds, foretold and real. Browsers whose
    pages all took the same time would move in step: `spread` is that of their times."""
    dice, cfg = random.Random(0), runtime.read_settings(directory)
    log = [line for line in runtime.read_jsonl(directory / "log.jsonl") if "phases" in line][1:]
    if len(log) < 4:
        raise runtime.UserError(f"{directory}: {len(log) + 1} rollout batches with phases; 5 are needed")
    steps = defaultdict(lambda: defaultdict(list))         # of each batch's tasks
    for e in runtime.read_jsonl(directory / "episodes.jsonl"):
        steps[e["batch"]][e["task"]].append(len(e["steps"]))
    threads, plans = cfg["threads"], cfg["K"] if cfg["use_plan"] else 0
    tasks = lambda line: list(steps[line["batch"]].values())

    def fit(rows, seconds):
        """Non-negative least squares, by leaving out what comes out negative."""
        A, y = np.array(rows, float), np.array(seconds, float)
        keep = [i for i in range(A.shape[1]) if A[:, i].any()]
        while True:
            x = np.linalg.lstsq(A[:, keep], y, rcond=None)[0]
            if (x >= 0).all() or len(keep) == 1:
                out = np.zeros(A.shape[1])
                out[keep] = x
                return out
            keep.pop(int(x.argmin()))
    known = log[::2]
    count = lambda line: sum(map(sum, tasks(line)))
    opening, page = fit([[line["episodes"] + len(tasks(line)), count(line)] for line in known],
                        [line["phases"]["browser"] * threads for line in known])
    fixed, each = fit([[line["generations"], count(line) + plans * len(tasks(line))] for line in known],
                      [line["phases"]["generation"] for line in known])
    per_sample, still = fit([[line.get("trained_A", 0) + line.get("trained_D", 0), 1] for line in known],
                            [line["seconds"] - line["seconds_rollout"] for line in known])
    costs = Costs(lambda: drawn(page, spread, dice), lambda: drawn(opening, spread, dice),
                  lambda n: fixed + each * n, 0.0)
    print(f"fitted to every other batch: open {opening:.3f} s, page {page:.3f} s, generation {fixed:.3f} "
          f"s + {each:.4f} s per request, update {per_sample:.4f} s per sample + {still:.2f} s")
    foretold, real = [], []
    for line in log[1::2]:
        seconds, _, _ = rollout(tasks(line), plans, threads, costs, cfg["max_batch"])
        trained = line.get("trained_A", 0) + line.get("trained_D", 0)
        foretold.append(seconds + still + per_sample * trained)
        real.append(line["seconds"])
        print(f"batch {line['batch']:3}: foretold {foretold[-1]:7.2f} s, real {real[-1]:7.2f} s")
    error = abs(sum(foretold) / sum(real) - 1)
    return {"foretold_s": round(sum(foretold), 1), "real_s": round(sum(real), 1), "error": round(error, 4)}


# ------------------------------------------------------------------------------------------------------- main
def main(cfg: Config) -> None:
    comments = runtime.field_comments(Config)
    shown = {"assumed": "{} {}: {}", "setting": "grpo_hier.py --{} {}: {}"}
    assumed = [shown[kind].format(f.name, getattr(cfg, f.name), what) for f in fields(Config)
               for kind, _, what in [comments[f.name].partition(": ")] if kind in shown]
    measured = []
    if cfg.gpu:
        costs = runtime.read_json(cfg.gpu, "what bench/gpu_7b.py rl printed").get("costs")
        if costs is None:
            raise runtime.UserError(f"--gpu {cfg.gpu}: no costs in it; give what bench/gpu_7b.py rl printed")
        cfg = replace(cfg, **costs)
        measured = [f"{k} {v}: {cfg.gpu}" for k, v in costs.items()]
        assumed = [line for line in assumed if line.split()[0] not in costs]
    result = {}
    if cfg.run_dir:
        result |= validate(Path(cfg.run_dir), cfg.spread)
        measured.append(f"the model's error on {cfg.run_dir}: {result['error']}")
    if cfg.paper:
        design, mine, pipelined = paper_design(cfg, True), ours(cfg), ours(replace(cfg, pipeline=1))
        print(f"the paper's design, reported: 720 GPU-hours {design}")
        print(f"  its pages one by one     {paper_design(cfg, False)}")
        print(f"ours                       {mine}")
        print(f"ours, --pipeline 1         {pipelined}")
        for name, change in (("--threads 8 (default)", {"threads": 8, "tasks_per_rank": 1}),
                             ("--threads 21", {"threads": 21, "tasks_per_rank": 1}),
                             ("pages of 4 s", {"page_s": 4.0}), ("episodes of 15 steps", {"steps": 1e9}),
                             ("no zero advantages", {"zero": 0.0})):
            print(f"ours, {name:21}{ours(replace(cfg, **change))}")
        result |= {"paper_design_gpu_hours": design["gpu_hours"], "ours_gpu_hours": mine["gpu_hours"],
                   "ours_pipelined_gpu_hours": pipelined["gpu_hours"], "assumed": assumed,
                   "measured": measured}
    if not result:
        raise runtime.UserError("nothing to do: give --paper, or a run of grpo_hier.py as --run_dir")
    print(json.dumps(result))


if __name__ == "__main__":
    runtime.launch(main)
