"""Is the episode viewer fast with many episodes? First paint under 2 s, a filter under 100 ms.

    python bench/viewer.py          fabricates 3,000 episodes, builds the page, opens it in headless Chromium

`paint_ms` is the browser's first contentful paint, `ready_ms` when list and first episode stand there, both
since the navigation; `filter_ms` the slowest of several filters from keystroke to painted frame,
`filter_cold_ms` one that comes as soon as the page is ready; `step_ms`, `episode_ms` the slowest key press.
The page refers to the screenshots; --inline true puts them in. Prints one JSON line last; exit code 1 where a
bound is missed.
"""

import contextlib
import io
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import analysis
import runtime
import web.chromium

WORDS = ("open the order page filter by status choose a customer write the address confirm and save then "
         "check that entry is listed scroll to end press enter search results settings profile cart").split()
PAINTED = """await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - t;"""
TIMED = """async ([id, value]) => { const el = document.getElementById(id), t = performance.now();
  el.value = value; el.dispatchEvent(new Event(el.type === 'search' ? 'input' : 'change')); PAINTED }"""
PRESSED = """async key => { const t = performance.now();
  document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})); PAINTED }"""
TIMED, PRESSED = (script.replace("PAINTED", PAINTED) for script in (TIMED, PRESSED))
FIRST_PAINT = """() => new Promise(done => new PerformanceObserver(list => {
  const paint = list.getEntries().find(e => e.name === 'first-contentful-paint');
  if (paint) done(paint.startTime); }).observe({type: 'paint', buffered: true}))"""


@dataclass
class Config:
    episodes: int = 3000  # over two runs
    pictures: int = 200  # different screenshots per run, 1280 x 720
    inline: bool = False  # the screenshots inside the page
    out: str = ""  # keep the fabricated runs and the page in this directory
    seed: int = 0  # of every random draw


def fabricate(directory: Path, n: int, pictures: int, rng: random.Random, size=(1280, 720)) -> None:
    """A run directory with n episodes, 3 plans x 7 episodes of a task: made-up texts, simple screenshots."""
    from PIL import Image, ImageDraw
    (directory / "shots").mkdir(parents=True)
    for i in range(pictures):
        image = Image.new("RGB", size, tuple(rng.randrange(180, 256) for _ in range(3)))
        draw = ImageDraw.Draw(image)
        for _ in range(12):
            x, y = rng.randrange(size[0] // 2), rng.randrange(size[1])
            draw.rectangle([x, y, x + rng.randrange(40, size[0] // 2), y + size[1] // 30], fill="slategray")
            draw.text((x + 4, y + 4), " ".join(rng.choices(WORDS, k=5)), fill="white")
        image.save(directory / "shots" / f"{i}.png")
    asked = [" ".join(rng.choices(WORDS, k=9)) for _ in range(n // 21 + 1)]
    runtime.append_jsonl(directory / "episodes.jsonl",
                         [episode(i, asked[i // 21], pictures, rng, size) for i in range(n)])


def episode(i: int, instruction: str, pictures: int, rng: random.Random, size) -> dict:
    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    def shot() -> str:
        return f"shots/{rng.randrange(pictures)}.png"
    group, k, m, reward = i // 21, i % 21 // 7, i % 7, float(rng.random() < 0.4)
    plan = random.Random(f"{group} {k}")
    subtasks = [[" ".join(plan.choices(WORDS, k=n)) for n in (4, 12)] for _ in range(plan.randrange(1, 6))]
    steps = []
    for _ in range(rng.randrange(2, 16)):
        point = [rng.randrange(size[0]), rng.randrange(size[1])]
        call = f"click(x={point[0]}, y={point[1]})"
        said = text(10)
        raw = f"<think>\n{text(40)}\n</think>\n<operation>\n{said}\n</operation>\n<action>\n{call}\n</action>"
        steps.append({"shot": shot(), "text": raw, "history": said, "calls": [call], "point": point,
                      "error": "", "n_tokens": 90})
    status = "success" if reward else rng.choice(["failure", "max_steps", "unparsable"])
    return {"batch": group, "task": f"task.{group}", "site": rng.choice(["gitlab", "reddit", "map"]),
            "instance": group, "run": 0, "k": k, "m": m, "seed": i, "instruction": f"{instruction} #{group}",
            "plan": "\n".join(f"{j}. {t}: {g}" for j, (t, g) in enumerate(subtasks, 1)), "subtasks": subtasks,
            "malformed": False, "status": status, "reward": reward, "reason": text(8), "answer": text(3),
            "seconds": 21.5, "error": "", "S_i": 0.43, "adv_A": reward - 0.43, "adv_D": 0.1 * k - 0.1,
            "first_shot": steps[0]["shot"], "steps": steps, "final_shot": shot()}


def measure(page_file: Path) -> dict:
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=web.chromium.chromium(), args=web.chromium.CHROMIUM_ARGS)
        page = chromium.new_page(viewport={"width": 1500, "height": 950})
        page.goto(page_file.resolve().as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]", state="attached")
        cold = page.evaluate(TIMED, ["query", "address confirm"])
        paint = page.evaluate(FIRST_PAINT)
        page.wait_for_load_state()
        queries = ("a", "ad", "address zzz", "settings cart", "#7", "")
        filters = [page.evaluate(TIMED, ["query", q]) for q in queries]
        filters += [page.evaluate(TIMED, ["status", s]) for s in ("success", "")]
        steps = [page.evaluate(PRESSED, "ArrowRight") for _ in range(5)]
        episodes = [page.evaluate(PRESSED, "j") for _ in range(20)]
        ready = float(page.evaluate("document.documentElement.dataset.ready"))
        chromium.close()
    return {"paint_ms": paint, "ready_ms": ready, "filter_cold_ms": cold, "filter_ms": max(filters),
            "step_ms": max(steps), "episode_ms": max(episodes)}


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root, rng = Path(cfg.out or temporary), random.Random(cfg.seed)
        for name in ("before", "after"):
            fabricate(root / name, cfg.episodes // 2, cfg.pictures, rng)
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            runs = f"{root}/before,{root}/after"
            analysis.view(analysis.Config(runs=runs, out=f"{root}/page.html", inline=cfg.inline))
        built = time.perf_counter() - started
        times = measure(root / "page.html")
        megabytes = (root / "page.html").stat().st_size / 1e6
    sizes = {"megabytes": megabytes, "build_s": built} | times
    print(json.dumps({"bench": "viewer", "episodes": cfg.episodes, "inline": cfg.inline,
                      **{k: round(v, 1) for k, v in sizes.items()}}))
    bounds = {"paint_ms": 2000, "ready_ms": 2000, "filter_ms": 100, "filter_cold_ms": 100}
    sys.exit(0 if all(times[k] < bound for k, bound in bounds.items()) else 1)


if __name__ == "__main__":
    runtime.launch(main)
