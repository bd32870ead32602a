"""Stage 1 against a bad server: is every trajectory annotated or quarantined, once, and how much of its rate
is used?

    python bench/annotate.py                         # 2,000 trajectories, about two minutes; one JSON line
    python bench/annotate.py --n 100 --kills 1       # seconds
    python bench/annotate.py memory --n 33334        # reading alone, 100,002 records: half a minute

The server has a fixed latency and a limit of requests at a time (more wait in line), and a seeded mix of
faults: 429 with Retry-After, 500, no answer in time, closed connections, half answers, refusals, cut-off
answers, wrong forms; some questions always get the same bad one. `annotate.py` is killed (SIGKILL) `kills`
times and started again. `rate_vs_server`: requests the server finished while it had any, per second, over
what it can do (limit / latency), in the last, unbroken run; `rss_growth_mb`: of that run, from its first
tenth to its end (of `memory` too; its `index_mb` is what opening the files takes). `Faulty` and `make_data`
are also what the tests of annotate.py use.
"""

import hashlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime
from demo import teacher
from records.recordings import Quarantine
from records.trajectories import TrajectoryFiles

GOOD = teacher.appendix_a({"subtasks": [{"title": "Open the page", "goal": "The page is open."},
                                        {"title": "Press the button", "goal": "It has been pressed."}],
                           "unnecessary": ""})
SIX = teacher.appendix_a({"subtasks": [{"title": "Press", "goal": "pressed"}] * 6, "unnecessary": ""})
WRONG = {"no_section": "I would open the page and press the button.", "six": SIX,
         "invented": GOOD + "\n[NOTES]\n\nThe user was slow.\n"}
FAULTS = {"429": 0.04, "500": 0.04, "timeout": 0.01, "closed": 0.04, "half": 0.04}
FAULTS |= dict.fromkeys(["refused", "cut", *WRONG], 0.02)


@dataclass
class Config:
    n: int = 2000                # trajectories
    steps: int = 3               # screenshots of each
    kills: int = 3               # SIGKILLs
    latency: float = 0.4         # s per request
    limit: int = 10              # requests the server works on at a time
    seed: int = 0                # of the faults
    timeout: float = 2.0         # s after which annotate.py takes a request for lost


# ------------------------------------------------------------------------------------------------- the server
class Faulty:
    """What the server says, and to which question it says what. `fate(id, attempt)` is a function of the
    seed."""

    def __init__(self, seed: int, latency: float, limit: int, stall: float, always: float = 0.02):
        self.seed = seed
        self.latency = latency
        self.stall = stall
        self.always = always
        self.slots = threading.Semaphore(limit)
        self.lock = threading.Lock()
        self.asked: Counter = Counter()
        self.told: Counter = Counter()
        self.done_at: list[float] = []

    def fate(self, name: str, attempt: int) -> str:
        """One fault's name, or "good". A share of the trajectories, `always`, has its own fault each time."""
        def dice(*key):
            return random.Random(hashlib.sha256(repr((self.seed, *key)).encode()).digest())
        own = dice(name)
        if own.random() < self.always:
            return own.choice(["500", "closed", "refused", "cut", *WRONG])
        return dice(name, attempt).choices([*FAULTS, "good"], [*FAULTS.values(), 1 - sum(FAULTS.values())])[0]


class Handler(teacher.Handler):
    def do_POST(self):
        faulty = self.server.script
        size = int(self.headers["Content-Length"])
        raw = self.rfile.read(size)
        if len(raw) < size:
            return None  # annotate.py was killed while it asked
        body = json.loads(raw)
        name = self.headers.get("X-Client-Request-Id", "")
        with faulty.lock:
            faulty.asked[name] += 1
            fate = faulty.fate(name, faulty.asked[name])
            faulty.told[fate] += 1
        with faulty.slots:
            time.sleep(faulty.latency)
            with faulty.lock:
                faulty.done_at.append(time.monotonic())
        return self.tell(fate, teacher.request_text(body))

    def tell(self, fate: str, question: str) -> None:
        reply = teacher.reply(self.path, WRONG.get(fate, GOOD), question, "faulty", {})
        if fate == "429":
            return self.send(429, {"error": {"message": "slow down"}}, Retry_After="0.5")
        if fate == "500":
            return self.send(500, {"error": {"message": "it broke"}})
        if fate == "timeout":
            time.sleep(self.server.script.stall)
        if fate in ("timeout", "closed"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        if fate == "half":
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(data[:len(data) // 2])
            self.close_connection = True
            return None
        if fate == "refused":
            reply |= {"output": [{"type": "message", "role": "assistant",
                                  "content": [{"type": "refusal", "refusal": "I cannot help with that."}]}]}
        if fate == "cut":
            reply |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return self.send(200, reply)


# --------------------------------------------------------------------------------------------------- the data
def make_data(directory: Path, n: int, steps: int = 3) -> Path:
    """n trajectories in ScaleCUA's form with a few small screenshots; returns the meta file."""
    images = directory / "shared"
    images.mkdir(parents=True)
    for k in range(steps):
        image = Image.new("RGB", (1280, 720), "white")
        draw = ImageDraw.Draw(image)
        dice = random.Random(k)
        for row in range(40):
            draw.text((dice.randrange(200), 18 * row), f"line {row} " * dice.randrange(20), "black")
        image.save(images / f"{k}.png")
    with open(directory / "annotations.jsonl", "w", encoding="utf-8") as f:
        for i in range(n):
            folder = directory / f"t{i:06d}" / "images"
            folder.mkdir(parents=True)
            for k in range(steps):
                os.link(images / f"{k}.png", folder / f"{k}.png")
                f.write(record(i, k, steps))
    return write_meta(directory)


def record(i: int, k: int, steps: int) -> str:
    """The line of trajectory i's step k."""
    before = "\n".join(f'Step {j + 1}: "Do {j}"' for j in range(k)) or "None"
    action = "terminate(status='success')" if k == steps - 1 else "click(x=0.5, y=0.25)"
    ask = f"<image>\nGo on.\n\nTask: Task number {i}\n\nPrevious operations:\n{before}"
    do = f"<operation>\nDo {k}\n</operation>\n<action>\n{action}\n</action>"
    turns = [{"from": "human", "value": ask}, {"from": "gpt", "value": do}]
    return json.dumps({"image": f"t{i:06d}/images/{k}.png", "width": 1280, "height": 720,
                       "conversations": turns}) + "\n"


def write_meta(directory: Path) -> Path:
    meta = directory / "meta.json"
    runtime.write_atomic(meta, json.dumps({"bench": {
        "root": str(directory), "annotation": str(directory / "annotations.jsonl"),
        "conv_style": "internvl2_5_web_navigation_v1", "repeat_time": 1}}))
    return meta


# ---------------------------------------------------------------------------------------------------- the run
def command(meta: Path, out: Path, port: int, **flags) -> list[str]:
    flags = {"meta": meta, "out": out, "base_url": f"http://127.0.0.1:{port}/v1", "model": "faulty"} | flags
    return [sys.executable, str(ROOT / "annotate.py"), *(f"--{k}={v}" for k, v in flags.items())]


def outcome(out: Path, n: int) -> dict:
    """How many trajectories are where: lost (nowhere) and duplicated (two lines) should be none."""
    ids = [o["id"] for o in runtime.read_jsonl(out)]
    left = [o["where"] for o in runtime.read_jsonl(f"{out}.quarantine.jsonl")]
    return {"annotated": len(ids), "quarantined": len(left), "lost": n - len({*ids, *left}),
            "duplicated": len(ids) + len(left) - len({*ids, *left})}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def watch(process, out: Path, n: int) -> list[float]:
    """Resident megabytes of the process, twice a second, from when a tenth of what it has to do is done."""
    begin = lines(out)
    sizes = []
    while process.poll() is None:
        if lines(out) > begin + (n - begin) / 10:
            sizes.append(rss_mb(process.pid))
        time.sleep(0.5)
    return sizes or [0.0]


def main(cfg: Config) -> None:
    with tempfile.TemporaryDirectory() as directory:
        meta = make_data(Path(directory) / "data", cfg.n, cfg.steps)
        out = Path(directory) / "out.jsonl"
        faulty = Faulty(cfg.seed, cfg.latency, cfg.limit, stall=cfg.timeout + 1)
        server = teacher.Server(faulty, handler=Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        args = command(meta, out, server.server_address[1], concurrency=2 * cfg.limit,
                       timeout=cfg.timeout + cfg.latency * 2, retries=6, first_pause=0.2)
        for kill in range(cfg.kills):
            process = subprocess.Popen(args)
            goal = cfg.n * (kill + 1) // (2 * cfg.kills + 2)
            while lines(out) < goal and process.poll() is None:
                time.sleep(0.05)
            process.kill()
            process.wait()
            print(f"killed: {outcome(out, cfg.n)}", flush=True)
        faulty.done_at.clear()
        process = subprocess.Popen(args)
        sizes = watch(process, out, cfg.n)
        times = sorted(faulty.done_at)
        busy = times[len(times) // 10: -len(times) // 10]  # without the start-up and the last, lonely retries
        rate = (len(busy) - 1) / (busy[-1] - busy[0])
        print(f"told: {dict(faulty.told)}; exit code {process.returncode}")
        print(json.dumps({"trajectories": cfg.n, **outcome(out, cfg.n), "rate": round(rate, 1),
                          "rate_vs_server": round(rate / (cfg.limit / cfg.latency), 3),
                          "rss_growth_mb": round(max(sizes) - sizes[0], 1)}))


def memory(cfg: Config) -> None:
    """What reading `n` trajectories takes, without their screenshots, which are read one at a time."""
    with tempfile.TemporaryDirectory() as directory:
        with open(Path(directory) / "annotations.jsonl", "w", encoding="utf-8") as f:
            f.writelines(record(i, k, cfg.steps) for i in range(cfg.n) for k in range(cfg.steps))
        meta = write_meta(Path(directory))
        begin = time.monotonic()
        before = rss_mb(os.getpid())
        files = TrajectoryFiles(meta, Quarantine())
        opened = rss_mb(os.getpid())
        sizes = []
        for i, _ in enumerate(files, 1):
            if i % max(1, cfg.n // 10) == 0:
                sizes.append(rss_mb(os.getpid()))
        seconds = time.monotonic() - begin
        print(json.dumps({"records": cfg.n * cfg.steps, "trajectories": i, "seconds": round(seconds, 1),
                          "index_mb": round(opened - before, 1),
                          "rss_growth_mb": round(max(sizes) - sizes[0], 1)}))


if __name__ == "__main__":
    runtime.launch(main, memory)
