"""The episode viewer in a real Chromium."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fabricated import episode, step, write

import analysis
from analysis import Config
from web.chromium import CHROMIUM_ARGS
from web.chromium import chromium as executable

ROOT = Path(__file__).resolve().parents[2]


HOSTILE = ("</script><script>window.hacked = 1</script><!-- <img src=x onerror='window.hacked = 2'> "
           '@DATA@ \ud800 {"a": 1}')


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=executable(), args=CHROMIUM_ARGS)
        yield b
        b.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """`opened(cfg)` builds the page and opens it. Nothing but files may be asked for, no script may fail."""
    trouble = []
    pages = []

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


def test_viewer_shows_every_answer_of_a_step_by_role(opened, tmp_path):
    """Shut, in the order asked, as text; the one that acted is named; a step of one answer has none."""
    asked = [{"role": "curator", "text": HOSTILE, "n_tokens": 41, "acted": False},
             {"role": "actor", "text": "click it", "n_tokens": 7, "acted": True},
             {"role": "value", "text": "", "n_tokens": 0, "acted": False}]
    run = write(tmp_path / "r", [episode(steps=[step(asked=asked), step(shot="shots/b.png")])])
    page = opened(Config(runs=str(run), out=str(tmp_path / "page.html")))
    answers = page.locator(".asked")
    assert answers.locator("summary").all_inner_texts() == ["curator · 41 tokens", "actor · 7 tokens · acted",
                                                            "value"]
    assert not any(answers.locator("pre").nth(i).is_visible() for i in range(3))
    answers.locator("summary").first.click()
    assert answers.locator("pre").first.inner_text() == HOSTILE.replace("\ud800", "?")
    assert answers.locator("pre").nth(2).text_content() == "(nothing)"
    assert page.evaluate("window.hacked") is None and answers.locator("img, script").count() == 0
    page.fill("#query", "window.hacked")  # such an answer is found, too
    assert page.locator(".item").count() == 1
    page.fill("#query", "")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    assert page.locator("h2", has_text="step 2 of 3").count() == 1 and answers.count() == 0


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
    w = 160 / scale
    h = 210 / scale
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
