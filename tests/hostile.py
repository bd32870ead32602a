"""A hostile site on loopback, and an environment that sends episodes to it: each page does one thing.

SCENARIOS says for each what the agent does (`act` plays it) and what must come of it. On most pages the thing
happens at a click on (60, 60); then the page says "done", which `done` sees and `judge` rewards, so that an
episode succeeds exactly when it got through. Faults that no page can cause (a browser killed, say) are thrown
by `open`, or within a call of the session's that `open` has chosen. What is started after a Hostile was made
carries a mark, by which `left_behind` knows it.
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
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil

import grpo_hier
import rollout
from model.roles import Role
from web.chromium import below
from web.environment import Environment, Task, Verdict

CLICK = "click(x=60, y=60)"
END = "terminate(status='success')"
STRANGE = "not one of the task's sites"


@dataclass(frozen=True)
class Scenario:
    """`page`: path of the start page, or a whole address. `script`: the agent's answers. `status`, `fault`:
    of the episode; `retried`: kinds of the attempts before, with | where it may be any of several. `told`:
    what some line of the history must hold."""

    page: str
    script: tuple = (CLICK, END)
    status: str = "success"
    fault: str = ""
    retried: tuple = ()
    told: str = ""
    throw: str = ""  # whose process is killed
    times: int = 1  # how many attempts are hit
    during: str = ""  # "": by open(), at the first look; else in this method, after an episode's action


PLACE = "position: absolute; left: 20px; top: 40px; width: 120px; height: 40px"


def body(script: str, more: str = "") -> str:
    """A page with one button, whose click runs `script`; `done()` in it is what the agent wants to reach."""
    return (
        "<!doctype html><title>page</title><script>function done() { document.title = 'done' }</script>"
        f"<button style='{PLACE}' onclick=\"{script}\">go</button>{more}"
    )


PAGES = {
    "/ok": body("done()"),
    "/alert": body("alert('mind the gap'); done()"),
    "/confirm": body("if (confirm('are you sure')) done()"),
    "/prompt": body("if (prompt('your name', 'none') === 'none') done()"),
    "/alert-late": body("setTimeout(() => { alert('too late'); done() }, 250)"),
    "/alert-at-start": "<script>alert('hello there')</script>" + body("done()"),
    "/beforeunload": body(
        "location = '/arrived'", "<script>onbeforeunload = event => event.preventDefault()</script>"
    ),
    "/print": body("print(); done()"),
    "/file": body("document.querySelector('input').click(); done()", "<input type=file hidden>"),
    "/auth-link": body("location = '/auth'"),
    "/permission": body(
        "Promise.all([Notification.requestPermission(), new Promise(next => "
        "navigator.geolocation.getCurrentPosition(next, next))]).then(done)"
    ),
    "/popup": body("window.open('/child'); done()"),
    "/tab": body("done()", f"<a href=/arrived target=_blank style='{PLACE}; background: red'>tab</a>"),
    "/child-closes": body("window.open('/closing'); window.addEventListener('message', done)"),
    "/closing": "<script>opener.postMessage('bye', '*'); setTimeout(() => window.close(), 100)</script>",
    "/closes-itself": body("window.close()"),
    "/child": body("window.close()"),
    "/download": body("location = '/file.zip'; done()"),
    "/loop-link": body("location = '/redirect'"),
    "/script-loop": body("location = '/again'"),
    "/again": "<script>location = '/again?' + Math.random()</script>",
    "/leaves": "<script>setTimeout(() => location = 'http://elsewhere.invalid/', 20)</script>",
    "/foreign": body("location = 'http://elsewhere.invalid/'; "),
    "/foreign-port": body("location = 'http://127.0.0.1:@OTHER@/'"),
    "/foreign-tab": body("window.open('http://127.0.0.1:@OTHER@/')"),
    "/file-scheme": body("location = 'file:///etc/passwd'; done()"),
    "/long-poll": body("fetch('/never'); setTimeout(done, 10)"),
    "/long-poll-again": body("fetch('/never?' + Math.random())"),
    "/ticker": body("setInterval(() => document.body.append('.'), 5); done()"),
    "/canvas": body(
        "done()",
        "<canvas></canvas><script>"
        "const c = document.querySelector('canvas').getContext('2d');"
        "setInterval(() => { c.fillStyle = '#' + Math.random().toString(16).slice(2, 8);"
        "c.fillRect(0, 0, 50, 50) }, 5)</script>",
    ),
    "/font": body(
        "done()", "<style>@font-face { font-family: f; src: url(/never) }* { font-family: f }</style>"
    ),
    "/image": body("done()", "<img src=/never>"),
    "/slow-link": body("location = '/slow'"),
    "/dead-link": body("location = '/never'"),
    "/dies-on-click": body("location = '/dead'"),
    "/busy": body("for (;;);"),
    "/busy-later": body("setTimeout(() => { for (;;); }, 50)"),
    "/hog": body(
        "const all = []; setInterval(() => { for (let i = 0; i < 40; i++)"
        " all.push(new Uint8Array(1e6).fill(1)) }, 20)"
    ),
    "/hover": body(
        "",
        "<style>button:hover { background: red }</style><script>shifted = false;"
        "onkeydown = event => { shifted = event.shiftKey }</script>",
    ),
    "/arrived": body("", "<script>done()</script>"),
    "/kept": body(
        "document.title = localStorage.getItem('x') || document.cookie ? 'kept' : 'done';"
        "localStorage.setItem('x', 1); document.cookie = 'x=1'"
    ),
}
SCENARIOS = {
    "ok": Scenario("/ok"),
    "no-scroll": Scenario("/ok", ("swipe(direction='up')", CLICK, END), told="nothing on the page scrolls"),
    "wait-less": Scenario("/ok", ("wait(-3)", CLICK, END), told="failed: wait: -3 seconds are below 0"),
    "kept": Scenario("/kept"),
    "alert": Scenario("/alert", told="alert dialog said: mind the gap"),
    "confirm": Scenario("/confirm", told="confirm dialog said: are you sure"),
    "prompt": Scenario("/prompt", told="prompt dialog said: your name"),
    "alert-late": Scenario("/alert-late", (CLICK, "wait(seconds=0.5)", END), told="said: too late"),
    "alert-at-start": Scenario("/alert-at-start", told="said: hello there"),
    "beforeunload": Scenario("/beforeunload", told="beforeunload dialog"),
    "print": Scenario("/print"),
    "file": Scenario("/file", (CLICK, "wait(seconds=1)", END), told="asked for a file"),
    # a whole browser shows an error and is brought back, one without windows shows what the site answered
    "auth-link": Scenario("/auth-link", (CLICK, END), status="failure"),
    "auth": Scenario("/auth", status="infra", fault="auth", retried=("auth",)),
    "permission": Scenario("/permission"),
    "popup": Scenario("/popup", (CLICK, CLICK, END)),  # the 2nd in the window, and closes it
    "tab": Scenario("/tab"),
    "child-closes": Scenario("/child-closes", (CLICK, "wait(seconds=0.4)", END)),
    "closes-itself": Scenario("/child", (CLICK, END), status="failure"),
    "download": Scenario("/download", told="download was refused: file.zip"),
    "download-at-start": Scenario("/file.zip", status="infra", fault="download", retried=("download",)),
    "loop-link": Scenario("/loop-link", status="failure", told="REDIRECTS"),
    "loop-at-start": Scenario("/redirect", status="infra", fault="redirects", retried=("redirects",)),
    "script-loop": Scenario("/script-loop", status="infra", fault="redirects", retried=("redirects",)),
    "leaves-at-start": Scenario("/leaves", status="infra", fault="redirects", retried=("redirects",)),
    "foreign": Scenario("/foreign", status="failure", told=STRANGE),
    "foreign-port": Scenario("/foreign-port", status="failure", told=STRANGE),
    "foreign-tab": Scenario("/foreign-tab", status="failure", told=STRANGE),
    "foreign-url": Scenario("/ok", ("open_url(url='http://elsewhere.invalid/')", CLICK, END), told=STRANGE),
    "file-url": Scenario("/ok", ("open_url(url='file:///etc/passwd')", CLICK, END), told=STRANGE),
    "chrome-url": Scenario("/ok", ("open_url(url='chrome://crash')", CLICK, END), told=STRANGE),
    "data-url": Scenario("/ok", ("open_url(url='data:text/html,x')", CLICK, END), told=STRANGE),
    "file-scheme": Scenario("/file-scheme"),
    "long-poll": Scenario("/long-poll"),
    "ticker": Scenario("/ticker"),
    "canvas": Scenario("/canvas"),
    "font": Scenario("/font"),
    "image": Scenario("/image"),
    "slow-link": Scenario("/slow-link"),
    "dead-link": Scenario("/dead-link", status="failure", told="was stopped"),
    "dies-on-click": Scenario("/dies-on-click", status="infra", fault="connection", retried=("connection",)),
    "busy": Scenario("/busy", status="infra", fault="hung", retried=("hung",)),
    "busy-later": Scenario("/busy-later", status="infra", fault="hung", retried=("hung",)),
    "hog": Scenario(
        "/hog", (CLICK, *("wait(seconds=2)",) * 5), status="infra", fault="memory", retried=("memory",)
    ),
    "no-answer": Scenario("/never", status="infra", fault="timeout", retried=("timeout",)),
    "5xx": Scenario("/500", status="infra", fault="http_5xx", retried=("http_5xx",)),
    "5xx-once": Scenario("/500-once", retried=("http_5xx",)),
    "refused": Scenario("http://127.0.0.1:@CLOSED@/", status="infra", fault="refused", retried=("refused",)),
    "dns": Scenario("http://nowhere.invalid/", status="infra", fault="dns", retried=("dns",)),
    "tls": Scenario("https://127.0.0.1:@PORT@/ok", status="infra", fault="tls", retried=("tls",)),
    "renderer-killed": Scenario("/ok", throw="renderer", retried=("crash",)),
    "browser-killed": Scenario("/ok", throw="browser", retried=("browser_gone",)),
    "driver-killed": Scenario("/ok", throw="driver", retried=("driver_gone",)),
    "always-killed": Scenario(
        "/ok", throw="browser", times=9, status="infra", fault="browser_gone", retried=("browser_gone",)
    ),
}
# a page that dies while it is captured takes the browser along, sooner or later
GONE = {"renderer": "crash|browser|browser_gone", "browser": "browser_gone", "driver": "driver_gone"}
SCENARIOS |= {
    f"{what}-killed-in-{during}": Scenario(
        "/ok", ("wait(seconds=0)", "wait(seconds=0.3)", CLICK), throw=what, during=during, retried=(kinds,)
    )
    for what, kinds in GONE.items()
    for during in ("perform", "settle", "screenshot", "judge")
}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.texts, self.seen, self.over = self.server_address[1], {}, set(), threading.Event()
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
        self.opened, self.lock = {}, threading.Lock()
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
    plain, calls = getattr(session, method), itertools.count(1)

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
    told, name = " / ".join(step.line for step in episode.steps), episode.group.task.id
    retried = len(got[2]) == len(want.retried) and all(map(re.fullmatch, want.retried, got[2]))
    if got[:2] != (want.status, want.fault) or not retried:
        return f"{name}: {got}, not {(want.status, want.fault, want.retried)}; {told}; {episode.error[-500:]}"
    return "" if want.told in told else f"{name}: {want.told!r} is not in {told!r}"
