"""One Chromium for one thread: launched, driven and stopped there; the page an agent sees, and what may happen to it.

A session opens every task in a context of its own (no cookies, storage or cache of an earlier episode) unless the
environment says that its pages keep nothing. The newest open page is the one the agent sees; when it closes, its opener
is back. Native dialogs are answered at once and their text goes into `notes`. Downloads are refused, and so is any
navigation away from the task's own origins. Nothing here sleeps: after an action the page's own events end the wait.
"""

import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from runtime import UserError

CHROMIUM_ARGS = ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                 "--disable-sync", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--mute-audio"]
STILL = """addEventListener('DOMContentLoaded', () => { const s = document.createElement('style');
  s.textContent = '* { caret-color: transparent !important; transition: none !important; animation: none !important }';
  document.documentElement.appendChild(s); });"""
SETTLED = """([quiet, bound]) => new Promise(done => {
  const start = performance.now(); let last = start - 1e9, frames = 0;
  const watch = new MutationObserver(() => { last = performance.now(); });
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  const look = () => { const now = performance.now();
    if ((++frames > 1 && document.readyState === 'complete' && now - Math.max(last, start) >= quiet) || now - start >= bound) {
      watch.disconnect(); done(now - start); } else requestAnimationFrame(look); };
  requestAnimationFrame(look); })"""


def chromium() -> str | None:
    """Path of the browser: $CHROMIUM, a system one, or None for Playwright's own."""
    if path := os.environ.get("CHROMIUM"):
        if not Path(path).exists():
            raise UserError(f"CHROMIUM={path} does not exist; unset it or give the browser's path")
        return path
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Session:
    """One browser, for the thread that made it. `page` is the page the agent sees: the newest one that is open."""

    def __init__(self, env, cfg):
        self.env, self.cfg = env, cfg
        self.playwright = self.browser = self.context = self.page = None
        self.notes, self.allowed = [], ()         # what the browser had to say since the last step; origins

    def launch(self) -> None:
        """Start a driver and browser, ending the ones before. Raises UserError when there is no browser."""
        from playwright.sync_api import Error, sync_playwright
        self.stop()
        self.playwright = sync_playwright().start()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            self.browser = self.playwright.chromium.launch(executable_path=chromium(), timeout=30_000,
                                                           args=CHROMIUM_ARGS + sandbox)
        except Error as e:
            self.stop()
            if "Executable doesn't exist" in str(e):
                raise UserError("no Chromium found; run ./setup.sh, or set CHROMIUM to a browser's path") from e
            raise

    def stop(self) -> None:
        """End browser and driver, whatever state they are in."""
        for thing, end in ((self.browser, "close"), (self.playwright, "stop")):
            if thing is not None:
                try:
                    getattr(thing, end)()
                except Exception as e:             # a dead browser cannot be closed: that is what we wanted
                    self.notes.append(f"stop: {e}")
        self.playwright = self.browser = self.context = self.page = None

    def open(self, task) -> str:
        """The task's start page in a clean context; returns the instruction."""
        if self.browser is None or not self.browser.is_connected():
            self.launch()
        self.allowed = tuple(self.env.origins(task))
        if self.context is None or self.env.fresh_context:
            self._new_context()
        self.notes.clear()
        return self.env.open(task, self)

    def _new_context(self):
        if self.context is not None:
            self.context.close()
        self.context = self.browser.new_context(
            viewport={"width": self.env.width, "height": self.env.height}, device_scale_factor=self.env.scale,
            accept_downloads=False, permissions=[])
        self.context.set_default_timeout(self.cfg.call_timeout * 1000)
        self.context.add_init_script(STILL)
        self.context.on("dialog", self._dialog)
        self.context.on("page", self._follow)
        self.page = self.context.new_page()

    def _dialog(self, dialog):
        self.notes.append(f"a {dialog.type} dialog said: {dialog.message}")
        dialog.accept()

    def _follow(self, page):
        self.page, opener = page, self.page
        page.on("close", lambda closed: setattr(self, "page", opener) if self.page is closed else None)

    def goto(self, url: str) -> None:
        """Navigate the active page and wait for its DOM. Raises a Playwright error where the site does not answer."""
        if not self.may_visit(url):
            raise PermissionError(f"{url} is outside the task's own sites {', '.join(self.allowed)}")
        self.page.goto(url, wait_until="domcontentloaded")

    def may_visit(self, url: str) -> bool:
        parts = urlsplit(url)
        return url == "about:blank" or f"{parts.scheme}://{parts.netloc}" in self.allowed

    def settle(self) -> None:
        """Wait until the page is loaded and quiet, at most `settle` seconds."""
        from playwright.sync_api import Error
        try:
            self.page.evaluate(SETTLED, [self.cfg.quiet * 1000, self.cfg.settle * 1000])
        except Error:                             # the page navigated away under the wait: wait for the new one instead
            self.page.wait_for_load_state("domcontentloaded")
            self.page.evaluate(SETTLED, [self.cfg.quiet * 1000, self.cfg.settle * 1000])

    def screenshot(self) -> bytes:
        """PNG of the viewport, env.scale pixels per CSS pixel."""
        return self.page.screenshot(caret="hide", animations="disabled", timeout=self.cfg.call_timeout * 1000)
