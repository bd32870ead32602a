"""Stage 5: tables, figures, statistics and the episode viewer, from result files only (paper 4.6, tables 1-3, figure 2).

    python analysis.py curve|curves --runs runs/demo                   learning curve | everything in log.jsonl (PNG)
    python analysis.py compare --a runs/sft --b runs/rl                paired difference B - A (JSON)
    python analysis.py table1|table2 --runs joint=runs/rl,sft=runs/sft Markdown and LaTeX, the paper's rows beside
    python analysis.py table3 --runs runs/demo/decompositions.jsonl
    python analysis.py subgoals --runs joint=runs/rl,sft=runs/sft --base_url URL --model NAME     judge; figure 2
    python analysis.py failures|diagnostics --runs runs/demo           how episodes fail | what the hierarchy does (JSON)
    python analysis.py view --runs runs/sft,runs/rl --out page.html    look at every episode, no network needed

Each takes seconds on one CPU; `subgoals` also asks the judge once per episode and keeps the answers (subgoals.jsonl).
`--runs` takes NAME=DIR,NAME=DIR or DIR,DIR; a directory holds episodes.jsonl (see rollout.py). A task instance is
(task, instance). An episode with reward null has no verdict: it is counted, and enters no mean.
"""

import base64
import functools
import hashlib
import io
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from tqdm import tqdm

import actions
import llm
import prompts
import results
import runtime
from results import compare_systems, counts, key_of, mean_and_se, read_episodes, scores_by_task
from runtime import UserError


@dataclass
class Config:
    runs: str = ""  # result directories, NAME=DIR,NAME=DIR or DIR,DIR
    a: str = ""  # compare, demo: directory of system A, the one to beat
    b: str = ""  # compare, demo: directory of system B
    out: str = ""  # file to write (tables and figures: without its ending); empty: beside the first run's files
    started: float = 0.0  # demo: seconds since the epoch when it began
    window: int = 9  # curve(s): rollout batches in the moving average
    resamples: int = 10000  # draws of the cluster bootstrap and of the permutation test
    alpha: float = 0.05  # 1 - confidence level of every interval
    seed: int = 0  # of the resampling
    profile: str = ""  # score by `rewards[profile]` of each episode instead of `reward`
    bins: int = 5  # subgoals: groups of the completed fraction, figure 2b
    near: int = 12  # failures: calls closer than this many pixels are the same
    base_url: str = ""  # subgoals: OpenAI-compatible judge; empty: only judgements that are already there
    model: str = ""  # subgoals: the judge's name, GPT-5.2-Codex in the paper, sec. 4.6
    prompt_file: str = ""  # subgoals: JSON file with another judge text
    workers: int = 8  # subgoals: questions asked at once
    inline: bool = False  # view: put the screenshots into the page instead of referring to the files


# ---------------------------------------------------------------------------------------------------------------- reading
def named_runs(text: str) -> dict[str, Path]:
    """`NAME=DIR,DIR` -> {name: path}; a directory without a name is called by its own."""
    pairs = [part.strip().rpartition("=")[::2] for part in text.split(",") if part.strip()]
    runs = {name.strip() or Path(path).stem: Path(path.strip()) for name, path in pairs}
    if not runs or len(runs) < len(pairs):
        raise UserError(f"--runs {text!r}: give one or more NAME=DIR, separated by commas, with different names")
    return runs


def beside(path: Path) -> Path:
    return path if path.is_dir() else path.parent


# ----------------------------------------------------------------------------------------------------------------- output
def rounded(x):
    """Any result as JSON shows it: four digits, not-a-number as null, containers descended into."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(v) for v in x]
    return (round(float(x), 4) if math.isfinite(x) else None) if isinstance(x, float) else x


def show(result: dict, out: str = "") -> None:
    """Print one JSON object on one line; write it to `out` too where given."""
    text = json.dumps(rounded(result), ensure_ascii=False)
    if out:
        runtime.write_atomic(out, text + "\n")
    print(text)


def figure(panels: int, columns: int = 3):
    """A matplotlib figure without a display, and its first `panels` axes."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    columns, rows = min(columns, panels), -(-panels // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for i, ax in enumerate(axes.flat):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_visible(i < panels)
    return fig, list(axes.flat)[:panels]


def save_figure(fig, *paths) -> None:
    import matplotlib.pyplot as plt
    for path in paths:
        buffer = io.BytesIO()
        fig.savefig(buffer, format=Path(path).suffix[1:], dpi=120)
        runtime.write_atomic(path, buffer.getvalue())
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------------------- curves
PANELS = {"mean reward": "reward_mean success_rate", "spread of S_i within tasks": "S_std", "loss": "loss_A loss_D",
          "groups without advantage": "zero_adv_A zero_adv_D", "clipped tokens": "clip_A clip_D",
          "largest ratio": "ratio_max", "tokens per response": "len_A len_D", "infra episodes": "infra_rate",
          "seconds": "seconds_rollout seconds_update", "gradient norm": "grad_A grad_D", "KL to SFT": "kl_A kl_D"}


def curve(cfg: Config) -> None:
    """Learning curve: mean reward per rollout batch, one line per run."""
    draw_log(cfg, {"mean reward": "reward_mean"}, "curve")


def curves(cfg: Config) -> None:
    """Everything the training log holds, one panel per subject."""
    draw_log(cfg, PANELS, "curves")


def draw_log(cfg: Config, panels: dict[str, str], stem: str) -> None:
    """Draw logged keys against the batch (every batch faintly, its moving average clearly); print both ends' means."""
    runs = named_runs(cfg.runs)
    logs = {name: read_log(path) for name, path in runs.items()}
    series = {title: [(name, key) for name in logs for key in keys.split() if key in logs[name]]
              for title, keys in panels.items()}
    series = {title: found for title, found in series.items() if found}
    if not series:
        raise UserError(f"the logs of {', '.join(logs)} have none of the keys to draw; are they of grpo_hier.py?")
    fig, axes = figure(len(series))
    for ax, (title, found) in zip(axes, series.items()):
        for name, key in found:
            x, y = logs[name][key]
            line, = ax.plot(x, moving_average(y, cfg.window), label=f"{name} {key}", linewidth=2)
            ax.plot(x, y, color=line.get_color(), alpha=0.35, linewidth=0.8, marker=".", markersize=3)
        ax.set(title=f"{title} (mean of {cfg.window} batches)", xlabel="rollout batch")
        ax.legend(frameon=False, fontsize=8)
    out = Path(cfg.out or beside(next(iter(runs.values()))) / stem).with_suffix(".png")
    save_figure(fig, out)
    rewards = {name: log["reward_mean"][1] for name, log in logs.items() if "reward_mean" in log}
    show({"out": str(out), **{name: {"batches": len(y), "first_third": float(y[:len(y) // 3 + 1].mean()),
                                     "last_third": float(y[-(len(y) // 3 + 1):].mean())} for name, y in rewards.items()}})


def read_log(path: Path) -> dict[str, np.ndarray]:
    """Training log -> {key: array (2, batches) of batch and value}; a batch run again after a kill counts as last run."""
    file = path / "log.jsonl" if path.is_dir() else path
    lines = {line.get("batch", n): line for n, line in enumerate(runtime.read_jsonl(file))}
    if not lines:
        raise UserError(f"{file}: no training log there, or an empty one; run grpo_hier.py first")
    keys = {k for line in lines.values() for k, v in line.items() if type(v) in (int, float)}
    return {k: np.array([(b, lines[b][k]) for b in sorted(lines) if type(lines[b].get(k)) in (int, float)], float).T
            for k in keys}


def moving_average(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` points, over those that exist at the two ends."""
    ones = np.ones(min(window, 2 * len(y) - 1) | 1)
    half = len(ones) // 2
    total, n = (np.convolve(np.pad(v, half), ones, "valid") for v in (y, np.ones_like(y)))
    return total / n


# ------------------------------------------------------------------------------------------------------------- comparison
def compare(cfg: Config) -> None:
    """Paired comparison of two systems, B - A, as one JSON object."""
    show(compare_systems(read_episodes(cfg.a, cfg.profile), read_episodes(cfg.b, cfg.profile), cfg), cfg.out)


def demo(cfg: Config) -> None:
    """The demo's last line: A is the SFT system, B the one after RL."""
    r = compare_systems(read_episodes(cfg.a), read_episodes(cfg.b), cfg)
    show({"sft_success": r["a_success"], "rl_success": r["b_success"], "gain": r["gain"], "gain_ci95": r["gain_ci95"],
          "n": min(r["a_n"], r["b_n"]), "minutes": round((time.time() - cfg.started) / 60, 1) if cfg.started else None})


# ----------------------------------------------------------------------------------------------------------------- tables
SITES = {"gitlab": "GitLab", "map": "Map", "reddit": "Reddit", "shopping": "Shopping", "shopping_admin": "ShoppingAdmin"}
# key | the paper's label | success per site, task-weighted average. * ScaleCUA's report, † GUI-Libra's evaluation, ‡ the authors'
TABLE_1 = """uitars7 | UI-TARS-1.5-7B * | – – – – – 20.8
uitars72 | UI-TARS-72B-DPO * | – – – – – 23.4
scalecua7 | ScaleCUA-7B SFT † | 28.3 15.4 27.6 18.8 30.7 23.9
scalecua32 | ScaleCUA-32B SFT † | 34.2 10.6 26.3 16.5 33.6 24.0
scalecua32_rl | ScaleCUA-32B RL ‡ | 35.0 10.6 21.0 24.4 25.7 24.0
guilibra8 | GUI-Libra-8B † | 31.7 17.3 35.5 26.1 25.0 26.6
gpt4o_uitars | GPT-4o Planner + UI-TARS-1.5-7B Grounder * | – – – – – 22.6
gpt4o_scalecua | GPT-4o Planner + ScaleCUA-7B Grounder * | – – – – – 28.6
joint | JHiMA-WebRL-14B | 47.5 12.5 60.5 29.0 44.3 37.2"""
TABLE_2 = """joint | JHiMA-WebRL-14B | 47.5 12.5 60.5 29.0 44.3 37.2
actor_only | w/o decomposer RL | 37.5 10.6 54.0 25.6 45.7 33.4
flat21 | w/o decomposer (actor-only RL, 21 rollouts) | 44.2 14.4 51.3 26.7 43.6 34.9
flat7 | w/o decomposer (actor-only RL, 7 rollouts) | 39.2 15.4 48.7 30.1 45.7 35.2
sft | w/o RL (SFT decomposer + SFT actor) | 43.3 8.6 59.2 25.6 46.4 35.1"""
TABLE_3 = """windows | Windows | 5,873 2.68 1.2
macos | macOS | 3,845 2.43 1.1
linux | Linux | 25,122 2.20 1.8
android | Android | 17,245 2.84 1.6
web | Web | 24,311 2.73 1.5
total | Total | 76,396 2.56 1.6"""


def table1(cfg: Config) -> None:
    """Success rates (%) per site and overall, the paper's table 1 beside ours."""
    success_table(cfg, TABLE_1, "table1")


def table2(cfg: Config) -> None:
    """Ablations: table 1's columns and the paired difference to the run called `joint`."""
    success_table(cfg, TABLE_2, "table2", base="joint")


def success_table(cfg: Config, printed: str, stem: str, base: str = "") -> None:
    """One row per system, beside the paper's row where a run has its key (joint, sft, flat7, ...) as name.

    Cells are task-weighted success ± standard error clustered by task, in percent; n counts scored episodes.
    """
    runs = {name: read_episodes(path, cfg.profile) for name, path in named_runs(cfg.runs).items()}
    sites = list(dict.fromkeys([*SITES, *sorted({str(e.get("site")) for es in runs.values() for e in es})]))
    paper = {key: (label, cells.split()) for key, label, cells in (row.split(" | ") for row in printed.splitlines())}
    head = ["Method", *(SITES.get(s, s) for s in sites), "Average", "n", "infra", "unknown", "unparsable"]
    head += [f"difference to {base}, {100 - 100 * cfg.alpha:g} % interval, p"] if base else []
    rows = []
    for key in [*paper, *(r for r in runs if r not in paper)]:
        label, cells = paper.get(key, (key, []))
        if cells:
            rows.append([f"{label} (paper)", *cells[:-1], *["–"] * (len(sites) - len(SITES)), cells[-1]])
        if key in runs:
            es = runs[key]
            row = [f"{label} (ours)"] + [percent(mean_and_se(scores_by_task([e for e in es if e.get("site") == s]).values()))
                                         for s in sites]
            rows.append([*row, percent(mean_and_se(scores_by_task(es).values())), *counts(es).values()])
            if base in runs and key != base:
                r = compare_systems(runs[base], es, cfg)
                low, high = (100 * x for x in r["gain_ci95"] or (math.nan, math.nan))
                rows[-1].append(f"{100 * r['gain']:+.1f} [{low:+.1f}, {high:+.1f}], p = {r['p']:.3f}")
    notes = [f"{name}: {text}" for name, path in named_runs(cfg.runs).items() if (text := provenance(path))]
    write_table(cfg, stem, head, rows, notes)


def percent(value: tuple[float, float]) -> str:
    mean, se = (100 * x for x in value)
    return "–" if math.isnan(mean) else f"{mean:.1f}" if math.isnan(se) else f"{mean:.1f} ± {se:.1f}"


def provenance(path: Path) -> str:
    """What a score needs to be believed, as far as the run's summary.json and config.json say it."""
    known = {}
    for file in (beside(path) / "config.json", beside(path) / "summary.json"):
        known |= json.loads(file.read_text()) if file.is_file() else {}
    names = ("env", "split", "system", "profile", "judge", "judge_model", "prompts", "prompts_hash", "commit")
    return ", ".join(f"{k} {known[k]}" for k in names if isinstance(known.get(k), str) and known[k])


def table3(cfg: Config) -> None:
    """Decompositions per platform: how many, their mean length, the share with unnecessary actions; paper beside ours."""
    by_platform: dict[str, list] = {}
    for path in named_runs(cfg.runs).values():
        for d in runtime.read_jsonl(path / "decompositions.jsonl" if path.is_dir() else path):
            for platform in (str(d["platform"]).lower(), "total"):
                by_platform.setdefault(platform, []).append((len(d["subtasks"]), bool(d["unnecessary"])))
    if not by_platform:
        raise UserError(f"--runs {cfg.runs}: no decompositions there; run annotate.py first")
    paper = {key: (label, cells.split()) for key, label, cells in (row.split(" | ") for row in TABLE_3.splitlines())}
    rows = []
    for key in [*(p for p in by_platform if p not in paper), *paper]:
        label, cells = paper.get(key, (key, ["–"] * 3))
        size, unnecessary = np.array(by_platform.get(key, np.full((1, 2), np.nan))).T
        ours = [f"{len(size):,}", f"{size.mean():.2f}", f"{100 * unnecessary.mean():.1f}"] if key in by_platform else ["–"] * 3
        rows.append([label, *(x for pair in zip(ours, cells) for x in pair)])
    write_table(cfg, "table3", ["Platform", "# examples", "(paper)", "avg. # subtasks", "(paper)",
                                "% with unnecessary actions", "(paper)"], rows, [])


def write_table(cfg: Config, stem: str, head: list[str], rows: list[list], notes: list[str]) -> None:
    """Write STEM.md and STEM.tex, print the Markdown; short rows are filled with dashes."""
    rows = [[str(c) for c in row] + ["–"] * (len(head) - len(row)) for row in rows]
    lines = [[c.replace("|", "\\|") for c in row] for row in [head, ["---"] * len(head), *rows]]
    markdown = "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n" + "".join(f"\n{n}\n" for n in notes)
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "±": r"$\pm$",
               "^": r"\textasciicircum{}", "†": r"$\dagger$", "‡": r"$\ddagger$", "–": "--", "<": "$<$", ">": "$>$"}
    body = [" & ".join(c.translate(str.maketrans(special)) for c in row) + r" \\" for row in [head, *rows]]
    latex = "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\hline", body[0], r"\hline", *body[1:], r"\hline",
                       r"\end{tabular}", *(f"% {' '.join(n.split())}" for n in notes)]) + "\n"
    out = Path(cfg.out or beside(next(iter(named_runs(cfg.runs).values()))) / stem)
    runtime.write_atomic(out.with_suffix(".md"), markdown)
    runtime.write_atomic(out.with_suffix(".tex"), latex)
    print(markdown, end="")


# --------------------------------------------------------------------------------------------------------------- subgoals
def subgoals(cfg: Config) -> None:
    """Does finishing subtasks mean success (sec. 4.6)? Judges what is not judged yet, then figure 2 and its numbers."""
    quality = {}
    for name, path in named_runs(cfg.runs).items():
        episodes = [e for e in read_episodes(path, cfg.profile, by_batch=True) if e["reward"] is not None]
        done = judgements(beside(path) / "subgoals.jsonl", [e for e in episodes if e["subtasks"]], path, cfg)
        judged = [e | {"done": done[key_of(e)]} for e in episodes if done.get(key_of(e))]
        if len({e["reward"] > 0 for e in judged}) < 2:
            raise UserError(f"{name}: {len(judged)} of {len(episodes)} episodes have a judgement, and both a success and a "
                            f"failure are needed; give --base_url and --model of a judge")
        quality[name] = subgoal_quality(judged, cfg) | {"unjudged": len(episodes) - len(judged)}
    fig, (roc, rate) = figure(2)
    for name, q in quality.items():
        roc.plot(*zip(*q["roc"]), marker=".", label=f"{name}: {q['auroc']:.3f}")
        bins = [b for b in q["by_fraction"] if b["n"]]
        rate.plot([b["upto"] for b in bins], [b["success"] for b in bins], marker="o", label=f"{name}: tau-b {q['tau_b']:.3f}")
    roc.plot([0, 1], [0, 1], color="gray", linestyle=":")
    roc.set(title="(a) AUROC (paper: joint 0.838, SFT 0.836)", xlabel="false positive rate", ylabel="true positive rate")
    rate.set(title="(b) success by completed share (paper: tau 0.516, 0.503)", xlabel="completed share of subtasks, up to",
             ylabel="success rate", xlim=(0, 1.05), ylim=(-0.02, 1.02))
    for ax in (roc, rate):
        ax.legend(frameon=False)
    out = Path(cfg.out or beside(next(iter(named_runs(cfg.runs).values()))) / "figure2")
    save_figure(fig, out.with_suffix(".png"), out.with_suffix(".svg"))
    show(quality | {"paper": {"auroc": {"joint": 0.838, "sft": 0.836}, "tau_b": {"joint": 0.516, "sft": 0.503}}},
         out.with_suffix(".json"))


def subgoal_quality(episodes: list[dict], cfg: Config) -> dict:
    """AUROC of the completed share (`done`: one bool per subtask) against success, ROC points, success per bin, tau-b.

    tau-b is over episodes, as the paper's must be: its AUROC, success rate and tau agree only so.
    """
    share = np.array([np.mean(e["done"]) for e in episodes])
    success = np.array([e["reward"] > 0 for e in episodes])
    values, level = np.unique(share, return_inverse=True)
    cluster = np.unique([f"{e['task']} {e.get('instance', 0)}" for e in episodes], return_inverse=True)[1]
    by_outcome = []  # of successes, of failures: episodes (task instance, level)
    for chosen in (success, ~success):
        n = np.zeros((cluster.max() + 1, len(values)))
        np.add.at(n, (cluster[chosen], level[chosen]), 1)
        by_outcome.append(n)
    P, N = by_outcome
    above = [np.cumsum(n.sum(0)[::-1]) / n.sum() for n in (N, P)]
    bins = np.array([min(sum(e["done"]) * cfg.bins // len(e["done"]), cfg.bins - 1) for e in episodes])
    tau = stats.kendalltau(share, success)
    return {"n": len(episodes), "tasks": len(P), "success": float(success.mean()), "auroc": float(results.auroc(P.sum(0), N.sum(0))),
            "auroc_ci95": results.interval(lambda w: results.auroc(w @ P, w @ N), len(P), resampling(cfg)),
            "roc": [(0.0, 0.0), *((float(x), float(y)) for x, y in zip(*above))],
            "by_fraction": [{"upto": (b + 1) / cfg.bins, "n": int((bins == b).sum()),
                             "success": float(success[bins == b].mean()) if (bins == b).any() else math.nan}
                            for b in range(cfg.bins)],
            "tau_b": float(tau.statistic), "tau_p": float(tau.pvalue)}


def judgements(file: Path, episodes: list[dict], path: Path, cfg: Config) -> dict[tuple, list[bool]]:
    """key_of(episode) -> done per subtask. Kept answers of the same judge and text are reused; an answer that names not
    every subtask, or a judge that fails, leaves the episode without one (it is asked again next time)."""
    texts = prompts.load_prompts(cfg.prompt_file)
    asked = {"judge": cfg.model, "prompt": texts.digest("judge_system", "judge_subgoals")}
    kept = {key_of(j): j["done"] for j in runtime.read_jsonl(file) if not cfg.model or asked.items() <= j.items()}
    todo = [e for e in episodes if key_of(e) not in kept] if cfg.base_url else []

    def ask(e: dict) -> dict:
        subtasks = [prompts.Subtask(*g) for g in e["subtasks"]]
        system, user = texts.judge_subgoals(e["instruction"], subtasks, [s["history"] for s in e["steps"]])
        shots = [s["shot"] for s in e["steps"]] + [e["final_shot"]] * bool(e.get("final_shot"))
        raise NotImplementedError

    with ThreadPoolExecutor(cfg.workers) as pool:
        for e, done in zip(todo, tqdm(pool.map(ask, todo), total=len(todo), disable=not todo, desc="judge")):
            if done:
                runtime.append_jsonl(file, [dict(zip(KEY, key_of(e))) | asked | {"done": done}])
                kept[key_of(e)] = done
    return kept


def read_verdict(text: str, n: int) -> list[bool]:
    """`1: done` / `2: not done` lines -> n bools. ValueError unless every subtask has exactly one clear line."""
    found = re.findall(r"^\W*(\d+)\W+(not done|done)\W*$", text.lower(), re.M)
    if sorted(int(i) for i, _ in found) != list(range(1, n + 1)):
        raise ValueError(f"not one verdict for each of {n} subtasks: {text[:200]!r}")
    return [verdict == "done" for _, verdict in sorted(found, key=lambda f: int(f[0]))]


# --------------------------------------------------------------------------------------------------------------- failures
def failures(cfg: Config) -> None:
    """Failed episodes by mode, with the rule that put them there; per run."""
    result = {}
    for name, path in named_runs(cfg.runs).items():
        episodes = read_episodes(path, cfg.profile, by_batch=True)
        modes: dict = {}
        for e in episodes:
            if e["reward"] is not None and e["reward"] <= 0:
                mode, rule = failure_mode(e, cfg.near)
                entry = modes.setdefault(mode, {"n": 0, "rules": {}, "example": key_of(e)})
                entry["n"] += 1
                entry["rules"][rule] = entry["rules"].get(rule, 0) + 1
        total = sum(m["n"] for m in modes.values())
        result[name] = {"failures": total, **counts(episodes),
                        "modes": {mode: {"share": m["n"] / total, **m} for mode, m in sorted(modes.items())}}
    show(result, cfg.out)


def failure_mode(e: dict, near: int) -> tuple[str, str]:
    """(mode, rule) of a failed episode; the first rule that holds, in the order of the code."""
    calls = [read_calls(tuple(s["calls"])) for s in e["steps"]]
    shots = {s["shot"] for s in e["steps"]} | {e.get("final_shot") or e["steps"][-1]["shot"]} if e["steps"] else set()
    stopped = bool(calls) and any(map(actions.is_final, calls[-1]))
    acted = [step for step in calls if any(c.name != "wait" and not actions.is_final(c) for c in step)]
    if not acted:
        return "no real attempt", "stopped without acting" if stopped else "no action that could be carried out"
    if len(shots) == 1:
        return "no real attempt", "the page never changed"
    signs = [(step, s["shot"] if any(c.name in ("swipe", "wait") for c in step) else "")
             for step, s in zip(calls, e["steps"])][:len(calls) - stopped]
    if period := cycle(signs, near, at_end=e["status"] == "failure"):
        return "stuck midway", "the same action three times" if period == 1 else f"a cycle of {period} actions three times"
    if stopped:
        return "stopped at the wrong place", f"by {calls[-1][-1].name}"
    if e["status"] == "failure":
        return "stopped at the wrong place", "the page ended the episode"
    return "other", {"unparsable": "three unreadable answers", "max_steps": "steps used up"}.get(e["status"], e["status"])


def cycle(signs: list, near: int, at_end: bool) -> int:
    """The period p <= 4 of a sequence of p actions done three times over (anywhere, or as the last thing); 0 for none.
    Scrolling or waiting counts as a repetition only while the picture stays the same."""
    for p in (1, 2, 3, 4):
        run = 0
        for t in range(p, len(signs)):
            run = run + 1 if same_action(signs[t], signs[t - p], near) else 0
            if run >= 2 * p and (not at_end or t == len(signs) - 1):
                return p
    return 0


def same_action(a: tuple, b: tuple, near: int) -> bool:
    """Same calls on (where it matters) the same picture; numbers may differ by `near`."""
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(
        c.name == d.name and c.args.keys() == d.args.keys() and all(
            abs(x - d.args[k]) <= near if k in ("x", "y") and None not in (x, d.args[k]) else x == d.args[k]
            for k, x in c.args.items()) for c, d in zip(a[0], b[0]))


@functools.lru_cache(maxsize=100_000)
def read_calls(texts: tuple[str, ...]) -> tuple:
    return tuple(call for text in texts for call in actions.parse(text).calls)


# ------------------------------------------------------------------------------------------------------------ diagnostics
def diagnostics(cfg: Config) -> None:
    """What the hierarchy does in a training run's episodes: credit, luck, diversity of plans, their effect on the actor."""
    show({name: results.hierarchy(read_episodes(path, by_batch=True)) for name, path in named_runs(cfg.runs).items()}, cfg.out)


# ----------------------------------------------------------------------------------------------------------------- viewer
def view(cfg: Config) -> None:
    """Fill viewer.html: one page over one or more runs that opens from disk and loads nothing from the network."""
    runs = named_runs(cfg.runs)
    out = Path(cfg.out or beside(next(iter(runs.values()))) / "episodes.html")
    data = {"runs": [], "images": {}}
    for name, path in runs.items():
        folder, episodes = beside(path), read_episodes(path, cfg.profile, by_batch=True)
        data["runs"].append({"name": name, "episodes": episodes,
                             "prefix": Path(os.path.relpath(folder.resolve(), out.parent.resolve())).as_posix()})
        shots = {s for e in episodes for s in [e.get("final_shot"), *(t["shot"] for t in e["steps"])] if s}
        for shot in shots if cfg.inline else ():
            if (folder / shot).is_file():
                data["images"][f"{len(data['runs']) - 1}/{shot}"] = base64.b64encode((folder / shot).read_bytes()).decode()
    # "<" is escaped so that no text of a model can end the block that holds it; the page builds text nodes only
    blob = json.dumps(rounded(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = (runtime.ROOT / "viewer.html").read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, after = template.replace("@HASH@", f"sha256-{digest}").partition("@DATA@")
    runtime.write_atomic(out, (before + blob + after).encode("utf-8", "replace"))
    show({"out": str(out), "episodes": sum(len(r["episodes"]) for r in data["runs"]), "megabytes": out.stat().st_size / 1e6})


def main(cfg: Config) -> None:
    raise UserError("name what to make: " + ", ".join(f.__name__ for f in COMMANDS))


COMMANDS = (curve, curves, compare, demo, table1, table2, table3, subgoals, failures, diagnostics, view)

if __name__ == "__main__":
    runtime.launch(main, *COMMANDS)
