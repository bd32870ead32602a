"""Scripted demonstrations of MiniWoB++ tasks in real Chromium, in ScaleCUA's record format.

    python demo/demonstrate.py --out runs/demo/trajectories              # a minute on two cores

The demonstrator is good but not perfect, as people are; what is wrong with it is written down here:
- Habits of planning (`HABITS`): on some tasks it usually sets out with a wrong plan, and carries that out
  faithfully. A decomposer trained on its demonstrations learns the habit, greedy decoding included.
- Slips of execution (`slips`): now and then a click lands on the neighbour of what it was meant for. An actor
  trained on them sometimes slips too, whatever the plan.
Joint RL has to repair the first in the decomposer and the second in the actor.

Outputs: {out}/meta.json, annotations.jsonl (one line per step) and NAME/images/STEP.png (one directory per
trajectory), as ScaleCUA publishes them; demonstrator.jsonl, one line per trajectory, is what the demonstrator
had in mind, from which demo/teacher.py answers: {"id", "task", "subtasks": [{"title", "goal"}], "operations":
[...], "unnecessary": "", "page", "seed", "wrong_plan": bool, "slipped": bool, "reward": float}.
"""

import json
import random
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import runtime
from sites.miniwob import MiniWob
from web.environment import RolloutConfig
from web.session import Session

# Share of the demonstrations of a page that follow its wrong plan (where it differs from the right one).
HABITS = {"choose-date-easy": 0.6, "grid-coordinate": 0.6, "use-spinner": 0.55, "click-tab": 0.0}
ASK = "<image>\nPlease generate the next move according to the UI screenshot, task and previous operations."


@dataclass
class Config:
    out: str = "runs/demo/trajectories"  # directory to write
    pages: str = ",".join(HABITS)  # pages to demonstrate, in turn
    n: int = 1000  # trajectories in all
    slips: float = 0.25  # probability that a click which can go to a neighbour does
    seed: int = 0  # of habits and slips
    threads: int = 2  # browsers


@dataclass(frozen=True)
class Move:
    """One intended step: what it is for, the element to click (Playwright selector), what a slip may hit."""
    operation: str
    target: str = ""  # "" ends the episode
    near: tuple = ()
    clicks: int = 1


# -------------------------------------------------------------------------------------------- the four pages
def choose_date(instruction: str, wrong: bool):
    """Open the calendar, pick the day, press Submit. Habit: believes that picking the day is enough."""
    day = int(re.search(r"/(\d+)/", instruction)[1])
    plan = [("Open", "the calendar"), ("Pick", f"day {day}"), ("Press", "Submit")]

    def cell(d):
        return f"xpath=//td[@data-handler='selectDay']/a[text()='{d}']"
    near = tuple(cell(d) for d in (day - 7, day - 1, day + 1, day + 7) if 1 <= d <= 30)
    moves = [Move("Open the calendar", "#datepicker"), Move(f"Pick day {day}", cell(day), near),
             Move("Press Submit", "#subbtn")]
    return (plan[:2], moves[:2]) if wrong else (plan, moves)


def grid(instruction: str, wrong: bool):
    """Click a point of the plane. Habit: counts y downwards, as screens do."""
    x, y = map(int, re.search(r"\((-?\d+),(-?\d+)\)", instruction).groups())
    y = -y if wrong else y

    def point(x, y):
        return f"circle[id='({x},{y})']"
    around = ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1))
    near = tuple(point(a, b) for a, b in around if abs(a) < 3 and abs(b) < 3)
    return [("Click", f"point ({x},{y})")], [Move(f"Click point ({x},{y})", point(x, y), near)]


def spinner(instruction: str, wrong: bool):
    """Bring a spinner from 0 to n, press Submit. Habit: overlooks the minus sign."""
    n = int(re.search(r"Select (-?\d+)", instruction)[1])
    way = "down" if n < 0 and not wrong else "up"

    def arrow(w):
        return f".ui-spinner-{w}"
    times, near = f"{way} {abs(n)} times", (arrow("up" if way == "down" else "down"),)
    plan = [("Press", times), ("Press", "Submit")]
    moves = [Move(f"Press {times}", arrow(way), near, abs(n)), Move("Press Submit", "#subbtn")]
    return (plan, moves) if n else (plan[1:], moves[1:])


def tab(instruction: str, wrong: bool):
    """Click a tab. No habit."""
    n = int(re.search(r"#(\d)", instruction)[1])

    def head(k):
        return f"a[href='#tabs-{k}']"
    near = tuple(head(k) for k in (1, 2, 3) if k != n)
    return [("Click", f"tab {n}")], [Move(f"Click tab {n}", head(n), near)]


EXPERTS = {"choose-date-easy": choose_date, "grid-coordinate": grid, "use-spinner": spinner, "click-tab": tab}


# -------------------------------------------------------------------------------------------- demonstrations
def demonstrate(session: Session, task, name: str, cfg: Config) -> tuple[list[dict], dict]:
    """One trajectory: its records (one per step) and what the demonstrator had in mind; writes the images."""
    page, dice = task.data["page"], random.Random(f"{cfg.seed} {task.id}")
    instruction = session.open(task)
    wrong, records, history = follows_habit(task, cfg.seed), [], []
    plan, moves = EXPERTS[page](instruction, wrong)
    slipped = False
    for move in [*moves, Move("All done")]:
        if move.target and session.env.done(session):
            continue  # the page ended early, after a slip: only the last word is left to say
        session.settle()
        image = f"{name}/images/{len(records)}.png"
        runtime.write_atomic(Path(cfg.out) / image, session.screenshot())
        action = "terminate(status='success')"
        if move.target:
            slip = bool(move.near) and dice.random() < cfg.slips
            slipped |= slip
            x, y = centre(session, dice.choice(move.near) if slip else move.target)
            times = f", clicks={move.clicks}" if move.clicks > 1 else ""
            action = f"click(x={x / session.env.width:.4f}, y={y / session.env.height:.4f}{times})"
            session.page.mouse.click(x, y, click_count=move.clicks)
        records.append(record(image, instruction, history, move.operation, action, session.env))
        history.append(move.operation)
    verdict = session.env.judge(task, session, "")
    mind = {"id": name, "task": instruction, "subtasks": [{"title": t, "goal": g} for t, g in plan],
            "operations": history, "unnecessary": "", "page": page, "seed": task.seed,
            "wrong_plan": wrong and plan != EXPERTS[page](instruction, False)[0], "slipped": slipped,
            "reward": verdict.reward}
    return records, mind


def follows_habit(task, seed: int) -> bool:
    """Whether this demonstration sets out with the wrong plan: of any n in a row n * HABITS[page] do, +-1."""
    share, i = HABITS[task.data["page"]], task.seed + seed
    return int((i + 1) * share) > int(i * share)


def centre(session: Session, selector: str) -> tuple[float, float]:
    """Centre of the one visible element that the selector finds, in page pixels."""
    box = session.page.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def record(image, instruction, history, operation, action, env) -> dict:
    """One step as a line of a ScaleCUA annotation file; coordinates are fractions of the image."""
    before = "\n".join(f'Step {k}: "{line}"' for k, line in enumerate(history, 1)) or "None"
    return {"image": image, "conversations": [
        {"from": "human", "value": f"{ASK}\n\nTask: {instruction}\n\nPrevious operations:\n{before}"},
        {"from": "gpt", "value": f"<operation>\n{operation}\n</operation>\n<action>\n{action}\n</action>"}],
        "width": round(env.width * env.scale), "height": round(env.height * env.scale)}


def main(cfg: Config) -> None:
    runtime.need_directories(cfg, "out")
    out = Path(cfg.out)
    pages = [p.strip() for p in cfg.pages.split(",")]
    if unknown := [p for p in pages if p not in EXPERTS]:
        raise runtime.UserError(f"no scripted expert for {unknown[0]}; --pages takes {', '.join(EXPERTS)}")
    env = MiniWob(cfg.pages, instances=-(-cfg.n // len(pages)))
    tasks = list(enumerate(env.tasks("demonstrations")[:cfg.n]))
    done, failed = {}, []

    def work(share):
        session = Session(env, RolloutConfig())
        try:
            for i, task in share:
                done[i] = demonstrate(session, task, f"t{i:05d}", cfg)
        except BaseException as e:  # handed to the main thread, which raises it
            failed.append(e)
        finally:
            session.stop()
    threads = [threading.Thread(target=work, args=(tasks[k::cfg.threads],)) for k in range(cfg.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    env.close()
    if failed:
        raise failed[0]
    steps = [r for i in sorted(done) for r in done[i][0]]
    minds = [done[i][1] for i in sorted(done)]
    runtime.write_atomic(out / "annotations.jsonl", "".join(json.dumps(r) + "\n" for r in steps))
    runtime.write_atomic(out / "demonstrator.jsonl", "".join(json.dumps(m) + "\n" for m in minds))
    runtime.write_atomic(out / "meta.json", json.dumps({"miniwob_scripted": {
        "root": str(out), "annotation": str(out / "annotations.jsonl"), "data_augment": False,
        "conv_style": "internvl2_5_web_navigation_v1", "repeat_time": 1, "length": len(steps)}},
        indent=1) + "\n")
    report(minds, len(steps))


def report(minds: list[dict], n_steps: int) -> None:
    """One line per page: how often the demonstrator's plan and hand were right, and what came of it."""
    print(f"{len(minds)} trajectories, {n_steps} steps")
    for page in dict.fromkeys(m["page"] for m in minds):
        mine = [m for m in minds if m["page"] == page]
        wrong, slipped, success = (sum(map(key, mine)) / len(mine) for key in (
            lambda m: m["wrong_plan"], lambda m: m["slipped"], lambda m: m["reward"]))
        print(f"  {page:18} n {len(mine):4}  wrong plan {wrong:.2f}  slip {slipped:.2f}  done {success:.2f}")


if __name__ == "__main__":
    runtime.launch(main)
