"""A hostile site on loopback, and an environment that sends episodes to it: each page does one thing.

scenarios.py has the pages, and says for each what the agent does (`act` plays it) and what must come of it. A
page that says "done" is what `done` sees and `judge` rewards, so that an episode succeeds exactly when it got
through. Faults that no page can cause (a browser killed, say) are thrown by `open`, or within a call of the
session's that `open` has chosen. What is started after a Hostile was made carries a mark, by which
`left_behind` knows it.
"""

import contextlib
import http.server
import itertools
import json
import os
import re
import threading
import time
import uuid
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
from scenarios import CLICK, END, PAGES, SCENARIOS

import grpo_hier
import rollout
from language import actions
from model.roles import Role
from web import effects
from web.chromium import below
from web.environment import Environment, RolloutConfig, Task, Verdict
from web.session import Session

SETTINGS = {
    "retries": 1,
    "coordinates": "page",
    "max_steps": 6,
    "call_timeout": 4.0,
    "settle": 1.0,
    "retry_wait": 0.0,
    "memory": 500.0,
    "deadline": 120.0,
    "open_timeout": 60.0,
}

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]
        self.texts = {}                           # path -> page
        self.seen = set()                         # addresses that have failed once
        self.over = threading.Event()             # ends the answers that are never given
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A browser that was killed hangs up: nothing to report."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = urlsplit(self.path).path
        if path == "/never":
            self.server.over.wait(60)
        elif path == "/dead":
            self.close_connection = True
        elif path == "/redirect":
            self.send("", 302, {"Location": "/redirect"})
        elif path == "/auth":
            self.send("who are you?", 401, {"WWW-Authenticate": 'Basic realm="site"'})
        elif path == "/file.zip":
            self.send("PK", 200, {"Content-Disposition": "attachment", "Content-Type": "application/zip"})
        elif path == "/500-once" and self.path in self.server.seen:
            self.send(PAGES["/ok"])
        elif path.startswith("/500"):
            self.server.seen.add(self.path)
            self.send("down", 503)
        else:
            if path == "/slow":
                self.server.over.wait(0.6)
            self.send(
                self.server.texts.get("/arrived" if path == "/slow" else path, "nothing here"),
                200 if path in self.server.texts or path == "/slow" else 404,
            )

    def send(self, text, status=200, headers=None):
        data = text.encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "text/html; charset=utf-8"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Hostile(Environment):
    """Tasks are scenarios; an episode's `seed` tells one from another, so that a fault can be thrown once in
    each."""

    name = "hostile"
    width, height = 320, 240

    def __init__(self):
        self.server, self.other, self.closed = Server(), Server(), Server()
        self.closed.shutdown()
        self.closed.server_close()
        ports = {"@PORT@": self.server.port, "@OTHER@": self.other.port, "@CLOSED@": self.closed.port}

        def filled(text):
            for name, port in ports.items():
                text = text.replace(name, str(port))
            return text

        self.scenarios = {name: (s, filled(s.page)) for name, s in SCENARIOS.items()}
        self.server.texts = {path: filled(text) for path, text in PAGES.items()}
        self.other.texts = {"/": "another site"}
        self.base = f"http://127.0.0.1:{self.server.port}"
        self.opened = {}                          # id of a task -> how often it was
        self.lock = threading.Lock()
        os.environ.setdefault("HOSTILE", uuid.uuid4().hex)

    def task(self, name: str, seed: int = 0) -> Task:
        return Task(f"{name}.{seed}", name, seed=seed)

    def origins(self, task):
        parts = urlsplit(self.scenarios[task.site][1])
        return [self.base, *([f"{parts.scheme}://{parts.netloc}"] if parts.netloc else [])]

    def open(self, task, session):
        scenario, page = self.scenarios[task.site]
        session.goto(page if "://" in page else f"{self.base}{page}?{task.seed}")
        with self.lock:
            self.opened[task.id] = self.opened.get(task.id, 0) + 1
        if self.strikes(task, ""):
            hit(session, scenario.throw)
            threading.Event().wait(0.2)  # until everybody has noticed
            session.page.evaluate("1")
        elif self.strikes(task, "perform", "settle", "screenshot"):
            ambush(session, scenario.during, scenario.throw)
        return task.id

    def strikes(self, task, *during) -> bool:
        scenario, _ = self.scenarios[task.site]
        first = 2 if scenario.during else 1  # no. 1 is the pool's look at the task, no part of an episode
        hits = range(first, first + scenario.times)
        return bool(scenario.throw) and scenario.during in during and self.opened[task.id] in hits

    def done(self, session):
        return session.page.title() == "done"

    def judge(self, task, session, answer):
        if self.strikes(task, "judge"):
            hit(session, self.scenarios[task.site][0].throw)
        return Verdict(float(session.page.title() == "done"), session.page.title())

    def close(self):
        for server in (self.server, self.other):
            server.over.set()
            server.shutdown()
            server.server_close()


def hit(session, what: str) -> None:
    """Kill a process of the session's own, unless it has just ended by another fault."""
    process = session.driver if what == "driver" else session.process
    for p in () if process is None else below(process) if what == "renderer" else [process]:
        with contextlib.suppress(psutil.Error):
            if what != "renderer" or "--type=renderer" in p.cmdline():
                p.kill()


def ambush(session, method: str, what: str) -> None:
    """The second such call of the session's, that after an action, has `what` killed while it lasts."""
    plain = getattr(session, method)
    calls = itertools.count(1)

    def sprung(*args):
        if next(calls) == 2:
            delattr(session, method)
            delay = 0.0 if method == "screenshot" else 0.05  # s; the others take at least 0.1
            threading.Timer(delay, hit, (session, what)).start()
        return plain(*args)

    setattr(session, method, sprung)


def left_behind(patience: float = 5.0) -> set:
    """Our processes that do not end within so many seconds: those below this one, also dead ones, and those
    with the mark, which need not have a parent any more."""
    until = time.monotonic() + patience
    while True:
        found = {*psutil.Process().children(recursive=True), *filter(marked, psutil.process_iter())}
        if not found or time.monotonic() > until:
            return found
        threading.Event().wait(0.1)


def marked(process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.pid != os.getpid() and process.environ().get("HOSTILE") == os.environ["HOSTILE"]
    return False


class Prompts:
    """An actor's prompt is what its script needs: the task and the number of the step."""

    def decomposer(self, instruction):
        return "", json.dumps([instruction, 0])

    def actor(self, instruction, history, plan):
        return "", json.dumps([instruction, len(history)])


def scripted(env, cfg, prompts=None, roles=("actor",)):
    """A pool of the paper's agent whose models are scripts, with a decomposer only where `roles` has one."""
    agent = partial(grpo_hier.Agent, cfg, prompts or Prompts())
    return rollout.Pool(env, cfg, agent, [Role(name, temperature=0.8) for name in roles])


def act(requests):
    """The actors' answers: the scenario's script, then the end."""
    out = []
    for request in requests:
        task, step = json.loads(request.user)
        script = SCENARIOS[task.rsplit(".", 1)[0]].script
        text = f"<action>{script[step] if step < len(script) else END}</action>"
        out.append(SimpleNamespace(text=text, image_size=(320, 240), response_ids=[0]))
    return out


def outcome(episode) -> str:
    """ "" where the scenario came out as it must, else what was wrong."""
    want = SCENARIOS[episode.group.task.site]
    got = (episode.status, episode.fault, tuple(episode.retried))
    told = " / ".join(step.line for step in episode.steps)
    name = episode.group.task.id
    retried = len(got[2]) == len(want.retried) and all(map(re.fullmatch, want.retried, got[2]))
    if got[:2] != (want.status, want.fault) or not retried:
        return f"{name}: {got}, not {(want.status, want.fault, want.retried)}; {told}; {episode.error[-500:]}"
    return "" if want.told in told else f"{name}: {want.told!r} is not in {told!r}"


# ----------------------------------------------------------------------------------- a session without a pool
def in_a_session(site, work, **settings):
    """work(session), in a thread of its own, since Playwright has one driver per thread."""
    failed = []

    def run():
        session = Session(site, RolloutConfig(**SETTINGS | settings))
        try:
            work(session)
        except BaseException as e:
            failed.append(e)
        finally:
            session.stop()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in failed:
        raise error


def start(session, page):
    """The session at a page of the hostile site, settled."""
    session.env.scenarios["here"] = (SCENARIOS["ok"], page)
    session.open(session.env.task("here"))
    session.settle()


def click(session, text=CLICK):
    """One action and the wait for it; what the browser noted, and the seconds it took."""
    session.notes.clear()
    begin = time.monotonic()
    for call in actions.parse(text).calls:
        session.perform(call, effects.ActionSettings(timeout=session.cfg.call_timeout))
        session.settle()
    return session.notes, time.monotonic() - begin
