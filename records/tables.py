"""The paper's tables 1-3, and how a table of ours is written beside them: Markdown and LaTeX."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

import runtime
from records.results import counts, mean_and_se, scores_by_task

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
# a platform | the paper's label | trajectories, subtasks on average, percent with unnecessary actions
TABLE_3 = """windows | Windows | 5,873 2.68 1.2
macos | macOS | 3,845 2.43 1.1
linux | Linux | 25,122 2.20 1.8
android | Android | 17,245 2.84 1.6
web | Web | 24,311 2.73 1.5
total | Total | 76,396 2.56 1.6"""
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
    "<": "$<$", ">": "$>$", "±": r"$\pm$", "†": r"$\dagger$", "‡": r"$\ddagger$"}


def paper_rows(table: str) -> dict[str, tuple[str, list[str]]]:
    """{name: (label, cells)} of one of the texts above."""
    rows = (row.split(" | ") for row in table.splitlines())
    return {name: (label, cells.split()) for name, label, cells in rows}


def success_rows(printed: str, runs: dict[str, list[dict]],
                 difference: Callable[[str], str]) -> tuple[list[str], list[list]]:
    """Head and rows of table 1 or 2: one row per run, under the paper's row where the run has its name.

    Cells are task-weighted success ± standard error clustered by task, in percent; n counts scored episodes.
    `difference(run)`: a last cell, "" for none.
    """
    others = sorted({str(e.get("site")) for episodes in runs.values() for e in episodes} - SITES.keys())
    sites = [*SITES, *others]
    head = ["Method", *(SITES.get(s, s) for s in sites), "Average", "n", "infra", "unknown", "unparsable"]
    paper = paper_rows(printed)
    rows: list[list] = []
    for name in [*paper, *(name for name in runs if name not in paper)]:
        label, cells = paper.get(name, (name, []))
        if cells:
            rows.append([f"{label} (paper)", *cells[:-1], *["–"] * len(others), cells[-1]])
        if name in runs:
            parts = [[e for e in runs[name] if str(e.get("site")) == s] for s in sites]
            cells = [percent(part) for part in [*parts, runs[name]]]
            rows.append([f"{label} (ours)", *cells, *counts(runs[name]).values()])
            if last := difference(name):
                rows[-1].append(last)
    return head, rows


def percent(episodes: list[dict]) -> str:
    """Success of some episodes with its standard error; a dash where none is scored."""
    mean, se = mean_and_se(scores_by_task(episodes).values())
    if math.isnan(mean):
        return "–"
    return f"{100 * mean:.1f}" if math.isnan(se) else f"{100 * mean:.1f} ± {100 * se:.1f}"


def platform_rows(found: dict[str, list[tuple[int, bool]]]) -> list[list]:
    """Rows of table 3, ours and the paper's beside each other. `found`: by platform, in small letters, the
    (number of subtasks, whether there are unnecessary actions) of each decomposition."""
    paper = paper_rows(TABLE_3)
    rows: list[list] = []
    for platform in [*(p for p in found if p not in paper), *paper]:
        label, theirs = paper.get(platform, (platform, ["–"] * 3))
        ours = ["–"] * 3
        if platform in found:
            size, unnecessary = np.mean(found[platform], axis=0)
            ours = [f"{len(found[platform]):,}", f"{size:.2f}", f"{100 * unnecessary:.1f}"]
        rows.append([label, *(cell for pair in zip(ours, theirs) for cell in pair)])
    return rows


def write_table(out: Path, head: list[str], rows: list[list], notes: list[str]) -> None:
    """Write OUT.md and OUT.tex, print the Markdown; short rows are filled with dashes."""
    rows = [[str(c) for c in row] + ["–"] * (len(head) - len(row)) for row in rows]
    text = markdown(head, rows, notes)
    runtime.write_atomic(out.with_suffix(".md"), text)
    runtime.write_atomic(out.with_suffix(".tex"), latex(head, rows, notes))
    print(text, end="")


def markdown(head: list[str], rows: list[list[str]], notes: list[str]) -> str:
    """The table with a paragraph for each note."""
    lines = [[c.replace("|", "\\|") for c in row] for row in [head, ["---"] * len(head), *rows]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines) + "".join(f"\n{n}\n" for n in notes)


def latex(head: list[str], rows: list[list[str]], notes: list[str]) -> str:
    """The table as a tabular, the notes as comments."""
    special = str.maketrans(LATEX)
    body = [" & ".join(c.translate(special) for c in row) + r" \\" for row in [head, *rows]]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\hline", body[0], r"\hline", *body[1:],
             r"\hline", r"\end{tabular}", *(f"% {' '.join(n.split())}" for n in notes)]
    return "\n".join(lines) + "\n"
