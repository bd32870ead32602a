"""One Chromium and its Playwright driver, for the thread that starts them: launched, bounded, ended.

Most Playwright calls have a timeout, `evaluate` and DevTools commands have none. So every stretch of work
with the browser stands in a `bound`, and a Watchdog thread, which knows until when each browser's present
operation and its episode may last and how much memory it may take, ends the processes of one that goes
beyond. The call that is blocked in it then raises, and the thread starts another browser. Only processes of
the browser's own are ever ended; of one on another machine, the connection. Chromium ends when its driver
does, and the driver when this process does, however that happens. Pages are in Chromium's sandbox, which it
has not for root.

Kinds of fault, of `Chromium.fault`: crash, browser_gone, driver_gone, page_gone; hung (an operation went
beyond its bound), deadline (the episode did), memory; of the site: refused, dns, tls, auth, redirects,
download, connection, http_5xx, timeout; model (a model's server); verdict (the environment gave none);
browser (any other error of Playwright's), closed (the pool is ending).
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.error import URLError

import psutil

from runtime import UserError

CHROMIUM_ARGS = ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                 "--disable-sync", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--mute-audio",
                 "--deny-permission-prompts",
                 "--disable-partial-raster"]      # else a pixel's last bit depends on what was painted before
LAUNCH, STOP = 30.0, 5.0                          # s
SHELLS = "sh", "dash", "bash", "busybox"
UNREADABLE = psutil.Error, OSError                # of a process that has ended, or when files run out
FAULTS = (                                        # what an error says -> its kind; the first that fits
    (r"^no verdict", "verdict"), (r"model server", "model"),
    (r"Target crashed|Page crashed", "crash"), (r"connection closed|EPIPE", "driver_gone"),
    (r"has been closed|Browser closed|no object with guid|No target with given id", "page_gone"),
    (r"ERR_NAME_NOT_RESOLVED|getaddrinfo|Name or service", "dns"),
    (r"(?i)ERR_CONNECTION_REFUSED|connection ?refused", "refused"), (r"ERR_CERT_|ERR_SSL_|\bSSL", "tls"),
    (r"ERR_TOO_MANY_REDIRECTS|redirects without end|start page went", "redirects"),
    (r"ERR_INVALID_AUTH_CREDENTIALS|answers 401", "auth"),
    (r"Download is starting", "download"), (r"answers 5\d\d|HTTP Error 5\d\d", "http_5xx"),
    (r"(?i)timeout \d+ms exceeded|timed out", "timeout"),
    (r"ERR_(EMPTY_RESP|INVALID_HTTP|ABORTED|CONNECTION_|NETWORK_|INCOMPLETE)", "connection"),
    (r"(?i)reset by peer|remote end|connection aborted|broken pipe|incomplete ?read", "connection"))
SITE = {"refused", "dns", "tls", "auth", "redirects", "download", "connection", "http_5xx", "timeout",
        "page_gone", "model", "verdict"}                   # the site's doing: the browser itself is well
SANDBOX = ("Chromium's sandbox does not start here: let users make namespaces (sysctl -w "
           "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0), or run as "
           "root in a container, which goes without it (a server of browsers: not as root)")


def web_errors() -> tuple:
    """The exceptions that are the web's weather; any other is a bug and ends the run."""
    from playwright.sync_api import Error
    return Error, ConnectionError, TimeoutError, URLError, http.client.HTTPException


def chromium() -> str | None:
    """Path of the browser: $CHROMIUM, a system one, or None for Playwright's own."""
    if path := os.environ.get("CHROMIUM"):
        if not Path(path).exists():
            raise UserError(f"CHROMIUM={path} does not exist; unset it or give the browser's path")
        return path
    # The first is Debian's browser without windows: the others open one, with a renderer for its toolbar, for
    # every context, which takes twice the CPU time. (In the PATH there is a shell that stays around it.)
    names = "/usr/lib/chromium/chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
    return next(filter(None, map(shutil.which, names)), None)


class Watchdog:
    """One thread that ends what goes beyond its bounds, for all browsers that it watches. `memory` in MB."""

    def __init__(self, memory: float):
        self.memory = memory * 2**20
        self.watched: list[Chromium] = []
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.bell = threading.Event()             # never rings: only for its bounded wait

    def watch(self, browser: "Chromium") -> None:
        with self.lock:
            self.watched.append(browser)
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, daemon=True, name="browser watchdog")
                self.thread.start()

    def forget(self, browser: "Chromium") -> None:
        with self.lock:
            self.watched = [b for b in self.watched if b is not browser]

    def _run(self):
        weighed = 0.0
        while True:
            with self.lock:
                if not self.watched:
                    self.thread = None
                    return
                browsers = list(self.watched)
            for browser in browsers:
                browser.check()
            if time.monotonic() > weighed + 2:
                self._weigh({p.pid: b for b in browsers if (p := b.process)})
                weighed = time.monotonic()
            self.bell.wait(0.25)

    def _weigh(self, roots: dict) -> None:
        """End the browsers (by process id) whose processes' own memory, without what they share, is too
        much."""
        parents, sums = {}, dict.fromkeys(roots, 0)
        for p in below():
            with contextlib.suppress(*UNREADABLE):
                pid, memory, parents[p.pid] = p.pid, p.memory_info(), p.ppid()
                while pid not in roots and pid in parents:    # parents come before their children
                    pid = parents[pid]
                if pid in roots:
                    sums[pid] += memory.rss - getattr(memory, "shared", 0)
        for pid, size in sums.items():
            if size > self.memory:
                roots[pid].kill("memory")


class Chromium:
    """Made, used and stopped in one thread; `check` and `kill` are for others."""

    def __init__(self, watchdog: Watchdog, server: str = ""):
        self.watchdog, self.server = watchdog, server         # ws:// of a Playwright server, "" for none
        self.playwright: Any = None
        self.browser: Any = None
        self.process = self.driver = None         # psutil's, of Chromium and of Playwright's driver
        self.token = uuid.uuid4().hex             # a switch by which the browser's process is known
        self.due = self.deadline = float("inf")   # monotonic s, of the present operation and of the episode
        self.killed, self.killed_at, self.crashed, self.thread = "", 0.0, None, 0     # crashed: a page

    def launch(self, args: list[str]) -> None:
        """Start driver and browser, ending the ones before. Raises UserError where there is no browser."""
        from playwright.sync_api import Error
        self.stop()
        if self.killed == "closed":
            raise ConnectionError("the pool is ending")
        self.killed, self.crashed, self.token = "", None, uuid.uuid4().hex
        self.thread = threading.get_native_id()
        self.watchdog.watch(self)
        args = [*CHROMIUM_ARGS, *args, f"--session-token={self.token}"]
        with self.bound(LAUNCH + STOP):
            try:
                self._start_driver()
                self.browser = self._connect(args) if self.server else self.playwright.chromium.launch(
                    executable_path=chromium(), args=args, chromium_sandbox=os.geteuid() != 0,
                    timeout=LAUNCH * 1000)
            except Error as e:
                self.stop()
                if "Executable doesn't exist" in str(e):
                    raise UserError("no Chromium; run ./setup.sh, or set CHROMIUM to a browser's path") from e
                if "sandboxing failed" in str(e):  # Playwright's words for Chromium's "No usable sandbox"
                    raise UserError(SANDBOX) from e
                raise
        self.process = self._find()
        self.driver = self.driver or (self.process and self.process.parent())

    def _start_driver(self) -> None:
        from playwright.sync_api import sync_playwright
        try:
            self.playwright = sync_playwright().start()
        except Exception as e:                    # it has no type of its own for a driver that ends at once
            raise ConnectionError(f"Playwright's driver did not start, connection closed: {e}") from e
        self.driver = started_last(self.thread)
        asyncio.get_running_loop().set_exception_handler(not_the_drivers_end)

    def _connect(self, args: list[str]):
        """A browser of `playwright run-server --unsafe`, wherever that runs; UserError where it does not have
        our switches, which confine it to the task's sites."""
        options = {"args": args, "chromiumSandbox": os.geteuid() != 0}
        if path := os.environ.get("CHROMIUM"):    # there, too
            options["executablePath"] = path
        browser = self.playwright.chromium.connect(
            self.server, headers={"x-playwright-launch-options": json.dumps(options)}, timeout=LAUNCH * 1000)
        started = browser.new_browser_cdp_session().send("SystemInfo.getInfo")["commandLine"]
        if f"--session-token={self.token}" not in started:
            raise UserError(f"the browser of {self.server} was not started with our switches; start the "
                            f"server as: playwright run-server --unsafe")
        return browser

    def stop(self) -> None:
        """End browser and driver, whatever state they are in, within 10 s."""
        with self.bound(STOP):
            for thing, end in ((self.browser, "close"), (self.playwright, "stop")):
                if thing is not None:
                    with contextlib.suppress(Exception):      # a dead browser cannot be closed: as we wish
                        getattr(thing, end)()
        for process in (self.process, self.driver):
            end_tree(process)
        self.watchdog.forget(self)
        self.playwright = self.browser = self.process = self.driver = None

    @contextlib.contextmanager
    def bound(self, seconds: float):
        """What happens inside must end in time, or the browser is ended and the blocked call raises."""
        before, self.due = self.due, min(self.due, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.due = before

    @contextlib.contextmanager
    def paused(self):
        """For an environment that waits for something else than its pages (a replica, a reset, a judge
        model): no bound applies inside, and the present operation and the episode may last as much longer."""
        start, due, deadline = time.monotonic(), self.due, self.deadline
        self.due = self.deadline = float("inf")
        try:
            yield
        finally:
            took = time.monotonic() - start
            self.due, self.deadline = due + took, deadline + took

    def check(self) -> None:
        """Four times a second, by the watchdog."""
        now = time.monotonic()
        if self.killed and now > self.killed_at + 3:
            end_tree(self.driver)                 # it has not noticed, and our thread waits for it
        elif not self.killed and now > min(self.due, self.deadline):
            self.kill("deadline" if now > self.deadline else "hung")

    def kill(self, why: str) -> None:
        """End this browser's processes; `why` is the fault of the call that raises."""
        if not self.killed or why == "closed":
            self.killed, self.killed_at = why, self.killed_at if self.killed else time.monotonic()
        end_tree(self.process or self._find() or self.driver or started_last(self.thread))

    def _find(self):
        """The browser's process: of all below us, only these carry its token: perhaps a shell around it, it,
        and a child of its own that is just being forked."""
        for p in below():
            with contextlib.suppress(*UNREADABLE):
                if any(self.token in word for word in p.cmdline()) and Path(p.exe()).name not in SHELLS:
                    return p
        return None

    def fault(self, error: BaseException) -> str:
        """The kind of one of `web_errors`, after what the browser's state and the error's text say."""
        if time.monotonic() > self.deadline:
            return "deadline"
        if self.killed:
            return self.killed
        if self.crashed:                          # and may have taken the browser along
            return "crash"
        kind = next((kind for sign, kind in FAULTS if re.search(sign, str(error))), "browser")
        if kind in ("page_gone", "driver_gone", "browser") and self.driver:
            if not self.driver.is_running() or self.driver.status() == psutil.STATUS_ZOMBIE:
                return "driver_gone"
            if self.browser and not self.browser.is_connected():
                return "browser_gone"
        return kind


def not_the_drivers_end(loop, context: dict) -> None:
    """What asyncio has to say of Playwright's loop, but for the end of the driver: the call that raises tells
    of it, and a future of Playwright's that nobody waits for tells once more."""
    if "reading from the driver" not in str(context.get("exception")):
        loop.default_exception_handler(context)


def end_tree(process) -> None:
    """Kill a process and all below it, as far as they are still there."""
    for p in [process, *below(process)] if process else ():
        with contextlib.suppress(*UNREADABLE):
            p.kill()


def below(process=None) -> list:
    """All processes below one (this one), parents before children; none while the system does not tell."""
    with contextlib.suppress(*UNREADABLE):
        return (process or psutil.Process()).children(recursive=True)
    return []


def started_last(thread: int):
    """The process that one of our threads started last, where the system tells (Linux); else None."""
    with contextlib.suppress(IndexError, *UNREADABLE):
        children = Path(f"/proc/self/task/{thread}/children").read_text(encoding="utf-8").split()
        return psutil.Process(int(children[-1]))
    return None
