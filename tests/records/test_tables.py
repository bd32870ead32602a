"""The paper's tables as the paper prints them, and ours beside them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fabricated import episode, write

import analysis
from analysis import Config
from records import tables

PAPER = Path(__file__).resolve().parents[3] / "shared/seeds/000_085da43796ecbd44.txt"


def cells(markdown: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in ([c.strip() for c in line.strip("|").split(" | ")]
                                        for line in markdown.splitlines() if line.startswith("|"))}


@pytest.mark.parametrize("table", [tables.TABLE_1, tables.TABLE_2, tables.TABLE_3])
def test_the_papers_rows_are_the_papers(table):
    if not PAPER.exists():
        pytest.skip("the paper's text is not beside this checkout")
    text = " ".join(re.sub(r"[][*∗_†‡%]|\(Ours\)", "", PAPER.read_text()).split())
    for label, numbers in tables.paper_rows(table).values():
        assert f"{re.sub(' [*†‡]$', '', label)} {' '.join(numbers)}" in text


def test_the_papers_averages_are_weighted_by_tasks():
    sizes = np.array([30, 26, 19, 44, 35])  # GitLab, Map, Reddit, Shopping, ShoppingAdmin
    for label, numbers in tables.paper_rows(f"{tables.TABLE_1}\n{tables.TABLE_2}").values():
        if "–" not in numbers:
            *sites, average = map(float, numbers)
            assert sizes @ sites / 154 == pytest.approx(average, abs=0.15), label


def test_tables_of_success(tmp_path, capsys):
    joint = [episode(f"g{i}", float(r), run=run) for i, row in enumerate([(1, 1), (1, 0), (0, 0)])
             for run, r in enumerate(row)]
    joint += [episode("m_1", 1.0, site="map"), episode("m_2", None, site="map"),
              episode("x&1", 0.0, site="odd_site")]
    sft = [e | {"reward": 0.0, "status": "unparsable"} if e["reward"] else e for e in joint]
    names = {"joint": joint, "sft": sft, "mine": joint}
    runs = ",".join(f"{n}={write(tmp_path / n, es, {'commit': 'abc'})}" for n, es in names.items())
    analysis.table2(Config(runs=runs, out=str(tmp_path / "t2")))
    rows = cells(capsys.readouterr().out)
    ours = rows["JHiMA-WebRL-14B (ours)"]
    head = rows["Method"]
    # GitLab: task means 1, .5, 0; all five scored tasks: 1, .5, 0, 1, 0
    at = dict(zip(head, ours))
    assert (at["GitLab"], at["Map"], at["Reddit"]) == (f"50.0 ± {100 * 0.5 / 3 ** 0.5:.1f}", "100.0", "–")
    assert ours[-1] == "–"  # it is what the others are compared with
    assert at["Average"] == f"50.0 ± {100 * np.std([1, .5, 0, 1, 0], ddof=1) / 5 ** 0.5:.1f}"
    assert [at[k] for k in ("n", "infra", "unknown", "unparsable")] == ["8", "1", "0", "0"]
    assert rows["JHiMA-WebRL-14B (paper)"][:6] == ["47.5", "12.5", "60.5", "29.0", "44.3", "–"]
    difference = rows["w/o RL (SFT decomposer + SFT actor) (ours)"][-1]
    assert re.fullmatch(r"-50\.0 \[-\S+, \S+\], p = 0\.25", difference)  # 3 of 3 one way: 2 / 2^3
    assert rows["mine (ours)"][-1] == "+0.0 [+0.0, +0.0], p = 1"
    latex = (tmp_path / "t2.tex").read_text()
    columns = len(head) + 1
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len(body) == 9 and all(len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in body)
    assert "odd\\_site" in latex and r"$\pm$" in latex and "commit abc" in (tmp_path / "t2.md").read_text()
    analysis.table1(Config(runs=runs))
    assert len(cells(capsys.readouterr().out)) == 2 + 9 + 3 and (tmp_path / "joint/table1.tex").exists()


def test_the_papers_table_3_adds_up():
    cells = [numbers for _, numbers in tables.paper_rows(tables.TABLE_3).values()]
    *rows, total = [[float(number.replace(",", "")) for number in row] for row in cells]
    assert sum(n for n, _, _ in rows) == total[0]
    assert sum(n * s for n, s, _ in rows) / total[0] == pytest.approx(total[1], abs=0.01)
    assert sum(n * share for n, _, share in rows) / total[0] == pytest.approx(total[2], abs=0.05)


def test_table3(tmp_path, capsys):
    lines = [{"platform": "Web", "subtasks": [1] * n, "unnecessary": text}
             for n, text in ((1, ""), (2, "a scroll"), (4, ""))]
    lines.append({"platform": "plan9", "subtasks": [1], "unnecessary": ""})
    (tmp_path / "decompositions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    analysis.table3(Config(runs=str(tmp_path)))
    rows = cells(capsys.readouterr().out)
    assert rows["Web"] == ["3", "24,311", "2.33", "2.73", "33.3", "1.5"] and rows["macOS"][::2] == ["–"] * 3
    assert rows["Total"] == ["4", "76,396", "2.00", "2.56", "25.0", "1.6"] and rows["plan9"][0] == "1"
