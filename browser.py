"""One Chromium for one thread: launched, driven and stopped there; the page an agent sees, and what may happen to it.

A session opens every task in a context of its own (no cookies, storage or cache of an earlier episode) unless the
environment says that its pages keep nothing. The newest open page is the one the agent sees; when it closes, its opener
is back. Native dialogs are answered at once; what they said, like everything the browser refused, goes into `notes`.

Nothing here sleeps. `settle` waits for what an action caused: navigations, new tabs, requests, images, fonts, then two
frames in which the document does not change (and, where there is a canvas or video, two equal screenshots). An address
that does not get quiet costs the bound once; later visits only wait for what they themselves start.

Bounds: most Playwright calls have a timeout, `evaluate` and CDP have none. So a Watchdog thread knows until when each
session's present operation, and its episode, may last, and how much memory its browser may take; it ends that session's
own processes, the blocked call raises, and the session starts anew. Chromium ends when its driver does, the driver
when this process does, however that happens.

Kinds of fault, of `Session.fault` (FAULTS has their signs): crash, browser_gone, driver_gone, page_gone; hung (an
operation beyond its bound), deadline (the episode beyond it), memory; refused, dns, tls, auth, redirects, download,
connection, http_5xx, timeout (the site's); browser (any other error of it), closed (the pool is ending).
"""

import base64
import contextlib
import http.client
import os
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit

import psutil

import actions
from runtime import UserError

CHROMIUM_ARGS = ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                 "--disable-sync", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--mute-audio",
                 "--deny-permission-prompts"]
# Animations end in their first millisecond, with their events, so that one page gives one screenshot. A sheet of this
# kind is subject to no content policy, and no observer of the page sees it.
INIT = """{ const still = new CSSStyleSheet();
  still.replaceSync(`*, *::before, *::after { caret-color: transparent !important; scroll-behavior: auto !important;
    transition-duration: 1ms !important; transition-delay: 0s !important; animation-duration: 1ms !important;
    animation-delay: 0s !important; animation-iteration-count: 1 !important }`);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, still];
  window.print = () => {}; }"""
SETTLED = """([quiet, bound]) => new Promise(done => {
  const start = performance.now(); let last = start - 1e9, calm = 0;
  const watch = new MutationObserver(() => { last = performance.now(); calm = 0; });
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  const end = state => { watch.disconnect(); clearTimeout(timer); done(state); };
  const timer = setTimeout(() => end('restless'), bound);
  const here = () => document.readyState === 'complete' && document.fonts.status === 'loaded'
    && [...document.images].every(image => image.complete || image.loading === 'lazy');
  const look = () => {
    if (++calm >= 2 && here() && performance.now() - last >= quiet)
      end(document.querySelector('canvas, video') ? 'pixels' : 'still');
    else requestAnimationFrame(look); };
  requestAnimationFrame(look); })"""
ENDLESS = {"eventsource", "websocket", "media", "ping"}      # types of requests that nobody waits for
GRACE = 5.0                                                  # s that Playwright's own timeout has before the watchdog acts
FAULTS = (                                                   # what an error says -> its kind; the first that fits
    (r"Target crashed|Page crashed", "crash"), (r"connection closed|EPIPE", "driver_gone"),
    (r"has been closed|Browser closed", "page_gone"), (r"ERR_NAME_NOT_RESOLVED|getaddrinfo|Name or service", "dns"),
    (r"(?i)ERR_CONNECTION_REFUSED|connection ?refused", "refused"), (r"ERR_CERT_|ERR_SSL_|\bSSL", "tls"),
    (r"ERR_TOO_MANY_REDIRECTS", "redirects"), (r"ERR_INVALID_AUTH_CREDENTIALS", "auth"),
    (r"Download is starting", "download"), (r"answers 5\d\d|HTTP Error 5\d\d", "http_5xx"),
    (r"(?i)timeout \d+ms exceeded|timed out", "timeout"),
    (r"ERR_EMPTY_RESPONSE|ERR_INVALID_HTTP|ERR_ABORTED|ERR_CONNECTION_|ERR_NETWORK_|ERR_INCOMPLETE|(?i:reset by peer|"
     r"remote end|connection aborted|broken pipe)", "connection"))
SITE = {"refused", "dns", "tls", "auth", "redirects", "download", "connection", "http_5xx", "timeout", "page_gone"}


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
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def redact(thing, secrets):
    """A JSON value without any of the `secrets` (of at least four letters) in its texts."""
    if isinstance(thing, str):
        for secret in sorted((s for s in secrets if len(s) > 3), key=len, reverse=True):
            thing = thing.replace(secret, "***")
        return thing
    if isinstance(thing, dict):
        return {k: redact(v, secrets) for k, v in thing.items()}
    return [redact(v, secrets) for v in thing] if isinstance(thing, (list, tuple)) else thing


class Watchdog:
    """One thread that ends what outlasts its bound, in all sessions that it watches."""

    def __init__(self, memory_mb: float):
        self.memory, self.sessions, self.lock, self.thread = memory_mb * 2**20, [], threading.Lock(), None
        self.bell = threading.Event()

    def watch(self, session) -> None:
        with self.lock:
            if session not in self.sessions:
                self.sessions.append(session)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True, name="browser watchdog")
                self.thread.start()

    def forget(self, session) -> None:
        with self.lock:
            if session in self.sessions:
                self.sessions.remove(session)

    def _run(self):
        rounds = 0
        while True:
            with self.lock:
                sessions = list(self.sessions)
                if not sessions:
                    self.thread = None
                    return
            for session in sessions:
                session.check()
            rounds += 1
            if rounds % 4 == 0:
                self._weigh(sessions)
            self.bell.wait(0.25)

    def _weigh(self, sessions) -> None:
        """End browsers whose processes' own memory (without what they share) is beyond the limit."""
        roots, sums, parents = {s.process.pid: s for s in sessions if s.process}, {}, {}
        children = [p for p in psutil.Process().children(recursive=True)] if roots else []
        for p in children:
            with contextlib.suppress(psutil.Error):
                parents[p.pid] = p.ppid()
                memory, pid = p.memory_info(), p.pid
                while pid not in roots and pid in parents:   # a parent always comes before its children
                    pid = parents[pid]
                sums[pid] = sums.get(pid, 0) + memory.rss - getattr(memory, "shared", 0)
        for pid, session in roots.items():
            if sums.get(pid, 0) > self.memory:
                session.kill("memory")


class Session:
    """One browser, for the thread that made it. `page` is the page the agent sees: the newest one that is open.

    `notes`: what the browser had to say since the last step; `allowed`: origins that may be visited (an environment may
    narrow them); `secrets`: texts that an environment never wants to see in a file; `spent`: seconds in `settle`.
    """

    def __init__(self, env, cfg, watchdog: Watchdog | None = None):
        self.env, self.cfg, self.watchdog = env, cfg, watchdog or Watchdog(cfg.memory)
        self.playwright = self.browser = self.context = self.page = self.process = self.driver = None
        self.notes, self.allowed, self.secrets, self.spent = [], (), set(), 0.0
        self.hosts, self.opened, self.home = set(), 0, "about:blank"
        self.due = self.deadline = float("inf")   # until when: the present operation, the episode (monotonic seconds)
        self.killed, self.killed_at, self.crashed, self.token = "", 0.0, False, ""
        self._fresh()

    def _fresh(self):
        """What belongs to one context."""
        self.pending, self.failed, self.opening = set(), ("", ""), 0
        self.openers, self.wires, self.held = {}, {}, set()
        self.ignored, self.restless = set(), set()           # addresses that never finish; that never get quiet

    # ---------------------------------------------------------------------------------------------- bounds and processes
    @contextlib.contextmanager
    def bound(self, seconds: float):
        """Whatever happens inside must end in time, or the browser is ended."""
        before, self.due = self.due, min(self.due, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.due = before

    @contextlib.contextmanager
    def paused(self):
        """For an environment that waits for something else than its pages (a replica, a reset, a judge model): no bound
        applies inside, and the episode's deadline moves by as long as it took."""
        start, before, self.due = time.monotonic(), self.due, float("inf")
        deadline, self.deadline = self.deadline, float("inf")
        try:
            yield
        finally:
            took = time.monotonic() - start
            self.due, self.deadline = before + took, deadline + took

    def check(self) -> None:
        """By the watchdog, four times a second."""
        now = time.monotonic()
        if self.killed and now > self.killed_at + 3:         # still blocked: the driver has not noticed
            self._end(self.driver)
        elif not self.killed and now > min(self.due, self.deadline):
            self.kill("deadline" if now > self.deadline else "hung")

    def kill(self, why: str) -> None:
        """End this session's browser from another thread; the call that is blocked in it raises."""
        self.killed, self.killed_at = self.killed or why, time.monotonic()
        self._end(self.process or self._find())

    def _find(self):
        """The browser's process: it alone, of all below us, carries this session's token."""
        for p in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(self.token in word for word in p.cmdline()):
                    return p
        return self.driver

    @staticmethod
    def _end(process) -> None:
        with contextlib.suppress(psutil.Error):
            for p in [process, *process.children(recursive=True)] if process else ():
                with contextlib.suppress(psutil.Error):
                    p.kill()

    def launch(self) -> None:
        """Start a driver and browser, ending the ones before. Raises UserError when there is no browser."""
        from playwright.sync_api import Error, sync_playwright
        self.stop()
        self.token, self.killed, self.opened = uuid.uuid4().hex, "", 0
        self.watchdog.watch(self)
        everywhere = "*" in self.cfg.extra_origins
        args = [*CHROMIUM_ARGS, *self.env.browser_args, f"--session-token={self.token}",
                *(["--no-sandbox"] if os.geteuid() == 0 else []), *([] if everywhere else [
                    "--host-resolver-rules=MAP * ~NOTFOUND" + "".join(f", EXCLUDE {h}" for h in sorted(self.hosts))])]
        with self.bound(30 + GRACE):
            try:
                self.playwright = sync_playwright().start()
                self.driver = started_by_this_thread()
                self.browser = self.playwright.chromium.launch(executable_path=chromium(), timeout=30_000, args=args)
            except Error as e:
                self.stop()
                if "Executable doesn't exist" in str(e):
                    raise UserError("no Chromium found; run ./setup.sh, or set CHROMIUM to a browser's path") from e
                raise
            self.process = self._find()
            self.driver = self.driver or self.process.parent()

    def stop(self) -> None:
        """End browser and driver, whatever state they are in, within 10 s; the next `open` starts new ones."""
        with self.bound(GRACE):
            for thing, end in ((self.browser, "close"), (self.playwright, "stop")):
                if thing is not None:
                    try:
                        getattr(thing, end)()
                    except Exception as e:         # a dead browser cannot be closed: that is what we wanted
                        self.notes.append(f"stop: {e}")
        self._end(self.process)
        self._end(self.driver)
        self.watchdog.forget(self)
        self.playwright = self.browser = self.context = self.page = self.process = self.driver = None

    def fault(self, error: BaseException) -> str:
        """The kind of a web error, after what the session knows and FAULTS."""
        if self.killed:
            return self.killed
        kind = next((kind for sign, kind in FAULTS if re.search(sign, str(error))), "browser")
        if kind in ("page_gone", "driver_gone", "browser") and self.driver is not None:
            if not self.driver.is_running() or self.driver.status() == psutil.STATUS_ZOMBIE:
                return "driver_gone"
            if self.browser is not None and not self.browser.is_connected():
                return "browser_gone"
        return "crash" if self.crashed else kind

    # ------------------------------------------------------------------------------------------------ a task's own page
    def open(self, task) -> str:
        """The task's start page in a clean context; returns the instruction."""
        extra = [o.strip().rstrip("/") for o in self.cfg.extra_origins.split(",") if o.strip() not in ("", "*")]
        self.allowed = (*self.env.origins(task), *extra)
        hosts = {urlsplit(origin).hostname for origin in self.allowed}
        if self.browser is None or not self.browser.is_connected() or self.killed or not hosts <= self.hosts \
                or self.opened >= self.cfg.recycle:
            self.hosts |= hosts
            self.launch()
        self.opened += 1
        self.notes.clear()
        with self.bound(self.cfg.open_timeout):
            if self.context is None or self.env.fresh_context:
                self._new_context()
            else:
                self._tidy()
            self._mark()
            instruction = self.env.open(task, self)
            # whoever comes after must find the same: no page to go back to, no mouse over the page
            self._wire(self.page).send("Page.resetNavigationHistory")
            self.page.mouse.move(-1, -1)
            self.home = self.page.url
        return instruction

    def _new_context(self):
        if self.context is not None:
            self.context.close()
        self._fresh()
        self.crashed = False
        self.context = self.browser.new_context(
            viewport={"width": self.env.width, "height": self.env.height}, device_scale_factor=self.env.scale,
            accept_downloads=False, permissions=[], reduced_motion="reduce")
        self.context.set_default_timeout(self.cfg.call_timeout * 1000)
        self.context.add_init_script(INIT)
        for event, react in (("dialog", self._dialog), ("page", self._follow), ("request", self._began),
                             ("requestfinished", self._ended), ("requestfailed", self._ended)):
            self.context.on(event, react)
        self.context.new_page()

    def _tidy(self):
        """An old context as good as new, for pages that keep nothing: one tab, no key held down."""
        self._at_hand()
        for page in [p for p in self.context.pages if p is not self.page]:
            page.close()
        for key in self.held:
            self.page.keyboard.up(key)
        self.held.clear()

    def goto(self, url: str) -> None:
        """Navigate the active page and wait for its DOM. A web error where the site does not answer or answers 5xx;
        UserError for an address that is not the task's."""
        if not self.may_visit(url):
            raise UserError(f"{url} is outside the task's own sites {', '.join(self.allowed)}; --extra_origins adds some")
        from playwright.sync_api import Error
        with self.bound(self.cfg.call_timeout + GRACE):
            try:
                reply = self.page.goto(url, wait_until="domcontentloaded")
            except Error as e:                    # the error page of an earlier navigation came in between
                if "interrupted by another navigation" not in str(e):
                    raise
                reply = self.page.goto(url, wait_until="domcontentloaded")
        if reply is not None and reply.status >= 500:
            raise ConnectionError(f"{url} answers {reply.status}")

    def may_visit(self, url: str) -> bool:
        parts = urlsplit(url.removeprefix("blob:"))
        return url in ("about:blank", "") or f"{parts.scheme}://{parts.netloc}" in self.allowed or (
            "*" in self.cfg.extra_origins and parts.scheme in ("http", "https"))

    def perform(self, call: actions.Call, settings: actions.ActionSettings) -> None:
        """One action on the active page. ActionError where the action cannot be done, or only its own page suffers."""
        self._at_hand()
        self._mark()
        if call.name == "open_url":
            url = call["url"] if "://" in call["url"] else f"http://{call['url']}"
            if not self.may_visit(url):
                raise actions.ActionError(f"open_url: {url[:80]} is not one of the task's sites")
        if call.name == "keyDown":
            self.held.add(actions.key_name(call["key"]))
        with self.bound(settings.timeout + GRACE + len(str(call)) / 50):
            try:
                actions.perform(call, self.page, settings)
            except web_errors() as e:
                if (kind := self.fault(e)) not in SITE:
                    raise
                raise actions.ActionError(f"{call.name}: {kind}") from e

    # --------------------------------------------------------------------------------------------- what a page may do
    def note(self, text: str) -> None:
        if len(self.notes) < 10:                  # a page may open dialogs without end
            self.notes.append(" ".join(text.split())[:200])

    def _dialog(self, dialog):
        from playwright.sync_api import Error
        self.note(f"a {dialog.type} dialog said: {dialog.message}")
        with contextlib.suppress(Error):
            dialog.accept()

    def _follow(self, page):
        """A page that opens comes to the front; when it closes, the one before it does."""
        self.openers[page], self.page, self.opening = self.page, page, max(0, self.opening - 1)
        page.on("close", self._closed)
        page.on("crash", lambda p: setattr(self, "crashed", True))
        page.on("download", self._download)
        page.on("filechooser", lambda chooser: self.note("the page asked for a file; there is none"))

    def _closed(self, page):
        if self.page is page:
            opener = self.openers.get(page)
            others = [p for p in (opener, *reversed(self.context.pages)) if p is not None and not p.is_closed()]
            self.page = others[0] if others else page
        self.wires.pop(page, None)

    def _download(self, download):
        from playwright.sync_api import Error
        self.note(f"a download was refused: {download.suggested_filename}")
        with contextlib.suppress(Error):
            download.cancel()

    def _at_hand(self):
        """There is always a page: where the last one closed itself, the start page in a new one."""
        if self.page.is_closed():
            self.note("the last page closed; this is the start page")
            with self.bound(self.cfg.call_timeout + GRACE):
                self.context.new_page()
                self.page.goto(self.home, wait_until="domcontentloaded")

    def _wire(self, page):
        """The page's own DevTools session: screenshots, and news of windows before they are there."""
        if page not in self.wires:
            self.wires[page] = self.context.new_cdp_session(page)
            self.wires[page].on("Page.windowOpen", lambda event: setattr(self, "opening", self.opening + 1))
            self.wires[page].send("Page.enable")
        return self.wires[page]

    # ------------------------------------------------------------------------------------------------- waiting, looking
    def _mark(self):
        """From here on counts what an action starts; what began earlier may take as long as it likes."""
        self.pending.clear()
        self.failed, self.opening = ("", ""), 0

    def _began(self, request):
        if request.resource_type not in ENDLESS and address(request.url) not in self.ignored:
            self.pending.add(request)

    def _ended(self, request):
        self.pending.discard(request)
        if request.failure and request.is_navigation_request() and not request.failure.endswith("ERR_ABORTED"):
            self.failed = (request.url, request.failure)

    def settle(self) -> None:
        """Wait until what the last action caused has happened: at most `settle` seconds, `call_timeout` for a navigation.

        A page that left the task's sites is brought back. Raises a web error where the task's own site broke down.
        """
        start = time.monotonic()
        with self.bound(self.cfg.settle + 3 * self.cfg.call_timeout + GRACE):
            if self.cfg.fixed_wait > 0:
                self._at_hand()
                self.page.wait_for_timeout(self.cfg.fixed_wait * 1000)
            else:
                self._quiet(start)
            self._stay()
        self.spent += time.monotonic() - start

    def _quiet(self, start: float):
        shot = None
        while True:
            self._at_hand()
            page, here = self.page, address(self.page.url)
            longest = self.cfg.call_timeout if any(r.is_navigation_request() for r in self.pending) else self.cfg.settle
            left = start + longest - time.monotonic()
            calm = 0.1 if here in self.restless else max(left, 0.05)
            state = self._state(page, calm)
            if left <= 0:
                self.ignored |= {address(r.url) for r in self.pending}
                if state in ("restless", "pixels"):
                    self.restless.add(here)
                return
            if state == "moved" or self.pending or self.opening or page is not self.page:
                continue
            if state == "pixels" and here not in self.restless:
                before, shot = shot, self._capture()
                if shot != before:
                    continue
            if state != "restless" or here in self.restless:
                return

    def _state(self, page, seconds: float) -> str:
        """still | pixels (a canvas or video may still move) | restless (not in time) | moved (the page is another now)."""
        from playwright.sync_api import Error
        try:
            return page.evaluate(SETTLED, [self.cfg.quiet * 1000, seconds * 1000])
        except Error as e:
            if page.is_closed() and self.browser.is_connected() and not self.killed:
                return "moved"
            if self.fault(e) not in SITE | {"browser"}:
                raise
            return "moved" if re.search("context was destroyed|navigat|closed|detached", str(e)) else "still"

    def _stay(self):
        """Bring the page back where it has left the task's sites; an error where the task's own site is gone."""
        from playwright.sync_api import Error
        if self.may_visit(self.page.url):
            return
        (wanted, failure), here, self.failed = self.failed, self.page.url, ("", "")
        lost = here.startswith("chrome-error:")
        if lost and self.may_visit(wanted) and wanted and not re.search("REDIRECTS|AUTH|ERR_BLOCKED", failure):
            raise ConnectionError(f"{wanted}: {failure}")
        self.note(f"{(wanted if lost else here)[:120]} " + (
            f"could not be loaded ({failure.removeprefix('net::')})" if lost and self.may_visit(wanted)
            else "is not one of the task's sites") + "; the page before is back")
        if self.openers.get(self.page) is not None and not self.openers[self.page].is_closed():
            self.page.close()
            return
        with contextlib.suppress(Error):
            self.page.go_back(wait_until="domcontentloaded")
        if not self.may_visit(self.page.url) or self.page.url == "about:blank":
            self.goto(self.home)
        self._mark()
        self._state(self.page, self.cfg.settle)

    def screenshot(self) -> bytes:
        """PNG of the viewport, env.scale pixels per CSS pixel. Waits for no font, and shows no caret."""
        with self.bound(self.cfg.call_timeout + GRACE):
            self._at_hand()
            return self._capture()

    def _capture(self) -> bytes:
        return base64.b64decode(self._wire(self.page).send("Page.captureScreenshot", {"format": "png"})["data"])


def address(url: str) -> str:
    """An address without what changes from visit to visit."""
    return re.split(r"[?#]", url, maxsplit=1)[0]


def started_by_this_thread():
    """The process that this thread started last, where the system tells (Linux); else None."""
    with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return psutil.Process(int(children[-1]))
    return None
