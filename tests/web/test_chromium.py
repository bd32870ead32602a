"""The browser as a process: sandbox, kinds of fault, the watchdog, bounds, and that nothing is left of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hostile import SETTINGS, Hostile, in_a_session, start
from playwright.sync_api import Error

from runtime import UserError
from web.chromium import FAULTS, SITE, Chromium, Watchdog


@pytest.fixture(scope="module")
def site():
    environment = Hostile()
    yield environment
    environment.close()


@pytest.mark.parametrize("uid", [0, 1000])
def test_the_sandbox_is_on_unless_we_are_root(uid, site, monkeypatch):
    def work(browser):
        try:
            browser.launch([])
            assert ("--no-sandbox" in browser.process.cmdline()) == (uid == 0)
        except UserError as e:  # it has none here, as for one who is root after all
            assert uid and "sandbox" in str(e) and "namespaces" in str(e) and "\n" not in str(e)
            assert not browser.playwright and browser not in browser.watchdog.watched

    monkeypatch.setattr(os, "geteuid", lambda: uid)
    in_a_session(site, work)


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_remote_browser_is_asked_for_its_sandbox_too(uid, monkeypatch):
    def connect(server, headers, timeout):
        assert json.loads(headers["x-playwright-launch-options"])["chromiumSandbox"] == bool(uid)
        raise Error("it is not there")

    monkeypatch.setattr(os, "geteuid", lambda: uid)
    browser = Chromium(Watchdog(500), "ws://there")
    browser.playwright = SimpleNamespace(chromium=SimpleNamespace(connect=connect))
    with pytest.raises(Error, match="not there"):
        browser._connect([])


@pytest.mark.parametrize(
    "text, kind",
    [
        ("Page.goto: net::ERR_CONNECTION_REFUSED at http://x/", "refused"),
        ("<urlopen error [Errno 111] Connection refused>", "refused"),
        ("Page.goto: net::ERR_NAME_NOT_RESOLVED at http://x/", "dns"),
        ("net::ERR_CERT_AUTHORITY_INVALID", "tls"),
        ("net::ERR_SSL_PROTOCOL_ERROR", "tls"),
        ("net::ERR_TOO_MANY_REDIRECTS", "redirects"),
        ("net::ERR_INVALID_AUTH_CREDENTIALS", "auth"),
        ("Page.goto: Download is starting", "download"),
        ("http://x/ answers 503", "http_5xx"),
        ("Page.goto: Timeout 15000ms exceeded.", "timeout"),
        ("net::ERR_EMPTY_RESPONSE", "connection"),
        ("[Errno 104] Connection reset by peer", "connection"),
        ("Page.evaluate: Target crashed", "crash"),
        ("Playwright connection closed", "driver_gone"),
        ("Target page, context or browser has been closed", "page_gone"),
        ("BrowserContext.new_cdp_session: page: no object with guid page@9efc", "page_gone"),
        ("no verdict: http://x/ cannot be read: Timeout 3000ms exceeded", "verdict"),
        ("the start page went to chrome-error://chromewebdata/", "redirects"),
        ("something else", "browser"),
    ],
)
def test_a_fault_has_a_kind(text, kind):
    assert Chromium(Watchdog(100)).fault(ConnectionError(text)) == kind
    assert SITE <= {k for _, k in FAULTS}


class Watched:
    """A browser that ends between two looks of its watchdog's."""

    def __init__(self, mistake=None):
        self.mistake, self.checks, self.looks = mistake, 0, 0

    @property
    def process(self):
        self.looks += 1
        return psutil.Process() if self.looks % 2 else None

    def check(self):
        self.checks += 1
        if self.mistake:
            raise self.mistake

    def is_checked(self):
        before, until = self.checks, time.monotonic() + 4
        while self.checks < before + 3 and time.monotonic() < until:
            time.sleep(0.05)
        return self.checks >= before + 3


def test_the_browsers_process_is_neither_a_shell_around_it_nor_a_child_that_is_being_forked(monkeypatch):
    browser = Chromium(Watchdog(1e6))
    token = f"--session-token={browser.token}"
    family = [SimpleNamespace(exe=lambda exe=exe: exe, cmdline=lambda words=words: [exe, *words])
              for exe, *words in (["/driver/node"], ["/usr/bin/dash", "/usr/bin/chromium", token],
                                  ["/lib/chromium", token], ["/lib/chromium", token], ["/lib/chromium"])]
    monkeypatch.setattr("web.chromium.below", lambda: family)
    assert browser._find() is family[2]


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), OSError(24, "Too many open files"), None])
def test_a_watchdog_outlives_what_it_cannot_read(error, monkeypatch):
    def children(*_, **__):
        if error:
            raise error
        return []

    monkeypatch.setattr(psutil.Process, "children", children)
    watchdog, browser = Watchdog(1e6), Watched()
    watchdog.watch(browser)
    assert browser.is_checked() and browser.looks
    watchdog.forget(browser)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watchdog_that_a_mistake_has_ended_is_replaced():
    watchdog, browsers = Watchdog(1e6), (Watched(KeyError()), Watched())
    watchdog.watch(browsers[0])
    watchdog.thread.join(4)
    watchdog.forget(browsers[0])
    watchdog.watch(browsers[1])
    assert browsers[1].is_checked()
    watchdog.forget(browsers[1])


def test_a_pause_moves_both_bounds():
    browser = Chromium(Watchdog(100))
    browser.deadline = time.monotonic() + 100
    deadline = browser.deadline
    with browser.bound(50):
        due = browser.due
        with browser.paused():
            assert browser.due == browser.deadline == float("inf")
            time.sleep(0.05)
        assert 0.05 <= browser.due - due < 1 and 0.05 <= browser.deadline - deadline < 1
        with browser.bound(1e6):
            assert browser.due < due + 1  # an inner bound never widens the outer one
    assert browser.due == float("inf")


def test_a_browser_is_replaced_after_so_many_tasks(site):
    def work(session):
        pids = []
        for _ in range(3):
            start(session, "/ok")
            pids.append(session.process.pid)
        assert pids[0] == pids[1] != pids[2] and not psutil.pid_exists(pids[0])

    in_a_session(site, work, recycle=2)


KILLED = """
import sys; sys.path[:0] = {path!r}
from hostile import Hostile, act, scripted
from web.environment import RolloutConfig
env = Hostile()
pool = scripted(env, RolloutConfig(threads=2, coordinates="page", **{settings!r}))
print("ready", flush=True)
list(pool.run([env.task("ok"), env.task("busy")] + [env.task("ok", i) for i in range(1, 300)], 1, 1, 0,
              dict(actor=act)))
"""


def test_nothing_is_left_after_kill_9(tmp_path):
    """Also while one page is busy. The browsers' profile folders go too."""
    root = Path(__file__).resolve().parents[1]
    code = KILLED.format(path=[str(root), str(root.parent)], settings=SETTINGS | {"call_timeout": 30.0})
    code = code.replace("'coordinates': 'page', ", "")
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    child.stdout.readline()
    until, tree = time.monotonic() + 90, []
    while time.monotonic() < until and sum("--type=renderer" in " ".join(command(p)) for p in tree) < 2:
        time.sleep(0.1)
        tree = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    assert len(tree) > 8
    until = time.monotonic() + 15
    while time.monotonic() < until and any(alive(p) for p in tree):
        time.sleep(0.1)
    assert not [p for p in tree if alive(p)]
    assert not list(tmp_path.glob("playwright*"))


def command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
