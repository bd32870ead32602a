"""Episodes and run directories that no browser made, for the tests of what reads them."""

import json

from PIL import Image


def step(call="click(x=10, y=10)", shot="shots/a.png", text="said", **more):
    calls = [call] if isinstance(call, str) else call
    return {"shot": shot, "text": text, "history": f"did {call}", "calls": calls, "error": "", "point": None,
            "n_tokens": 3} | more


def clicks(*points, shots="0123456"):
    return [step(f"click(x={x}, y={y})", f"shots/{shot}.png") for (x, y), shot in zip(points, shots)]


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
