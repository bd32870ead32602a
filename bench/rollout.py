"""Environment steps per second of the rollout pool, beside a bare Playwright loop and beside BrowserGym.

    python bench/rollout.py              # 4 minutes on two idle cores; the last line is one JSON object

All play the same scripted episodes of MiniWoB++: open the task, then `steps` times a screenshot and a
click, at places that end no episode, then a last screenshot and the verdict; a task is also opened once for
the planner's first look. `bare` is the floor, a bare Playwright loop: the same calls and episodes from one
queue too, but with no wait, no bound, no recovery and one context for all. `bare_wire` has its screenshots by
the pool's DevTools command, which spares what Playwright's own do around it: the lowest floor there is.
BrowserGym's MiniWoB++ environment runs at its fastest setting, `pre_observation_delay` 0, in processes (its
drivers cannot share one), in a virtual environment of its own under the user's cache folder, since it pins
another Playwright; where it cannot be installed, its ratio is null and `why` says so. The systems take
turns, `rounds` times, because a machine's speed drifts; a ratio is the median of the rounds' own ratios.

    vs_bare, vs_bare_wire, vs_browsergym   steps per second, ratios
    vs_bare_rounds           each round's
    browser, settle, model, idle   shares of the pool's thread time: browser calls; of those, waits for pages;
                             waits for answers; without a job
    mb_per_browser           memory of a browser's and its driver's processes, without what they share
"""

import base64
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from functools import partial

import grpo_hier
from model.roles import Role
from rollout import Pool
from runtime import launch
from sites.miniwob import MiniWob, html_root
from web.chromium import CHROMIUM_ARGS, chromium
from web.environment import RolloutConfig

CLICKS = {  # page: places of which no click ends the episode
    "use-spinner": [(146, 72), (146, 81), (60, 160)],
    "choose-date-easy": [(80, 75), (20, 190), (80, 75)],
    "click-tab": [(30, 170), (100, 180), (60, 190)],
}


@dataclass
class Config:
    threads: int = 4  # browsers of each system
    episodes: int = 48  # in each round
    steps: int = 5  # clicks per episode
    rounds: int = 7  # turns of each system
    browsergym: bool = True  # compare with BrowserGym too
    browsergym_episodes: int = 8  # in each round: it is slow


def click_at(page: str, step: int) -> tuple[int, int]:
    return CLICKS[page][step % len(CLICKS[page])]


# --------------------------------------------------------------------------------------------------- the pool
class Prompts:
    def actor(self, instruction, history, plan):
        return instruction, str(len(history))


class Scripted:
    """The environment, with the page's name as its instruction, so that the script can be looked up."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def open(self, task, session):
        self.env.open(task, session)
        return task.site


def answer(requests):
    out = []
    for r in requests:
        x, y = click_at(r.system, int(r.user))
        out.append(SimpleNamespace(text=f"click(x={x}, y={y})", image_size=(160, 210), response_ids=[0]))
    return out


def run_pool(pool: Pool, tasks: list, M: int, turn: int) -> float:
    """Steps per second of one turn."""
    start = time.monotonic()
    groups = list(pool.run(tasks, 1, M, turn, {"actor": answer}))
    found = [e for g in groups for row in g.episodes for e in row]
    assert all(e.status == "max_steps" for e in found), [e.error for e in found if e.status != "max_steps"][
        :1
    ]
    return sum(len(e.steps) for e in found) / (time.monotonic() - start)


def own_memory(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(
        p.memory_info().rss - getattr(p.memory_info(), "shared", 0)
        for p in [process, *process.children(recursive=True)]
    )


# -------------------------------------------------------------------------------------------------- the floor
class Bare(threading.Thread):
    """A thread with a browser that plays the episodes of a queue, until None; tells each one's steps."""

    def __init__(self, env, cfg, jobs: queue.SimpleQueue, done: queue.SimpleQueue, by_wire: bool):
        super().__init__(daemon=True)
        self.env, self.cfg, self.jobs, self.done, self.by_wire = env, cfg, jobs, done, by_wire

    def run(self):
        from playwright.sync_api import sync_playwright

        with sync_playwright() as p:
            browser = p.chromium.launch(
                executable_path=chromium(), args=CHROMIUM_ARGS, chromium_sandbox=os.geteuid() != 0
            )
            page = browser.new_page(viewport={"width": self.env.width, "height": self.env.height})
            wire = page.context.new_cdp_session(page)
            session = SimpleNamespace(
                page=page, goto=lambda url: page.goto(url, wait_until="domcontentloaded")
            )

            def screenshot():
                if not self.by_wire:
                    return page.screenshot()
                return base64.b64decode(wire.send("Page.captureScreenshot", {"format": "png"})["data"])

            self.done.put(0)
            for task, m in iter(self.jobs.get, None):
                if m == 0:
                    self.env.open(task, session)
                    screenshot()
                self.env.open(task, session)
                for step in range(self.cfg.steps):
                    screenshot()
                    page.mouse.click(*click_at(task.site, step))
                    self.env.done(session)
                screenshot()
                self.env.judge(task, session, "")
                self.done.put(self.cfg.steps)
            browser.close()


def run_bare(jobs: queue.SimpleQueue, done: queue.SimpleQueue, episodes: list) -> float:
    start = time.monotonic()
    for episode in episodes:
        jobs.put(episode)
    steps = sum(done.get() for _ in episodes)
    return steps / (time.monotonic() - start)


# ------------------------------------------------------------------------------------------------- BrowserGym
WORKER = """
import sys, time, json, importlib
import gymnasium as gym, browsergym.miniwob
from browsergym.core.action.highlevel import HighLevelActionSet
clicks, episodes, steps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
mapping = HighLevelActionSet(subsets=["coord"]).to_python_code
environments = {page: gym.make("browsergym/miniwob." + page, action_mapping=mapping,
                               pre_observation_delay=0.0) for page in clicks}
print("ready", flush=True)
for line in sys.stdin:
    done = 0
    for i in range(episodes):
        page = list(clicks)[i % len(clicks)]
        env = environments[page]
        env.reset(seed=i)
        for step in range(steps):
            x, y = clicks[page][step % len(clicks[page])]
            env.step(f"mouse_click({x}, {y})")
            done += 1
    print(done, flush=True)
"""


def gym_python() -> Path:
    """The interpreter of BrowserGym's virtual environment, made if need be; RuntimeError where not."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jhima-webrl" / "browsergym"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        venv.create(home, with_pip=True, clear=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", "browsergym-miniwob==0.14.3", "setuptools<81"],
            capture_output=True,
            encoding="utf-8",
            timeout=900,
        )
        if done.returncode:
            raise RuntimeError(f"it cannot be installed: {done.stderr.strip().splitlines()[-1][:200]}")
        (home / "complete").touch()
    return python


def start_gym(cfg: Config, env) -> list:
    """Its processes, ready. It wants its Playwright's own Chromium; a link to the system's does as well."""
    python = gym_python()
    code = "from playwright.sync_api import sync_playwright as s\nwith s() as p:"
    code += " print(p.chromium.executable_path)"
    wanted = Path(
        subprocess.run([python, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout.strip()
    )
    if not wanted.exists() and chromium():
        wanted.parent.mkdir(parents=True, exist_ok=True)
        wanted.symlink_to(chromium())
    share = -(-cfg.browsergym_episodes // cfg.threads)
    workers = [
        subprocess.Popen(
            [python, "-c", WORKER, json.dumps(CLICKS), str(share), str(cfg.steps)],
            encoding="utf-8",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"MINIWOB_URL": f"{env.base}/miniwob/"},
        )
        for _ in range(cfg.threads)
    ]
    for worker in workers:
        if worker.stdout.readline().strip() != "ready":
            for w in workers:
                w.kill()
            raise RuntimeError(f"it does not start: {worker.stderr.read().strip().splitlines()[-1][:200]}")
    return workers


def run_gym(workers: list) -> float:
    start, steps = time.monotonic(), 0
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"it stopped: {worker.stderr.read().strip().splitlines()[-1][:200]}")
        steps += int(line)
    return steps / (time.monotonic() - start)


def main(cfg: Config) -> None:
    html_root()
    env = MiniWob(",".join(CLICKS), instances=cfg.episodes)
    settings = RolloutConfig(threads=cfg.threads, max_steps=cfg.steps, coordinates="page")
    M = 6  # episodes per task, so that the first look at it costs as in training
    tasks = env.tasks("train")[: cfg.episodes]
    speeds, why, workers = {"pool": [], "bare": [], "bare_wire": [], "browsergym": []}, "", []
    floors = {name: (queue.SimpleQueue(), queue.SimpleQueue()) for name in ("bare", "bare_wire")}
    floor = [
        Bare(env, cfg, *ends, name == "bare_wire")
        for name, ends in floors.items()
        for _ in range(cfg.threads)
    ]
    for thread in floor:
        thread.start()
    for _, done in floors.values():  # all browsers are up
        for _ in range(cfg.threads):
            done.get()
    agent = partial(grpo_hier.Agent, settings, Prompts())
    with Pool(Scripted(env), settings, agent, [Role("actor")]) as pool:
        if cfg.browsergym:
            try:
                workers = start_gym(cfg, env)
            except (RuntimeError, subprocess.SubprocessError, OSError) as e:
                why = str(e)
        run_pool(pool, tasks[: cfg.threads], 2, -1)  # every browser is up and has the pages in its cache
        for ends in floors.values():
            run_bare(*ends, [(task, 0) for task in tasks[: 2 * cfg.threads]])
        for session in pool.sessions:
            session.spent.clear()
        seconds = 0.0
        for turn in range(cfg.rounds):
            start = time.monotonic()
            speeds["pool"].append(run_pool(pool, tasks[: cfg.episodes // M], M, turn))
            seconds += time.monotonic() - start
            for name, ends in floors.items():
                episodes = [(task, m) for task in tasks[: cfg.episodes // M] for m in range(M)]
                speeds[name].append(run_bare(*ends, episodes))
            if workers:
                speeds["browsergym"].append(run_gym(workers))
            print(
                "  ".join(f"{name} {row[-1]:.1f} steps/s" for name, row in speeds.items() if row), flush=True
            )
        spent = {
            k: sum(s.spent[k] for s in pool.sessions) / (seconds * cfg.threads)
            for k in ("busy", "model", "settle")
        }
        memory = statistics.median(own_memory(s.driver.pid) for s in pool.sessions if s.driver) / 2**20
    for jobs, _ in floors.values():
        for _ in range(cfg.threads):
            jobs.put(None)
    for thread in floor:
        thread.join(30)
    for worker in workers:
        worker.stdin.close()
        worker.wait(30)
    env.close()
    middle = {name: statistics.median(row) for name, row in speeds.items() if row}
    ratios = {name: [a / b for a, b in zip(speeds["pool"], row)] for name, row in speeds.items()}
    print(
        json.dumps(
            {
                "vs_bare": round(statistics.median(ratios["bare"]), 3),
                "vs_bare_wire": round(statistics.median(ratios["bare_wire"]), 3),
                "vs_browsergym": round(statistics.median(ratios["browsergym"]), 2) if workers else None,
                "vs_bare_rounds": [round(r, 2) for r in ratios["bare"]],
                **({} if workers else {"why": why or "left out by --browsergym false"}),
                **{f"{name}_steps_per_s": round(value, 1) for name, value in middle.items()},
                "threads": cfg.threads,
                "browser": round(spent["busy"] - spent["model"], 3),
                "settle": round(spent["settle"], 3),
                "model": round(spent["model"], 3),
                "idle": round(1 - spent["busy"], 3),
                "mb_per_browser": round(memory),
            }
        )
    )


if __name__ == "__main__":
    launch(main)
