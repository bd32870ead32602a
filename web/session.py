"""What an agent sees of the web: one page at a time, in a browser of its own, waited for and confined.

A session opens every task in a context of its own (no cookies, storage or cache of an earlier episode) unless
the environment says that its pages keep nothing. The newest open page is the one the agent sees; when it
closes, its opener is back. Native dialogs are answered at once; what they said goes into `notes`, as does
everything that was refused: downloads, files, sites that are not the task's.

Nothing here sleeps: settle.py says what is waited for after an action, and how long.

Confinement: Chromium resolves only the hosts of the task; `goto` and `open_url` refuse other addresses; a
page that has left the task's origins is brought back. Nothing is routed through here, so caches work and no
page waits for us while we wait for the model.
"""

import base64
import contextlib
import re
import time
from collections import Counter
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from language import actions
from runtime import UserError
from web import effects
from web.chromium import SITE, Chromium, Watchdog, web_errors
from web.settle import Traffic, quiet

# Animations end in their first millisecond, with their events: one state of a page gives one screenshot.
# A sheet of this kind is subject to no content policy, and no observer of the page sees it.
INIT = """{ const still = new CSSStyleSheet();
  still.replaceSync(`*, *::before, *::after {
    caret-color: transparent !important; scroll-behavior: auto !important;
    transition-duration: 1ms !important; transition-delay: 0s !important; animation-duration: 1ms !important;
    animation-delay: 0s !important; animation-iteration-count: 1 !important }`);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, still];
  window.print = () => {}; }"""


def redact(thing, secrets):
    """A JSON value without the `secrets` (those of at least six characters) in any of its texts."""
    if isinstance(thing, str):
        for secret in sorted((s for s in secrets if len(s) > 5), key=len, reverse=True):
            thing = thing.replace(secret, "***")
        return thing
    if isinstance(thing, dict):
        return {key: redact(value, secrets) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [redact(value, secrets) for value in thing]
    return thing


class Session(Chromium):
    """`page` is the page the agent sees. An environment may use `page`, `context` and `goto` as it likes,
    narrow `allowed` (the origins that may be visited), and add to `secrets` texts that no file may hold.

    `notes`: what the browser had to say since the last step. `spent`: seconds, of which "busy" is the sum of
    all work, "model" the wait for answers and "settle" that for pages.
    """

    def __init__(self, env, cfg, watchdog: Watchdog | None = None, server: str = ""):
        super().__init__(watchdog or Watchdog(cfg.memory), server)
        self.env = env
        self.cfg = cfg
        self.context: Any = None
        self.page: Any = None
        self.notes = []
        self.allowed = ()
        self.secrets = set()
        self.spent: Any = Counter(busy=0, model=0, settle=0)
        self.hosts = set()                        # those that the browser resolves
        self.opened = 0                           # tasks in this browser
        self.home = "about:blank"
        self.spoiled = False                      # the context must not be used again
        self._fresh()

    def _fresh(self):
        """What belongs to one context."""
        self.traffic = Traffic()
        self.openers = {}                         # page -> the one before
        self.wires = {}                           # page -> its DevTools session
        self.held = set()                         # keys

    def stop(self) -> None:
        super().stop()
        self.context = self.page = None

    def answer(self, future):
        """A model's answer, waited for until the episode's deadline at most."""
        start = time.monotonic()
        try:
            return future.result(None if self.deadline == float("inf") else max(0.0, self.deadline - start))
        finally:
            self.spent["model"] += time.monotonic() - start

    def asked(self, question):
        """`question(session)`, of the environment, in bounded time."""
        with self.bound(self.cfg.open_timeout):
            return self._alive(question(self))

    def _alive(self, answer):
        """The answer, unless its page has crashed: not every call says so, a dead page's title is ""."""
        if self.page is self.crashed:
            raise ConnectionError("Page crashed")
        return answer

    def done(self) -> bool:
        """Whether the page itself has ended the episode."""
        return self._seen(partial(self.env.done, self))

    # -------------------------------------------------------------------------------------- a task's own page
    def open(self, task) -> str:
        """The task's start page in a clean context; returns the instruction."""
        extra = [o.strip().rstrip("/") for o in self.cfg.extra_origins.split(",")]
        self.allowed = (*self.env.origins(task), *(o for o in extra if o not in ("", "*")))
        self._ready({urlsplit(origin).hostname for origin in self.allowed})
        self.opened += 1
        self.notes.clear()
        with self.bound(self.cfg.open_timeout):
            used = self.context and not (self.env.fresh_context or self.spoiled or self.traffic.opening)
            if used and len(self.context.pages) == 1:
                for key in self.held:             # else as good as new, where pages keep nothing
                    self.page.keyboard.up(key)
                self.held.clear()
            else:
                self._new_context()
            self.traffic.mark()
            instruction = self.env.open(task, self)
            # whoever was here before, the agent finds the same: nowhere to go back to, no mouse over the page
            self.wire(self.page).send("Page.resetNavigationHistory")
            self.page.mouse.move(-1, -1)
            self.home = next(iter(self.context.pages), self.page).url     # a popup may be in front already
            self._at_start(self.home)
        return instruction

    def _at_start(self, url: str) -> None:
        """A web error where the start page leaves the task's sites by itself."""
        if not self.may_visit(url):
            raise ConnectionError(f"the start page went to {self.traffic.failed[0] or url}"[:200])

    def _ready(self, hosts: set) -> None:
        """A browser that works, is not too old and knows the hosts."""
        if (self.browser and self.browser.is_connected() and not self.killed and hosts <= self.hosts
                and self.opened < self.cfg.recycle):
            return
        self.hosts |= hosts
        self.opened = 0
        known = "".join(f", EXCLUDE {host}" for host in sorted(self.hosts))
        confine = [] if "*" in self.cfg.extra_origins else [f"--host-resolver-rules=MAP * ~NOTFOUND{known}"]
        self.launch([*self.env.browser_args, *confine])

    def _new_context(self):
        if self.context is not None:
            with self.bound(self.cfg.call_timeout):
                self.context.close()
        self._fresh()
        self.crashed = None
        self.spoiled = False
        self.context = self.browser.new_context(
            viewport={"width": self.env.width, "height": self.env.height}, device_scale_factor=self.env.scale,
            accept_downloads=False, permissions=[], reduced_motion="reduce")
        self.context.set_default_timeout(self.cfg.call_timeout * 1000)
        self.context.add_init_script(INIT)
        traffic = self.traffic
        self.context.on("dialog", self._dialog)
        self.context.on("page", self._follow)
        self.context.on("requestfailed", traffic.ended)
        if not self.env.quick:                    # each takes five messages of the driver
            self.context.on("request", lambda request: traffic.began(request, self.page))
            self.context.on("requestfinished", traffic.ended)
        self.context.new_page()

    def goto(self, url: str) -> None:
        """Navigate the active page and wait for its DOM. A web error where the site does not answer or
        answers 5xx or asks for a password; UserError for an address that is not the task's."""
        if not self.may_visit(url):
            sites = ", ".join(self.allowed)
            raise UserError(f"{url} is not one of the task's sites {sites}; --extra_origins adds some")
        from playwright.sync_api import Error
        with self.bound(2 * self.cfg.call_timeout):
            try:
                reply = self.page.goto(url, wait_until="domcontentloaded")
            except Error as e:                    # the error page of an earlier navigation came in between
                if "interrupted by another navigation" not in str(e):
                    raise
                reply = self.page.goto(url, wait_until="domcontentloaded")
        closed = reply is not None and reply.status == 401 and "www-authenticate" in reply.headers
        if closed or reply is not None and reply.status >= 500:
            raise ConnectionError(f"{url} answers {reply.status}")

    def may_visit(self, url: str) -> bool:
        """Whether the page may be there: the task's origins, blobs of theirs, and empty windows."""
        parts = urlsplit(url.removeprefix("blob:"))
        return (url in ("about:blank", "") or f"{parts.scheme}://{parts.netloc}" in self.allowed
                or "*" in self.cfg.extra_origins and parts.scheme in ("http", "https"))

    def perform(self, call: actions.Call, settings: effects.ActionSettings) -> None:
        """One action on the active page. ActionError where it cannot be done, or where a site's fault spoils
        it."""
        with self.bound(3 * settings.timeout):
            self.at_hand()
        self.traffic.mark()
        if call.name == "open_url":
            url = call["url"] if "://" in call["url"] else f"http://{call['url']}"
            if not self.may_visit(url):
                raise actions.ActionError(f"open_url: {url[:80]} is not one of the task's sites")
        if call.name == "keyDown":
            self.held.add(effects.key_name(call["key"]))
        with self.bound(2 * settings.timeout + len(str(call)) / 50):
            try:
                if said := effects.perform(call, self.page, settings):
                    self.note(said)
            except web_errors() as e:
                if (kind := self.fault(e)) not in SITE:
                    raise
                if kind != "page_gone":           # what an action may do: it closed its page
                    raise actions.ActionError(f"{call.name}: {kind}") from e

    # ------------------------------------------------------------------------------------- what a page may do
    def note(self, text: str) -> None:
        """For the history of the present step; a page may open dialogs without end, so there is a limit."""
        if len(self.notes) < 10:
            self.notes.append(" ".join(text.split())[:200])

    def _dialog(self, dialog):
        from playwright.sync_api import Error
        self.note(f"a {dialog.type} dialog said: {dialog.message}")
        with contextlib.suppress(Error):
            dialog.accept(dialog.default_value)

    def _download(self, download):
        from playwright.sync_api import Error
        self.note(f"a download was refused: {download.suggested_filename}")
        with contextlib.suppress(Error):
            download.cancel()

    def _follow(self, page):
        """A page that opens comes to the front; when it closes, the one before it does."""
        if page.context != self.context:          # a latecomer of the task before
            return
        self.openers[page] = self.page
        self.page = page
        self.traffic.opening = max(0, self.traffic.opening - 1)
        page.on("close", self._closed)
        page.on("crash", lambda page: setattr(self, "crashed", page))
        page.on("download", self._download)
        page.on("filechooser", lambda _: self.note("the page asked for a file; there is none"))

    def _closed(self, page):
        self.wires.pop(page, None)
        self.traffic.leaving.discard(page)
        if self.page is page:
            candidates = (self.openers.get(page), *reversed(self.context.pages))
            self.page = next((p for p in candidates if p is not None and not p.is_closed()), page)

    def at_hand(self) -> None:
        """There is always a page: where the last one closed itself, the start page in a new one."""
        if self.page.is_closed():
            self.note("the last page closed; this is the start page")
            self.context.new_page()
            self.goto(self.home)

    def wire(self, page):
        """The page's own DevTools session: screenshots, and news of windows before they are there."""
        if page not in self.wires:
            wire = self.wires[page] = self.context.new_cdp_session(page)
            self.traffic.watch(wire, page)
            wire.send("Page.enable")
            # without this, a screenshot would switch the page to a scale of 1
            wire.send("Emulation.setDeviceMetricsOverride", {
                "width": self.env.width, "height": self.env.height, "deviceScaleFactor": self.env.scale,
                "mobile": False})
        return self.wires[page]

    # --------------------------------------------------------------------------------------- waiting, looking
    def settle(self) -> None:
        """Wait until what the last action caused has happened, as settle.py says. Then bring a page back that
        has left the task's sites. Raises a web error where a site of the task's own is gone."""
        start = time.monotonic()
        with self.bound(self.cfg.fixed_wait + self.cfg.settle + 3 * self.cfg.call_timeout):
            if self.cfg.fixed_wait > 0:
                self.at_hand()
                self.page.wait_for_timeout(self.cfg.fixed_wait * 1000)
            else:
                quiet(self, start)
            self._stay()
        self.spent["settle"] += time.monotonic() - start

    def _stay(self) -> None:
        """Bring the page back where it has left the task's sites; an error where the task's own site is
        gone."""
        if self.may_visit(self.page.url):
            return
        wanted, failure = self.traffic.failed
        here = self.page.url
        lost = here.startswith("chrome-error:")
        own = lost and wanted and self.may_visit(wanted)
        if own and not re.search("REDIRECTS|AUTH|BLOCKED", failure):
            raise ConnectionError(f"{wanted}: {failure}")
        if own:
            what = f"{wanted[:100]} could not be loaded: {failure.removeprefix('net::')}"
        else:
            what = f"{(wanted if lost else here)[:100]} is not one of the task's sites"
        self.note(f"{what}; the page before is back")
        self._back()

    def _back(self) -> None:
        """To the page's opener, else back in its history, else to the start page."""
        from playwright.sync_api import Error
        before = self.openers.get(self.page)
        if before is not None and not before.is_closed():
            self.page.close()
            return
        self.traffic.mark()
        with contextlib.suppress(Error):
            self.page.go_back(wait_until="domcontentloaded")
        quiet(self, time.monotonic())             # it may leave again by itself
        if not self.may_visit(self.page.url) or self.page.url == "about:blank":
            self.traffic.mark()
            self.goto(self.home)
            quiet(self, time.monotonic())
            self._at_start(self.page.url)

    def screenshot(self) -> bytes:
        """PNG of the viewport, env.scale pixels per CSS pixel. Waits for no font, and shows no caret."""
        return self._seen(self._capture)

    def _seen(self, look):
        """`look()` at the active page; at the one before it where that closes itself just then."""
        from playwright.sync_api import Error
        with self.bound(2 * self.cfg.call_timeout):
            while True:
                self.at_hand()
                try:
                    return self._alive(look())
                except Error as e:
                    if self.fault(e) != "page_gone" or time.monotonic() > self.due:
                        raise

    def _capture(self) -> bytes:
        from playwright.sync_api import Error
        while True:
            try:
                shot = self.wire(self.page).send("Page.captureScreenshot", {"format": "png"})
                return base64.b64decode(shot["data"])
            except Error as e:                    # between two documents
                if "Not attached to an active page" not in str(e) or time.monotonic() > self.due:
                    raise
