"""Tables, figures, judge and failure rules on fabricated files, and the viewer in a real Chromium."""

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from model_server import serving
from PIL import Image
from test_docs import logged

import analysis
import web.chromium
from analysis import Config
from records import results
from runtime import UserError

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT.parent / "shared/seeds/000_085da43796ecbd44.txt"


def step(call="click(x=10, y=10)", shot="shots/a.png", text="said", **more):
    calls = [call] if isinstance(call, str) else call
    return {"shot": shot, "text": text, "history": f"did {call}", "calls": calls, "error": "", "point": None,
            "n_tokens": 3} | more


def episode(task="t", reward=0.0, steps=(), **more):
    status = "infra" if reward is None else "success" if reward else "failure"
    return {"batch": 0, "task": task, "site": "gitlab", "instance": 0, "run": 0, "k": 0, "m": 0, "seed": 1,
            "instruction": f"do {task}", "plan": "1. open: it", "subtasks": [["open", "it"]],
            "malformed": False, "status": status,
            "reward": reward, "reason": "", "answer": "", "seconds": 1.0, "error": "",
            "first_shot": "shots/a.png", "final_shot": "shots/z.png", "steps": list(steps) or [step()]} | more


def write(directory, episodes, config=None):
    (directory / "shots").mkdir(parents=True, exist_ok=True)
    (directory / "episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    for name, color in (("a", "white"), ("b", "beige"), ("z", "lightblue")):
        Image.new("RGB", (160, 210), color).save(directory / f"shots/{name}.png")
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def printed(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# -------------------------------------------------------------------------------------- curves and comparison
def test_curve_draws_the_log_and_says_both_ends(tmp_path, capsys):
    lines = [{"batch": b, "reward_mean": b / 10, "S_std": None, "note": "x"} for b in range(9)]
    lines.append({"batch": 8, "reward_mean": 0.5})  # it was run again
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"batch": 9, "rew')
    analysis.curve(Config(runs=str(tmp_path)))
    out = printed(capsys)
    assert out[tmp_path.name] == {"batches": 9, "first_third": 0.1, "last_third": 0.6}
    assert Image.open(tmp_path / "curve.png").width > 300
    analysis.curves(Config(runs=str(tmp_path), out=str(tmp_path / "more.png")))
    assert (tmp_path / "more.png").stat().st_size > 1000
    (tmp_path / "log.jsonl").write_text('{"batch": 1, "other": 2}\n')
    with pytest.raises(UserError, match="none of the keys"):
        analysis.curve(Config(runs=str(tmp_path)))


def test_every_key_that_is_drawn_is_one_of_the_glossary():
    drawn = {key for keys in analysis.PANELS.values() for key in keys.split()}
    assert drawn <= set(logged("grpo_hier log"))


@pytest.mark.parametrize("n, window", [(1, 9), (5, 9), (30, 9), (30, 4), (7, 1)])
def test_moving_average_by_loops(n, window):
    y = np.random.default_rng(n).random(n)
    half = window // 2
    expected = [np.mean([y[j] for j in range(n) if abs(i - j) <= half]) for i in range(n)]
    assert analysis.moving_average(y, window) == pytest.approx(expected)


def test_the_demos_last_line(tmp_path, capsys):
    for name, rewards in (("sft", [0, 0, 1, 0]), ("rl", [1, 0, 1, None])):
        write(tmp_path / name, [episode(f"t{i}", r) for i, r in enumerate(rewards)])
    cfg = Config(a=str(tmp_path / "sft"), b=str(tmp_path / "rl"))
    analysis.demo(cfg)
    out = printed(capsys)
    assert list(out) == ["sft_success", "rl_success", "gain", "gain_ci95", "n", "minutes"]
    assert (out["gain"], out["n"], out["minutes"]) == (pytest.approx(1 / 3, abs=1e-4), 3, None)
    analysis.compare(cfg)
    full = printed(capsys)
    assert full["gain_ci95"] == out["gain_ci95"] and full["unpaired"] == 1 and full["b_n_infra"] == 1


def test_users_mistakes_are_one_line_and_exit_code_2(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, ROOT / "analysis.py", *args], capture_output=True, text=True)
    for args, word in (("compare --a nowhere --b x", "no result file"), ("", "name what to make"),
                       ("curve", "give NAME=DIR"), ("table1 --runs a=x,a=y", "no name twice")):
        done = run(*args.split())
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------- tables
def cells(markdown: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in ([c.strip() for c in line.strip("|").split(" | ")]
                                        for line in markdown.splitlines() if line.startswith("|"))}


@pytest.mark.parametrize("table", [analysis.TABLE_1, analysis.TABLE_2, analysis.TABLE_3])
def test_the_papers_rows_are_the_papers(table):
    if not PAPER.exists():
        pytest.skip("the paper's text is not beside this checkout")
    text = " ".join(re.sub(r"[][*∗_†‡%]|\(Ours\)", "", PAPER.read_text()).split())
    for label, numbers in analysis.paper_rows(table).values():
        assert f"{re.sub(' [*†‡]$', '', label)} {' '.join(numbers)}" in text


def test_the_papers_averages_are_weighted_by_tasks():
    sizes = np.array([30, 26, 19, 44, 35])  # GitLab, Map, Reddit, Shopping, ShoppingAdmin
    for label, numbers in analysis.paper_rows(f"{analysis.TABLE_1}\n{analysis.TABLE_2}").values():
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


def test_table3(tmp_path, capsys):
    lines = [{"platform": "Web", "subtasks": [1] * n, "unnecessary": text}
             for n, text in ((1, ""), (2, "a scroll"), (4, ""))]
    lines.append({"platform": "plan9", "subtasks": [1], "unnecessary": ""})
    (tmp_path / "decompositions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    analysis.table3(Config(runs=str(tmp_path)))
    rows = cells(capsys.readouterr().out)
    assert rows["Web"] == ["3", "24,311", "2.33", "2.73", "33.3", "1.5"] and rows["macOS"][::2] == ["–"] * 3
    assert rows["Total"] == ["4", "76,396", "2.00", "2.56", "25.0", "1.6"] and rows["plan9"][0] == "1"


# --------------------------------------------------------------------------------------------------- subgoals
def test_subgoals_asks_once_keeps_answers_and_draws(tmp_path, capsys):
    verdicts = {"t0": "1: done\n2: done", "t1": "1: done\n2: not done", "t2": "1: not done\n2: not done",
                "t3": "1: not done\n2: not done", "t4": "1: done\n2: perhaps", "t5": "1: done\n2: done"}
    es = [episode(t, float(t in ("t0", "t1")), subtasks=[["open", ""], ["save", ""]]) for t in verdicts]
    es += [episode("malformed", 0.0, subtasks=[]), episode("broken", None)]
    run = write(tmp_path / "r", es)

    def judge(path, body, headers):
        content = body["messages"][-1]["content"]
        assert [p["type"] for p in content] == ["image_url", "image_url", "text"]  # first, last, question
        return verdicts[re.search(r"do (t\d)", content[-1]["text"])[1]]

    with serving(judge) as server:
        cfg = Config(runs=f"joint={run}", base_url=server.url, model="judge", resamples=200)
        analysis.subgoals(cfg)
        q = printed(capsys)["joint"]
        assert len(server.requests) == 6 and (q["n"], q["unjudged"], q["without_plan"]) == (5, 1, 1)
        # successes 1, .5 against failures 0, 0, 1: (2 + .5) + (2 + 0) of 6 pairs
        assert q["auroc"] == pytest.approx(4.5 / 6)
        assert q["by_share"][0] == {"from": 0, "n": 2, "share": 0, "success": 0}
        verdicts["t4"] = "1: done\n2: done"
        analysis.subgoals(cfg)
        assert len(server.requests) == 7  # only what was unclear
        assert printed(capsys)["joint"]["unjudged"] == 0
    analysis.subgoals(Config(runs=f"joint={run}", resamples=200))  # without a judge: from the kept answers
    assert printed(capsys)["joint"]["n"] == 6
    assert Image.open(run / "figure2.png").width > 300
    assert xml.etree.ElementTree.parse(run / "figure2.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("said, word", [("I cannot say.", "without a clear answer"),
                                        ((401, {"error": {}}, {}), "401")])
def test_a_judge_that_fails_is_no_low_score(tmp_path, said, word):
    run = write(tmp_path / "r", [episode(f"t{i}", float(i % 2)) for i in range(4)])
    with serving(lambda *_: said) as server, pytest.raises(UserError, match=word):
        analysis.subgoals(Config(runs=str(run), base_url=server.url, model="judge"))
    with pytest.raises(UserError, match="0 of 4 episodes are judged"):
        analysis.subgoals(Config(runs=str(run)))


# --------------------------------------------------------------------------------------------------- failures
def clicks(*points, shots="0123456"):
    return [step(f"click(x={x}, y={y})", f"shots/{shot}.png") for (x, y), shot in zip(points, shots)]


def scrolls(shots):
    return [step("swipe(direction='up')", f"shots/{shot}.png") for shot in shots]


A, B, C = (10, 10), (80, 80), (150, 20)
END = step("terminate()", "shots/9.png")
FAILURES = [  # (episode, mode, rule)
    (dict(steps=[step("response(answer='x')")]), "no real attempt", "stopped without acting"),
    (dict(steps=[step([]), step("wait()"), step([])], status="unparsable"), "no real", "nothing that could"),
    (dict(steps=clicks(A, B, shots="zz")), "no real attempt", "page never changed"),
    (dict(steps=clicks(B, A, (12, 9), (5, 15), C), status="max_steps"), "stuck midway", "1 action three"),
    (dict(steps=clicks(C, A, B, A, B, A, B), status="max_steps"), "stuck midway", "2 actions three"),
    (dict(steps=clicks(A, A, A) + [END]), "stuck midway", "1 action three"),
    (dict(steps=clicks(A, A, A, B) + [END]), "stopped at the wrong place", "by terminate"),
    (dict(steps=clicks(A, B) + [step("response(answer='7')")]), "stopped at the wrong place", "by response"),
    (dict(steps=clicks(A, B)), "stopped at the wrong place", "the page ended"),
    (dict(steps=clicks(A, (30, 10), (50, 10), (70, 10)), status="max_steps"), "other", "steps used up"),
    (dict(steps=clicks(A, B, B, C), status="max_steps"), "other", "steps used up"),
    (dict(steps=scrolls("01234"), status="max_steps"), "other", "steps used up"),
    (dict(steps=scrolls("00000"), status="max_steps"), "stuck midway", "1 action three"),
    (dict(steps=clicks(A, B) + [step([])] * 3, status="unparsable"), "other", "three unreadable"),
]


@pytest.mark.parametrize("parts, mode, rule", FAILURES)
def test_failure_modes(parts, mode, rule):
    found = analysis.failure_mode(episode(**parts))
    assert found[0].startswith(mode) and rule in found[1]


def test_failures_counts_only_failures(tmp_path, capsys):
    es = [episode("a", 1.0), episode("b", None), episode("c", 0.0, clicks(A, B)),
          episode("d", 0.0, clicks(A, B)), episode("e", 0.0, clicks(A, A, A), status="max_steps")]
    analysis.failures(Config(runs=str(write(tmp_path / "r", es))))
    r = printed(capsys)["r"]
    assert (r["failed"], r["n"], r["n_infra"]) == (3, 4, 1) and r["modes"]["stuck midway"]["share"] == 0.3333
    assert r["modes"]["stopped at the wrong place"]["rules"] == {"the page ended the episode": 2}
    assert dict(zip(results.KEY, r["modes"]["stuck midway"]["example"]))["task"] == "e"


def test_diagnostics_reads_a_training_run(tmp_path, capsys):
    es = [episode("t", float(r), k=k, m=m, plan=f"plan {k}", adv_D=0.25 - k / 2)
          for k, row in enumerate([(1, 1), (1, 0)]) for m, r in enumerate(row)]
    analysis.diagnostics(Config(runs=str(write(tmp_path / "r", es))))
    r = printed(capsys)["r"]
    assert (r["mean_S"], r["adv_D_std"], r["zero_adv_A"], r["distinct_plans"]) == (0.75, 0.25, 0.5, 1)


# ----------------------------------------------------------------------------------------------------- viewer
HOSTILE = ("</script><script>window.hacked = 1</script><!-- <img src=x onerror='window.hacked = 2'> "
           '@DATA@ \ud800 {"a": 1}')


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=web.chromium.chromium(), args=web.chromium.CHROMIUM_ARGS)
        yield b
        b.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """`opened(cfg)` builds the page and opens it. Nothing but files may be asked for, no script may fail."""
    trouble, pages = [], []

    def build(cfg: Config):
        analysis.view(cfg)
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda e: trouble.append(str(e)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or trouble.append(r.url))
        page.goto(Path(cfg.out).as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page
    yield build
    for page in pages:
        page.close()
    assert not trouble


def until(page, condition: str, seconds: float = 10) -> None:
    """Wait for a JavaScript expression to hold (wait_for_function needs eval, which the page forbids)."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


LOADED = """document.querySelector('.big img') && !document.querySelector('.gone') &&
  [...document.querySelectorAll('#panes img')].every(i => i.complete && i.naturalWidth == 160)"""


def two_runs(tmp_path):
    """sft and rl over the same tasks; rl's first task with 2 plans x 3 episodes as training leaves it."""
    steps = [step(text=HOSTILE), step(shot="shots/b.png")]
    sft = [episode(f"task{i}", float(i % 2), steps) for i in range(6)]
    rl = [episode("task0", r, k=k, m=m, S_i=0.5, adv_D=0.1 - 0.2 * k, adv_A=None if r is None else r - 0.5,
                  plan=f"plan number {k}", subtasks=[[f"plan number {k}", HOSTILE]])
          for k, row in enumerate([(1.0, 0.0, None), (0.0, 0.0, 1.0)]) for m, r in enumerate(row)]
    rl += [episode(f"task{i}", 1.0, answer=f"answer {i}") for i in range(1, 6)]
    return f"{write(tmp_path / 'sft', sft)},{write(tmp_path / 'rl', rl)}"


def test_viewer_shows_model_text_as_text(opened, tmp_path):
    page = opened(Config(runs=two_runs(tmp_path), out=str(tmp_path / "page.html")))
    shown = page.locator("pre").filter(has_text="window.hacked = 1").inner_text()
    assert shown == HOSTILE.replace("\ud800", "?")
    page.keyboard.press("c")
    assert page.evaluate("window.hacked") is None and page.locator("#panes img[src=x]").count() == 0
    assert page.locator("#panes script").count() == 0
    # the policy of the page itself: even code that got in would not run
    page.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 3';"
                  " document.body.append(s); }")
    assert page.evaluate("window.hacked") is None


def test_viewer_steps_filters_and_compares_by_keyboard(opened, tmp_path):
    page = opened(Config(runs=two_runs(tmp_path), out=str(tmp_path / "sub/page.html")))
    assert page.locator("#count").inner_text() == "17 of 17 · success 62.5 % of 16 · 1 without verdict"

    def step_of(i=0):
        return page.locator("article.pane").nth(i).locator("h2", has_text="step").inner_text().lower()
    assert step_of() == "step 1 of 3"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("l")
    page.keyboard.press("l")  # there is no fourth
    assert step_of() == "step 3 of 3" and page.locator(".frame.on .cap").inner_text() == "end"
    until(page, LOADED)
    page.keyboard.press("j")
    assert page.locator("h1").first.inner_text() == "do task1" and step_of() == "step 1 of 3"
    page.keyboard.press("/")
    page.keyboard.type("answer 4")
    assert page.locator(".item").count() == 1 and page.locator("#count").inner_text().startswith("1 of 17")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('h1').textContent === 'do task4'")
    page.keyboard.press("c")  # the other run's episode of this task
    panes = page.locator("article.pane")
    assert "run rl" in panes.nth(0).inner_text() and "run sft" in panes.nth(1).inner_text()
    page.keyboard.press("x")
    page.keyboard.press("ArrowRight")
    assert (step_of(0), step_of(1)) == ("step 1 of 2", "step 2 of 3")
    page.keyboard.press("Escape")
    assert panes.count() == 1
    page.fill("#query", "")
    page.select_option("#run", label="sft")
    page.check("#differ")  # task1, 3, 5 succeed in both; task0's means differ
    assert page.locator("#count").inner_text().startswith("3 of 17")


def test_viewer_grid_of_plans_and_episodes(opened, tmp_path):
    sft, rl = two_runs(tmp_path).split(",")
    page = opened(Config(runs=f"{rl},{sft}", out=str(tmp_path / "page.html")))
    page.select_option("#run", label="sft")
    page.wait_for_selector("#group", state="hidden")  # evaluation: one episode per task
    page.select_option("#run", label="rl")
    page.wait_for_selector("#grid")
    rows = page.locator("#grid tr")
    assert rows.count() == 2 and "S 0.50 A^D +0.10" in rows.nth(0).inner_text()
    shown = [cell.split() for cell in rows.nth(0).locator("td").all_inner_texts()]
    assert shown == [["1", "+0.50"], ["0", "−0.50"], ["?", "–"]]
    rows.nth(1).locator("button").nth(2).click()
    assert "plan number 1" in page.locator("ol.plan").inner_text()
    assert "episode 2" in page.locator(".pane").inner_text()
    page.reload()
    assert "episode 2" in page.locator(".pane").inner_text()  # the address remembers the place
    page.keyboard.press("c")
    assert "run sft" in page.locator(".pane").nth(1).inner_text()  # rather than another of rl


@pytest.mark.parametrize("scale", [1, 2])
def test_marks_are_where_the_actions_landed(opened, tmp_path, scale):
    """On a page of 160 / scale x 210 / scale pixels: a click, a drag from there, a swipe between points."""
    w, h = 160 / scale, 210 / scale
    steps = [step(f"click(x={0.25 * w}, y={0.5 * h})"), step(f"dragTo(x={0.75 * w}, y={0.8 * h})"),
             step(f"swipe(from_coord=[{0.5 * w}, {0.9 * h}], to_coord=[{0.5 * w}, {0.1 * h}])")]
    run = write(tmp_path / "r", [episode(steps=steps)], {"scale": scale})
    page = opened(Config(runs=str(run), out=str(tmp_path / "page.html")))
    middle = """el => { const r = el.getBoundingClientRect();
        const i = document.querySelector('.big img').getBoundingClientRect();
        return [(r.x + r.width / 2 - i.x) / i.width, (r.y + r.height / 2 - i.y) / i.height]; }"""
    ends = """el => { const i = document.querySelector('.big img').getBoundingClientRect();
        const d = el.getAttribute('d').match(/-?[\\d.]+/g).map(Number);
        return [0, 1].map(t => { const p = new DOMPoint(d[2 * t], d[2 * t + 1]);
          const q = p.matrixTransform(el.getScreenCTM());
          return [(q.x - i.x) / i.width, (q.y - i.y) / i.height]; }); }"""
    page.wait_for_selector(".big svg")
    for circle in page.locator(".big svg circle").all():
        assert circle.evaluate(middle) == pytest.approx([0.25, 0.5], abs=0.01)
    for start, end in (((0.25, 0.5), (0.75, 0.8)), ((0.5, 0.9), (0.5, 0.1))):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".big svg path")
        a, b = page.locator(".big svg path").last.evaluate(ends)
        assert a == pytest.approx(start, abs=0.01) and b == pytest.approx(end, abs=0.01)


def test_inlined_page_stands_alone_and_a_missing_picture_is_said(opened, tmp_path):
    run = write(tmp_path / "r", [episode(steps=[step(), step(shot="shots/lost.png")], answer=float("nan"))])
    page = opened(Config(runs=str(run), out=str(tmp_path / "page.html"), inline=True))
    for file in (run / "shots").iterdir():
        file.unlink()
    page.reload()
    until(page, "[...document.querySelectorAll('.strip img')].filter(i => i.naturalWidth > 0).length == 2")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("text=no picture at r/shots/lost.png")


def test_view_of_odd_file_names(opened, tmp_path):
    run = write(tmp_path / "a b#1%?", [episode()])
    page = opened(Config(runs=f"odd={run}", out=str(tmp_path / "page.html")))
    until(page, LOADED)


def test_bench_of_the_viewer_runs_small(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "bench/viewer.py", "--episodes", "60", "--pictures", "4"],
                          capture_output=True, text=True)
    line = SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))
    assert done.returncode in (0, 1) and line.episodes == 60 and 0 < line.paint_ms < 20000


def test_bench_of_the_coverage_runs_small():
    few = ["--experiments", "30", "--resamples", "300"]
    done = subprocess.run([sys.executable, ROOT / "bench/coverage.py", *few], capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["interval_coverage"] >= 0.75 and abs(line["mean_gain"] - line["true_gain"]) < 0.03
