"""Stage 5: tables, figures, statistics, episode viewer, from result files only (paper 4.6, tables 1-3).

    python analysis.py curve|curves runs/demo                 learning curve | everything logged (PNG)
    python analysis.py compare runs/sft runs/rl               paired difference B - A (JSON)
    python analysis.py table1|table2 joint=runs/rl sft=runs/sft    beside the paper's rows
    python analysis.py table3 runs/demo/decompositions.jsonl
    python analysis.py subgoals joint=runs/rl sft=runs/sft --base_url URL --model NAME   figure 2
    python analysis.py failures|diagnostics runs/demo         how episodes fail | what the hierarchy does
    python analysis.py view runs/sft runs/rl --out page.html  look at every episode

Runs without an option are those of --runs, or --a and --b of compare.
Each takes seconds on one CPU; `subgoals` also asks a judge once per episode and keeps the answers in the
run's subgoals.jsonl, one line each: results.KEY, `done` (a bool per subtask), `judge`, `prompt` (digest).
A run is a directory with episodes.jsonl; statistics, and what counts as a score: records/results.py.
Tables are written as Markdown and LaTeX, figures as PNG (figure 2 as SVG too), the rest as one JSON object.
"""

import base64
import functools
import hashlib
import io
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import runtime
from language import actions, plans, prompts
from model import llm
from records import results
from records.results import (
    Resampling,
    compare_systems,
    counts,
    key_of,
    mean_and_se,
    read_episodes,
    scores_by_task,
)
from runtime import UserError


@dataclass
class Config:
    runs: str = ""  # result directories, NAME=DIR,NAME=DIR or DIR,DIR
    a: str = ""  # compare, demo: directory of system A, the one to beat
    b: str = ""  # compare, demo: directory of system B
    out: str = ""  # file to write; empty: beside the first run's files
    started: float = 0.0  # demo: seconds since the epoch when it began
    window: int = 9  # curve, curves: rollout batches in the moving average
    resamples: int = 10000  # draws of the cluster bootstrap and of the permutation test
    alpha: float = 0.05  # 1 - confidence level of every interval
    seed: int = 0  # of the resampling
    profile: str = ""  # score by `rewards[profile]` of each episode instead of `reward`
    bins: int = 5  # subgoals: groups of the completed share, figure 2b
    near: int = 12  # failures: clicks closer than this many pixels are the same
    base_url: str = ""  # subgoals: OpenAI-compatible server of the judge
    model: str = ""  # subgoals: the judge (GPT-5.2-Codex in sec. 4.6); empty: only answers already kept
    api: str = "chat"  # subgoals: chat or responses
    prompt_file: str = ""  # subgoals: JSON file with another judge text
    workers: int = 8  # subgoals: questions asked at once
    inline: bool = False  # view: put the screenshots into the page instead of referring to the files

    @property
    def how(self) -> Resampling:
        return Resampling(self.resamples, self.alpha, self.seed)


# ------------------------------------------------------------------------------------------- input and output
def named_runs(text: str) -> dict[str, Path]:
    """`NAME=DIR,DIR` -> {name: path}; a directory without a name is called by its own."""
    pairs = [part.strip().rpartition("=")[::2] for part in text.split(",") if part.strip()]
    runs = {name.strip() or Path(path).stem: Path(path.strip()) for name, path in pairs}
    if not runs or len(runs) < len(pairs):
        raise UserError(f"--runs {text!r}: give NAME=DIR, several separated by commas, no name twice")
    return runs


def beside(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def facts(path: Path) -> dict:
    """The run's config.json and result.json, as one object."""
    files = [beside(path) / name for name in ("config.json", "result.json")]
    known = [runtime.read_json(f, "the directory of a run") for f in files if f.is_file()]
    return functools.reduce(dict.__or__, known, {})


def output(cfg: Config, stem: str) -> Path:
    """--out, or `stem` beside the first run's files."""
    first = next(iter(named_runs(cfg.runs).values()))
    return runtime.new_file(cfg.out) if cfg.out else beside(first) / stem


def rounded(x):
    """Any result as JSON shows it: four decimals (small numbers two digits), not-a-number as null."""
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(v) for v in x]
    if isinstance(x, float):
        return None if not math.isfinite(x) else round(float(x), 4) if abs(x) >= 1e-3 else float(f"{x:.2g}")
    return x


def show(result: dict, out="") -> None:
    """Print one JSON object on one line; write it to `out` too where given."""
    text = json.dumps(rounded(result), ensure_ascii=False)
    if out:
        runtime.write_atomic(runtime.new_file(out), text + "\n")
    print(text)


def figure(panels: int, columns: int = 3):
    """A matplotlib figure without a display, and its first `panels` axes."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    columns, rows = min(columns, panels), -(-panels // columns)
    size = (5.2 * columns, 3.6 * rows)
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for i, ax in enumerate(axes.flat):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_visible(i < panels)
    return fig, list(axes.flat)[:panels]


def save_figure(fig, *paths: Path) -> None:
    import matplotlib.pyplot as plt
    for path in paths:
        buffer = io.BytesIO()
        fig.savefig(buffer, format=path.suffix[1:], dpi=120)
        runtime.write_atomic(path, buffer.getvalue())
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------- curves
PANELS = {"reward": "reward_mean", "spread of S_i within tasks": "S_std", "infra": "infra_rate",
          "groups without advantage": "zero_adv_A zero_adv_D", "clipped tokens": "clip_A clip_D",
          "largest ratio": "ratio_max_A ratio_max_D", "tokens per response": "len_A len_D",
          "loss": "loss_A loss_D", "seconds": "seconds_rollout seconds_update",
          "gradient norm": "grad_A grad_D", "KL to SFT": "kl_A kl_D"}


def curve(cfg: Config) -> None:
    """Learning curve: mean reward per rollout batch, one line per run."""
    draw_log(cfg, {"mean reward": "reward_mean"}, "curve.png")


def curves(cfg: Config) -> None:
    """Everything the training log holds, one panel per subject."""
    draw_log(cfg, PANELS, "curves.png")


def draw_log(cfg: Config, panels: dict[str, str], name: str) -> None:
    """Draw logged keys against the batch: every batch faintly, its moving average clearly. Prints the mean
    reward of the first and of the last third."""
    logs = {run: results.read_log(path) for run, path in named_runs(cfg.runs).items()}
    series = {title: [(run, key) for run in logs for key in keys.split() if key in logs[run]]
              for title, keys in panels.items()}
    series = {title: found for title, found in series.items() if found}
    if not series:
        raise UserError(f"the logs of {cfg.runs} have none of the keys to draw; give runs of grpo_hier.py")
    fig, axes = figure(len(series))
    for ax, (title, found) in zip(axes, series.items()):
        for run, key in found:
            x, y = logs[run][key]
            line, = ax.plot(x, moving_average(y, cfg.window), label=f"{run} {key}", linewidth=2)
            ax.plot(x, y, color=line.get_color(), alpha=0.35, linewidth=0.8, marker=".", markersize=3)
        ax.set(title=f"{title} (mean of {cfg.window} batches)", xlabel="rollout batch")
        ax.legend(frameon=False, fontsize=8)
    out = output(cfg, name)
    save_figure(fig, out)
    rewards = {run: np.array_split(log["reward_mean"][1], 3)
               for run, log in logs.items() if "reward_mean" in log}
    show({"out": str(out), **{run: {"batches": sum(map(len, y)), "first_third": float(y[0].mean()),
                                    "last_third": float(y[2].mean()) if len(y[2]) else math.nan}
                              for run, y in rewards.items()}})


def moving_average(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` points (made odd), over those that exist at the two ends."""
    half = min(window // 2, len(y) - 1)
    total, n = (np.convolve(np.pad(v, half), np.ones(2 * half + 1), "valid") for v in (y, np.ones_like(y)))
    return total / n


# ------------------------------------------------------------------------------------------------- comparison
def compare(cfg: Config) -> None:
    """Paired comparison of two systems, B - A, as one JSON object."""
    a, b = (read_episodes(path, cfg.profile) for path in (cfg.a, cfg.b))
    show(compare_systems(a, b, cfg.how), cfg.out)


def demo(cfg: Config) -> None:
    """The demo's last line: A is the SFT system, B the one after RL; n is the smaller number of episodes."""
    r = compare_systems(read_episodes(cfg.a), read_episodes(cfg.b), cfg.how)
    minutes = round((time.time() - cfg.started) / 60, 1) if cfg.started else None
    show({"sft_success": r["a_success"], "rl_success": r["b_success"], "gain": r["gain"],
          "gain_ci95": r["gain_ci95"], "n": min(r["a_n"], r["b_n"]), "minutes": minutes}, cfg.out)


# ----------------------------------------------------------------------------------------------------- tables
SITES = {"gitlab": "GitLab", "map": "Map", "reddit": "Reddit", "shopping": "Shopping",
         "shopping_admin": "ShoppingAdmin"}
# a run's name | the paper's label (* ScaleCUA's report, † GUI-Libra's evaluation, ‡ the authors') | cells
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


def paper_rows(table: str) -> dict[str, tuple[str, list[str]]]:
    return {key: (label, cells.split()) for key, label, cells in (r.split(" | ") for r in table.splitlines())}


def table1(cfg: Config) -> None:
    """Success rates (%) per site and overall, the paper's table 1 beside ours."""
    success_table(cfg, TABLE_1, "table1")


def table2(cfg: Config) -> None:
    """Ablations: table 1's columns and the paired difference to the run called `joint`."""
    success_table(cfg, TABLE_2, "table2", base="joint")


def success_table(cfg: Config, printed: str, stem: str, base: str = "") -> None:
    """One row per run, under the paper's row where the run has its name (joint, sft, flat7, ...).

    Cells are task-weighted success ± standard error clustered by task, in percent; n counts scored episodes.
    """
    runs = {name: read_episodes(path, cfg.profile) for name, path in named_runs(cfg.runs).items()}
    sites = list(dict.fromkeys([*SITES, *sorted(str(e.get("site")) for es in runs.values() for e in es)]))
    head = ["Method", *(SITES.get(s, s) for s in sites), "Average", "n", "infra", "unknown", "unparsable"]
    head += [f"minus {base}, {100 - 100 * cfg.alpha:g} % interval, p"] if base else []
    paper, rows = paper_rows(printed), []
    for key in [*paper, *(name for name in runs if name not in paper)]:
        label, cells = paper.get(key, (key, []))
        if cells:
            rows.append([f"{label} (paper)", *cells[:-1], *["–"] * (len(sites) - len(SITES)), cells[-1]])
        if key in runs:
            parts = [[e for e in runs[key] if str(e.get("site")) == s] for s in sites] + [runs[key]]
            rows.append([f"{label} (ours)", *map(percent, parts), *counts(runs[key]).values()])
            if base in runs and key != base:
                r = compare_systems(runs[base], runs[key], cfg.how)
                low, high = (100 * x for x in r["gain_ci95"] or (math.nan, math.nan))
                rows[-1].append(f"{100 * r['gain']:+.1f} [{low:+.1f}, {high:+.1f}], p = {r['p']:.3g}")
    notes = [f"{name}: {text}" for name, path in named_runs(cfg.runs).items() if (text := provenance(path))]
    notes += [f"all scored by the profile {cfg.profile}"] if cfg.profile else []
    write_table(output(cfg, stem), head, rows, notes)


def percent(episodes: list[dict]) -> str:
    mean, se = (100 * x for x in mean_and_se(scores_by_task(episodes).values()))
    return "–" if math.isnan(mean) else f"{mean:.1f}" if math.isnan(se) else f"{mean:.1f} ± {se:.1f}"


def provenance(path: Path) -> str:
    """What it takes to believe a score, as far as the run's config.json and result.json say it."""
    known = facts(path)
    names = "env split system actor decomposer adapters profile judge prompts prompts_hash commit".split()
    return ", ".join(f"{k} {known[k]}" for k in names if isinstance(known.get(k), str) and known[k])


def table3(cfg: Config) -> None:
    """Decompositions per platform: number, mean length, share with unnecessary actions; paper beside."""
    found: dict[str, list] = {}
    for path in named_runs(cfg.runs).values():
        file = path / "decompositions.jsonl" if path.is_dir() else path
        for d in runtime.read_jsonl(file, keys=("platform", "subtasks", "unnecessary")):
            for platform in (str(d["platform"]).lower(), "total"):
                found.setdefault(platform, []).append((len(d["subtasks"]), bool(d["unnecessary"])))
    if not found:
        raise UserError(f"--runs {cfg.runs}: no decompositions there; run annotate.py first")
    paper, rows = paper_rows(TABLE_3), []
    for key in [*(p for p in found if p not in paper), *paper]:
        label, theirs = paper.get(key, (key, ["–"] * 3))
        ours = ["–"] * 3
        if key in found:
            size, unnecessary = np.mean(found[key], axis=0)
            ours = [f"{len(found[key]):,}", f"{size:.2f}", f"{100 * unnecessary:.1f}"]
        rows.append([label, *(x for pair in zip(ours, theirs) for x in pair)])
    write_table(output(cfg, "table3"), ["Platform", "# examples", "(paper)", "avg. # subtasks", "(paper)",
                                        "% with unnecessary actions", "(paper)"], rows, [])


def write_table(out: Path, head: list[str], rows: list[list], notes: list[str]) -> None:
    """Write OUT.md and OUT.tex, print the Markdown; short rows are filled with dashes."""
    rows = [[str(c) for c in row] + ["–"] * (len(head) - len(row)) for row in rows]
    lines = [[c.replace("|", "\\|") for c in row] for row in [head, ["---"] * len(head), *rows]]
    markdown = "".join(f"| {' | '.join(row)} |\n" for row in lines) + "".join(f"\n{n}\n" for n in notes)
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
        "<": "$<$", ">": "$>$", "±": r"$\pm$", "†": r"$\dagger$", "‡": r"$\ddagger$"}
    body = [" & ".join(c.translate(str.maketrans(special)) for c in row) + r" \\" for row in [head, *rows]]
    latex = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\hline", body[0], r"\hline", *body[1:],
             r"\hline", r"\end{tabular}", *(f"% {' '.join(n.split())}" for n in notes)]
    runtime.write_atomic(out.with_suffix(".md"), markdown)
    runtime.write_atomic(out.with_suffix(".tex"), "\n".join(latex) + "\n")
    print(markdown, end="")


# --------------------------------------------------------------------------------------------------- subgoals
def subgoals(cfg: Config) -> None:
    """Does finishing subtasks mean success (sec. 4.6)? Judges what is not judged yet, then figure 2."""
    quality = {}
    for name, path in named_runs(cfg.runs).items():
        episodes = [e for e in read_episodes(path, cfg.profile, by_batch=True) if e["reward"] is not None]
        planned = [e for e in episodes if e["subtasks"]]
        done = judgements(path, planned, cfg)
        judged = [e | {"done": done[key_of(e)]} for e in planned if key_of(e) in done]
        if len({e["reward"] > 0 for e in judged}) < 2:
            raise UserError(f"{name}: {len(judged)} of {len(planned)} episodes are judged, and AUROC takes a "
                            f"success and a failure; give a judge with --base_url and --model")
        quality[name] = results.subgoal_quality(judged, cfg.bins, cfg.how) | {
            "unjudged": len(planned) - len(judged), "without_plan": len(episodes) - len(planned)}
    out = output(cfg, "figure2")
    draw_figure2(quality, out)
    paper = {"joint": {"auroc": 0.838, "tau_b": 0.516}, "sft": {"auroc": 0.836, "tau_b": 0.503}}
    show(quality | {"paper": paper}, out.with_suffix(".json"))


def draw_figure2(quality: dict, out: Path) -> None:
    """ROC curves and success by completed share, as PNG and SVG."""
    fig, (roc, rate) = figure(2)
    for name, q in quality.items():
        roc.plot(*zip(*q["roc"]), marker=".", label=f"{name}: {q['auroc']:.3f}")
        rate.plot([b["share"] for b in q["by_share"]], [b["success"] for b in q["by_share"]], marker="o",
                  label=f"{name}: τ {q['tau_b']:.3f}")
    roc.plot([0, 1], [0, 1], color="gray", linestyle=":")
    roc.set(title="(a) AUROC; paper: 0.838 joint, 0.836 SFT", xlabel="false positive rate",
            ylabel="true positive rate")
    rate.set(title="(b) Kendall's τ; paper: 0.516 joint, 0.503 SFT", xlabel="completed share of the subtasks",
             ylabel="success rate", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    for ax in (roc, rate):
        ax.legend(frameon=False)
    save_figure(fig, out.with_suffix(".png"), out.with_suffix(".svg"))


def judgements(path: Path, episodes: list[dict], cfg: Config) -> dict[tuple, list[bool]]:
    """key_of(episode) -> done, a bool per subtask. Answers of the same judge to the same text are kept and
    reused; an unclear or missing one leaves the episode without, and the next call asks again. UserError when
    the judge cannot be asked at all, or left more than a fifth unanswered."""
    texts, file = prompts.load_prompts(cfg.prompt_file), beside(path) / "subgoals.jsonl"
    asked = {"judge": cfg.model, "prompt": texts.digest("judge_system", "judge_subgoals")}
    kept = {key_of(j): j["done"] for j in runtime.read_jsonl(file)
            if not cfg.model or asked.items() <= j.items()}
    todo = [e for e in episodes if cfg.model and len(kept.get(key_of(e), ())) != len(e["subtasks"])]
    if not todo:
        return kept
    client = llm.Client(cfg.model, cfg.base_url, cfg.api, cfg.workers)

    def ask(e: dict) -> list[bool | None]:
        subtasks = [plans.Subtask(*g) for g in e["subtasks"]]
        system, user = texts.judge_subgoals(e["instruction"], subtasks, [s["history"] for s in e["steps"]])
        shots = [s["shot"] for s in e["steps"]] + [e["final_shot"]] * bool(e.get("final_shot"))
        images = [llm.image_url((beside(path) / shot).read_bytes()) for shot in shots]
        try:
            return llm.read_verdicts(client.ask(system, [("user", [*images, user])]).text, len(subtasks))
        except llm.LLMError as error:
            if error.fatal:
                raise UserError(f"the judge {cfg.model}: {error}; what it answered so far is kept") from None
            return [None]

    with ThreadPoolExecutor(cfg.workers) as pool:
        for e, done in zip(todo, tqdm(pool.map(ask, todo), total=len(todo), desc="judge")):
            if None not in done:
                runtime.append_jsonl(file, [dict(zip(results.KEY, key_of(e))) | asked | {"done": done}])
                kept[key_of(e)] = done
    missing = sum(key_of(e) not in kept for e in todo)
    if missing > len(todo) / 5:
        raise UserError(f"the judge {cfg.model} left {missing} of {len(todo)} episodes without a clear "
                        f"answer; the others are kept: mend the judge and run this again")
    return kept


# --------------------------------------------------------------------------------------------------- failures
def failures(cfg: Config) -> None:
    """Failed episodes by mode, with the rule that put each there and one example (its results.KEY)."""
    report = {}
    for name, path in named_runs(cfg.runs).items():
        episodes, modes = read_episodes(path, cfg.profile, by_batch=True), {}
        failed = [e for e in episodes if e["reward"] is not None and e["reward"] <= 0]
        for e in failed:
            mode, rule = failure_mode(e, cfg.near)
            entry = modes.setdefault(mode, {"n": 0, "share": 0.0, "rules": {}, "example": key_of(e)})
            entry["n"] += 1
            entry["share"] = entry["n"] / len(failed)
            entry["rules"][rule] = entry["rules"].get(rule, 0) + 1
        report[name] = {"failed": len(failed), **counts(episodes), "modes": dict(sorted(modes.items()))}
    show(report, cfg.out)


def failure_mode(e: dict, near: int = 12) -> tuple[str, str]:
    """(mode, rule) of a failed episode: the first rule that holds, in the order of this code."""
    calls = [read_calls(tuple(s["calls"])) for s in e["steps"]]
    shots = {s["shot"] for s in e["steps"]} | ({e["final_shot"]} if e.get("final_shot") else set())
    stopped = bool(calls) and any(map(actions.is_final, calls[-1]))
    if not any(c.name != "wait" and not actions.is_final(c) for step in calls for c in step):
        return "no real attempt", "stopped without acting" if stopped else "nothing that could be carried out"
    if len(shots) == 1:
        return "no real attempt", "the page never changed"
    # scrolling and waiting are repetitions only while the picture stays the same
    signs = [(step, s["shot"] if any(c.name in ("swipe", "scroll", "wait") for c in step) else "")
             for step, s in zip(calls, e["steps"])]
    if period := cycle(signs[:len(signs) - stopped], near, at_end=e["status"] == "failure"):
        return "stuck midway", f"{period} action{'s' * (period > 1)} three times over"
    if e["status"] == "failure":
        rule = f"by {calls[-1][-1].name}" if stopped else "the page ended the episode"
        return "stopped at the wrong place", rule
    rules = {"unparsable": "three unreadable answers in a row", "max_steps": "steps used up"}
    return "other", rules.get(e["status"], str(e["status"]))


def cycle(signs: list, near: int, at_end: bool) -> int:
    """The least p <= 4 so that p actions were done three times over, anywhere or (`at_end`) last; else 0."""
    for p in (1, 2, 3, 4):
        run = 0
        for t in range(p, len(signs)):
            run = run + 1 if same_action(signs[t], signs[t - p], near) else 0
            if run >= 2 * p and (not at_end or t == len(signs) - 1):
                return p
    return 0


def same_action(a: tuple, b: tuple, near: int) -> bool:
    """The same calls on the same picture (where it matters), coordinates at most `near` pixels apart."""
    def same(key, x, y):
        return abs(x - y) <= near if key in ("x", "y") and x is not None and y is not None else x == y
    return a[1] == b[1] and len(a[0]) == len(b[0]) > 0 and all(
        c.name == d.name and c.args.keys() == d.args.keys()
        and all(same(k, c.args[k], d.args[k]) for k in c.args) for c, d in zip(a[0], b[0]))


@functools.lru_cache(maxsize=100_000)
def read_calls(texts: tuple[str, ...]) -> tuple:
    return tuple(call for text in texts for call in actions.parse(text).calls)


def diagnostics(cfg: Config) -> None:
    """What the hierarchy does in training: credit, luck, diversity of plans, their effect."""
    show({name: results.hierarchy(read_episodes(path, by_batch=True))
          for name, path in named_runs(cfg.runs).items()}, cfg.out)


# ----------------------------------------------------------------------------------------------------- viewer
def view(cfg: Config) -> None:
    """Fill viewer.html: one page over one or more runs that opens from disk and needs no network."""
    out = output(cfg, "episodes.html")
    data = {"runs": [], "images": {}}
    for i, (name, path) in enumerate(named_runs(cfg.runs).items()):
        folder, episodes = beside(path), read_episodes(path, cfg.profile, by_batch=True)
        prefix = Path(os.path.relpath(folder.resolve(), out.parent.resolve())).as_posix()
        scale = facts(path).get("scale", 1.0)  # pixels of a screenshot per pixel of the page
        data["runs"].append({"name": name, "prefix": prefix, "scale": scale, "episodes": episodes})
        shots = {shot for e in episodes for shot in [e.get("final_shot"), *(s["shot"] for s in e["steps"])]}
        for shot in shots - {None} if cfg.inline else ():
            if (folder / shot).is_file():
                data["images"][f"{i}/{shot}"] = base64.b64encode((folder / shot).read_bytes()).decode()
    # no "<" is left in the data, so no text of a model can end the block that holds it
    blob = json.dumps(rounded(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    template = (runtime.ROOT / "records" / "viewer.html").read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, after = template.replace("@HASH@", f"sha256-{digest}").partition("@DATA@")
    runtime.write_atomic(out, (before + blob + after).encode("utf-8", "replace"))
    show({"out": str(out), "episodes": sum(len(r["episodes"]) for r in data["runs"]),
          "megabytes": out.stat().st_size / 1e6})


def main(cfg: Config) -> None:
    raise UserError("name what to make: " + ", ".join(f.__name__ for f in COMMANDS))


COMMANDS = (curve, curves, compare, demo, table1, table2, table3, subgoals, failures, diagnostics, view)

if __name__ == "__main__":
    runtime.launch(main, *COMMANDS, words={f.__name__: ("runs",) for f in COMMANDS} |
                   {f.__name__: ("a", "b") for f in (compare, demo)})
