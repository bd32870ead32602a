"""MiniWoB++ as an environment: 130 small web pages in real Chromium, offline, judged by their own rewards.

The PyPI package `miniwob` brings the pages; this file serves them on a loopback port and talks to their
`core` object (an episode is a pure function of page and seed). A task is `page.seed`; its instruction is what
the page itself says. Splits are disjoint ranges of seeds: `demonstrations`, `train`, `eval`.

    env = MiniWob("choose-date-easy,grid-coordinate", instances=50)    # 160x210 pixels, the demo's size
    env = MiniWob("login-user", scale=3)                               # 480x630 pixels, for a real model

The reward is 1 or 0. Many pages pay a part of their reward for a part of the answer, or for one that is near;
miniwob_rewards.py has the rule of success of each page and why: in most, the full raw reward (before the
discount for time). A page that cannot be judged is refused. `any_reward` asks for the package's own meaning
of success instead, a raw reward above 0, which wrong answers earn on two dozen pages; every verdict has it as
`rewards["raw>0"]`, too, and the record of an episode has the raw reward itself (`details`).

The pages' time limit is lifted, since an agent's thinking time is not part of the task, and their animations
are off, so that one seed gives one screenshot.
"""

# no dimensions here: everything is one page

import base64
import difflib
import functools
import http.server
import importlib.util
import io
import math
import re
import threading
from pathlib import Path

from runtime import UserError
from sites.miniwob_rewards import reaches, rule_of
from web.environment import Environment, Task, Verdict

SPLITS = {"demonstrations": 1_000_000, "train": 2_000_000, "eval": 3_000_000}  # first seed of each
SEEDS_PER_SPLIT = 1_000_000

# The reward display and the marks of earlier clicks are MiniWoB's debugging aids, no part of the page. The
# cover offers another episode once this one is over; its reward would replace this one's.
STYLE = """
#reward-display, #click-canvas, #sync-task-cover { display: none !important; }
html { overflow: hidden; background: white; }
"""
# setTimeout holds a signed 32-bit number of milliseconds, so that is the longest time limit there is.
# What must hold beside the reward (miniwob_rewards.py) is looked at when the page ends the episode: what a
# step's further calls do to the page comes too late.
START = """([seed, style, witness]) => {
    const end = core.endEpisode;
    core.endEpisode = (...how) => {
        if (core.EP_TIMER !== null) window.witnessed = Boolean(new Function(`return ${witness}`)());
        end(...how);
    };
    const sheet = document.createElement('style');
    sheet.textContent = style;
    document.head.append(sheet);
    if (window.jQuery) jQuery.fx.off = true;
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = 2147483647;
    core.startEpisodeReal();
    core.clearTimer();
}"""
STATE = """() => typeof WOB_DONE_GLOBAL === 'undefined' ? null
    : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON, window.witnessed]"""
UTTERANCE = """() => { const u = core.getUtterance(); return typeof u === 'string' ? u : u.utterance; }"""


class MiniWob(Environment):
    """Tasks of MiniWoB++ pages. `pages`: comma-separated names; `instances`: tasks of each page in a split;
    `scale`: screenshot pixels per CSS pixel; `any_reward`: any raw reward above 0 is a success.

    Raises UserError for an unknown page, for one that cannot be judged (unless `any_reward`), and where the
    package `miniwob` is not installed.
    """

    name = "miniwob"
    width, height = 160, 210  # CSS pixels of every page
    fresh_context = False  # the pages keep nothing between two loads
    quick = True  # they do all that a click causes before it returns, or frame by frame; with_images

    def __init__(self, pages: str = "choose-date-easy", instances: int = 100, scale: float = 1.0,
                 any_reward: bool = False):
        self.pages = [p.strip() for p in pages.split(",") if p.strip()]
        self.root = html_root()
        for page in self.pages:
            check_page(page, self.root)
            if rule_of(page).least is None and not any_reward:
                raise UserError(f"the MiniWoB++ page {page!r} cannot be judged: {rule_of(page).why}; leave "
                                f"it out, or give --any_reward true for the package's own judgement")
        if not self.pages or not 0 < instances <= SEEDS_PER_SPLIT or not scale > 0:
            raise UserError("MiniWoB++ needs a page (--tasks), 1 to a million --instances of each and a "
                            "positive --scale")
        self.instances, self.scale, self.any_reward = instances, scale, any_reward
        self.raw = {}                             # id of a session -> raw reward of its last verdict
        handler = functools.partial(_QuietFiles, directory=str(self.root))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.base = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="miniwob", daemon=True).start()

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, the pages in turn: every stretch of the list holds all of them equally."""
        if split not in SPLITS:
            raise UserError(f"MiniWob has no split {split!r}; choose one of {', '.join(SPLITS)}")
        seeds = range(SPLITS[split], SPLITS[split] + self.instances)
        return [self.task(page, seed) for seed in seeds for page in self.pages]

    def task(self, page: str, seed: int) -> Task:
        """One task; the page makes the instruction when it opens, so here it is still empty."""
        check_page(page, self.root)
        return Task(id=f"{page}.{seed}", site=page, seed=seed, data={"page": page})

    def origins(self, task: Task) -> list[str]:
        return [self.base]

    def open(self, task: Task, session) -> str:
        """Load the page, start the episode of the task's seed, return the instruction."""
        session.goto(f"{self.base}/miniwob/{task.data['page']}.html")
        page = session.page
        page.wait_for_function("() => typeof core !== 'undefined' && core.cover_div !== null")
        page.evaluate(START, [task.seed, STYLE, rule_of(task.data["page"]).witness or "true"])
        page.wait_for_function("() => WOB_TASK_READY")
        return page.evaluate(UTTERANCE)

    def done(self, session) -> bool:
        """Whether the page itself has ended the episode; False where the agent has navigated away."""
        return bool(session.page.evaluate("() => typeof WOB_DONE_GLOBAL !== 'undefined' && WOB_DONE_GLOBAL"))

    def judge(self, task: Task, session, answer: str) -> Verdict:
        """0 or 1 by the page's rule, or by `any_reward`; the answer plays no part."""
        state = session.page.evaluate(STATE)
        self.raw[id(session)] = None
        if state is None:
            return Verdict(0.0, "the agent left the page", {"raw>0": 0.0})
        done, raw, reason, witnessed = state
        if not done:
            return Verdict(0.0, "the page did not end the episode", {"raw>0": 0.0})
        self.raw[id(session)] = raw if math.isfinite(raw) else None
        above = raw > 0
        success = above if self.any_reward else reaches(rule_of(task.data["page"]), raw, witnessed)
        reason = f"raw reward {raw:g}" + (f": {reason}" if reason else "")
        if above and not success:
            reason += ", no success here (miniwob_rewards.py)"
        return Verdict(float(success), reason, {"raw>0": float(above)})

    def leave(self, session) -> dict:
        """The page's raw reward, None where it did not end the episode; nothing where nobody judged."""
        return {"raw_reward": self.raw.pop(id(session))} if id(session) in self.raw else {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def make(cfg) -> MiniWob:
    """The environment of a stage's config (fields tasks, instances, scale, any_reward of RolloutConfig)."""
    return MiniWob(cfg.tasks, cfg.instances, cfg.scale, cfg.any_reward)


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    """Static files, to be cached, with the charset that the pages forget to name and with images inside; no
    line on stderr per request."""

    protocol_version = "HTTP/1.1"
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}

    def send_head(self):
        file = Path(self.translate_path(self.path))
        if file.suffix not in (".css", ".html") or not file.is_file():
            return super().send_head()
        text = with_images(file)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(file))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        return io.BytesIO(text)

    def end_headers(self):
        self.send_header("Cache-Control", "max-age=86400")
        super().end_headers()

    def log_message(self, format, *args):
        pass


@functools.cache
def with_images(file: Path) -> bytes:
    """A style sheet or page with its images in place of their addresses: they are there as soon as it is, and
    no click has to fetch one, whose arrival a screenshot might miss."""
    def inside(found):
        image = file.parent / found[2].decode()
        if not image.is_file():
            return found[0]
        return b"url(data:image/%s;base64,%s)" % (found[3], base64.b64encode(image.read_bytes()))
    return re.sub(rb"""url\((["']?)([\w./-]+\.(png|gif))\1\)""", inside, file.read_bytes())


@functools.cache
def html_root() -> Path:
    """The package's HTML, found without importing the package (which would pull in selenium)."""
    spec = importlib.util.find_spec("miniwob")
    root = Path(next(iter(spec and spec.submodule_search_locations or ["nowhere"]))) / "html"
    if not (root / "core" / "core.js").is_file():
        raise UserError("the MiniWoB++ pages are not installed; run: pip install --no-deps miniwob")
    return root


def check_page(page: str, root: Path) -> None:
    """UserError unless the package has the page; it lists the names that are close."""
    names = sorted(p.stem for p in (root / "miniwob").glob("*.html"))
    if page not in names:
        close = difflib.get_close_matches(page, names, n=4, cutoff=0.4)
        hint = f"close names: {', '.join(close)}" if close else f"the names are those in {root / 'miniwob'}"
        raise UserError(f"no MiniWoB++ page {page!r}; {hint}")
