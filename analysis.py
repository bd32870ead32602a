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

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import runtime
from language import plans, prompts
from model import llm
from records import failures as rules
from records import figures, results, tables
from records.results import (
    Resampling,
    compare_systems,
    counts,
    directory_of,
    key_of,
    read_episodes,
    rounded,
)
from records.viewer import viewer_page
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


def named_episodes(cfg: Config, by_batch: bool = False) -> dict[str, list[dict]]:
    """{name: episodes} of --runs, scored by --profile."""
    return {name: read_episodes(path, cfg.profile, by_batch) for name, path in named_runs(cfg.runs).items()}


def output(cfg: Config, stem: str) -> Path:
    """--out, or `stem` beside the first run's files."""
    first = next(iter(named_runs(cfg.runs).values()))
    return runtime.new_file(cfg.out) if cfg.out else directory_of(first) / stem


def show(result: dict, out="") -> None:
    """Print one JSON object on one line; write it to `out` too where given."""
    text = json.dumps(rounded(result), ensure_ascii=False)
    if out:
        runtime.write_atomic(runtime.new_file(out), text + "\n")
    print(text)


# ----------------------------------------------------------------------------------------------------- curves
def curve(cfg: Config) -> None:
    """Learning curve: mean reward per rollout batch, one line per run."""
    draw_logs(cfg, {"mean reward": "reward_mean"}, "curve.png")


def curves(cfg: Config) -> None:
    """Everything the training log holds, one panel per subject."""
    draw_logs(cfg, figures.PANELS, "curves.png")


def draw_logs(cfg: Config, panels: dict[str, str], name: str) -> None:
    """Draw the runs' logs; print the mean reward of the first and of the last third of each."""
    logs = {run: results.read_log(path) for run, path in named_runs(cfg.runs).items()}
    series = figures.drawable(logs, panels)
    if not series:
        raise UserError(f"the logs of {cfg.runs} have none of the keys to draw; give runs of grpo_hier.py")
    out = output(cfg, name)
    figures.draw_log(logs, series, cfg.window, out)
    said: dict = {"out": str(out)}
    for run, log in logs.items():
        if "reward_mean" in log:
            rewards = log["reward_mean"][1]
            first, _, last = np.array_split(rewards, 3)
            said[run] = {"batches": len(rewards), "first_third": float(first.mean()),
                         "last_third": float(last.mean()) if len(last) else math.nan}
    show(said)


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
def table1(cfg: Config) -> None:
    """Success rates (%) per site and overall, the paper's table 1 beside ours."""
    success_table(cfg, tables.TABLE_1, "table1")


def table2(cfg: Config) -> None:
    """Ablations: table 1's columns and the paired difference to the run called `joint`."""
    success_table(cfg, tables.TABLE_2, "table2", base="joint")


def success_table(cfg: Config, printed: str, stem: str, base: str = "") -> None:
    """The paper's rows and the runs'; with a `base` the difference of each run to the run of that name."""
    runs = named_episodes(cfg)

    def difference(name: str) -> str:
        if base not in runs or name == base:
            return ""
        r = compare_systems(runs[base], runs[name], cfg.how)
        low, high = (100 * x for x in r["gain_ci95"] or (math.nan, math.nan))
        return f"{100 * r['gain']:+.1f} [{low:+.1f}, {high:+.1f}], p = {r['p']:.3g}"

    head, rows = tables.success_rows(printed, runs, difference)
    if base:
        head.append(f"minus {base}, {100 - 100 * cfg.alpha:g} % interval, p")
    notes = [f"{name}: {text}" for name, path in named_runs(cfg.runs).items() if (text := provenance(path))]
    if cfg.profile:
        notes.append(f"all scored by the profile {cfg.profile}")
    tables.write_table(output(cfg, stem), head, rows, notes)


def provenance(path: Path) -> str:
    """What it takes to believe a score, as far as the run's config.json and result.json say it."""
    known = results.facts(path)
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
    head = ["Platform", "# examples", "(paper)", "avg. # subtasks", "(paper)", "% with unnecessary actions",
            "(paper)"]
    tables.write_table(output(cfg, "table3"), head, tables.platform_rows(found), [])


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
    figures.draw_figure2(quality, out)
    show(quality | {"paper": figures.FIGURE_2}, out.with_suffix(".json"))


def judgements(path: Path, episodes: list[dict], cfg: Config) -> dict[tuple, list[bool]]:
    """key_of(episode) -> done, a bool per subtask. Answers of the same judge to the same text are kept and
    reused; an unclear or missing one leaves the episode without, and the next call asks again. UserError when
    the judge cannot be asked at all, or left more than a fifth unanswered."""
    texts = prompts.load_prompts(cfg.prompt_file)
    file = directory_of(path) / "subgoals.jsonl"
    asked = {"judge": cfg.model, "prompt": texts.digest("judge_system", "judge_subgoals")}
    kept = {key_of(j): j["done"] for j in runtime.read_jsonl(file)
            if not cfg.model or asked.items() <= j.items()}
    todo = [e for e in episodes if cfg.model and len(kept.get(key_of(e), ())) != len(e["subtasks"])]
    if not todo:
        return kept
    for e, done in verdicts(directory_of(path), todo, texts, cfg):
        if None not in done:
            runtime.append_jsonl(file, [dict(zip(results.KEY, key_of(e))) | asked | {"done": done}])
            kept[key_of(e)] = done
    missing = sum(key_of(e) not in kept for e in todo)
    if missing > len(todo) / 5:
        raise UserError(f"the judge {cfg.model} left {missing} of {len(todo)} episodes without a clear "
                        f"answer; the others are kept: mend the judge and run this again")
    return kept


def verdicts(folder: Path, episodes: list[dict], texts: prompts.Prompts,
             cfg: Config) -> Iterator[tuple[dict, list[bool | None]]]:
    """Ask the judge about each episode and yield (episode, a verdict per subtask); one None where there is
    no answer."""
    client = llm.Client(cfg.model, cfg.base_url, cfg.api, cfg.workers)

    def ask(e: dict) -> list[bool | None]:
        subtasks = [plans.Subtask(*g) for g in e["subtasks"]]
        system, user = texts.judge_subgoals(e["instruction"], subtasks, [s["history"] for s in e["steps"]])
        shots = [s["shot"] for s in e["steps"]]
        if e.get("final_shot"):
            shots.append(e["final_shot"])
        images = [llm.image_url((folder / shot).read_bytes()) for shot in shots]
        try:
            return llm.read_verdicts(client.ask(system, [("user", [*images, user])]).text, len(subtasks))
        except llm.LLMError as error:
            if error.fatal:
                raise UserError(f"the judge {cfg.model}: {error}; what it answered so far is kept") from None
            return [None]

    with ThreadPoolExecutor(cfg.workers) as pool:
        yield from zip(episodes, tqdm(pool.map(ask, episodes), total=len(episodes), desc="judge"))


# --------------------------------------------------------------------------------------------------- episodes
def failures(cfg: Config) -> None:
    """Failed episodes by mode, with the rule that put each there and one example (its results.KEY)."""
    report = {}
    for name, episodes in named_episodes(cfg, by_batch=True).items():
        modes: dict[str, dict] = {}
        failed = [e for e in episodes if e["reward"] is not None and e["reward"] <= 0]
        for e in failed:
            mode, rule = rules.failure_mode(e, cfg.near)
            entry = modes.setdefault(mode, {"n": 0, "share": 0.0, "rules": {}, "example": key_of(e)})
            entry["n"] += 1
            entry["share"] = entry["n"] / len(failed)
            entry["rules"][rule] = entry["rules"].get(rule, 0) + 1
        report[name] = {"failed": len(failed), **counts(episodes), "modes": dict(sorted(modes.items()))}
    show(report, cfg.out)


def diagnostics(cfg: Config) -> None:
    """What the hierarchy does in training: credit, luck, diversity of plans, their effect."""
    show({name: results.hierarchy(read_episodes(path, by_batch=True))
          for name, path in named_runs(cfg.runs).items()}, cfg.out)


def view(cfg: Config) -> None:
    """Fill viewer.html: one page over one or more runs that opens from disk and needs no network."""
    out = output(cfg, "episodes.html")
    episodes = named_episodes(cfg, by_batch=True)
    runs = {name: (path, episodes[name]) for name, path in named_runs(cfg.runs).items()}
    runtime.write_atomic(out, viewer_page(runs, out, cfg.inline))
    show({"out": str(out), "episodes": sum(map(len, episodes.values())),
          "megabytes": out.stat().st_size / 1e6})


def main(cfg: Config) -> None:
    raise UserError("name what to make: " + ", ".join(f.__name__ for f in COMMANDS))


COMMANDS = (curve, curves, compare, demo, table1, table2, table3, subgoals, failures, diagnostics, view)

if __name__ == "__main__":
    runtime.launch(main, *COMMANDS, words={f.__name__: ("runs",) for f in COMMANDS} |
                   {f.__name__: ("a", "b") for f in (compare, demo)})
