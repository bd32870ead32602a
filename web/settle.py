"""The wait after an action: for what it caused, and no longer.

`quiet` waits for navigations, new tabs, requests, images and fonts, then for a frame in which the document
does not change and, where there is a canvas or video, for two equal screenshots: `settle` seconds at most,
`call_timeout` where a navigation is under way. An address that never gets quiet costs the longest wait once;
later visits wait only for navigations and requests of their own. Where the environment says that no action on
a page requests anything (`quick`), only the document is watched, with a bound of its own where a navigation
has begun all the same.
"""

import contextlib
import re
import time

from web.chromium import SITE

SETTLED = """([quiet, bound]) => new Promise(done => {
  const start = performance.now(); let last = start, changed = false;
  const watch = new MutationObserver(() => { last = performance.now(); changed = true; });
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  const end = state => { watch.disconnect(); clearTimeout(timer); done(state); };
  const timer = setTimeout(() => end('restless'), bound);
  const here = () => document.readyState === 'complete' && document.fonts.status === 'loaded'
    && [...document.images].every(image => image.complete || image.loading === 'lazy');
  const look = () => {
    const shown = [...document.querySelectorAll('canvas, video')].some(e => e.getClientRects().length);
    if (!changed && here() && performance.now() - last >= quiet) end(shown ? 'pixels' : 'still');
    else { changed = false; requestAnimationFrame(look); } };
  requestAnimationFrame(look); })"""
ENDLESS = {"eventsource", "websocket", "media", "ping"}   # requests that nobody waits for


class Traffic:
    """What is under way in one context: requests and navigations that began since the last `mark`, and what
    the context has taught about addresses that never end."""

    def __init__(self):
        self.pending = set()                      # requests
        self.leaving = set()                      # pages that a navigation is about to replace
        self.ignored = set()                      # addresses that never finish
        self.restless = set()                     # addresses that never get quiet
        self.mark()

    def mark(self) -> None:
        """From here on counts what an action starts; what began earlier may take as long as it likes."""
        self.pending.clear()
        self.leaving.clear()
        self.failed = ("", "")                    # the navigation that came to nothing: its address, and why
        self.opening = 0                          # windows that were announced and are not there yet
        self.departures = 0                       # navigations of the active page, redirects not counted

    def began(self, request, page) -> None:
        """A request; `page`: the active one."""
        if request.resource_type not in ENDLESS and address(request.url) not in self.ignored:
            self.pending.add(request)
        if request.is_navigation_request() and not request.redirected_from:
            self.departures += page.main_frame == frame_of(request)

    def ended(self, request) -> None:
        """A request is answered, or has failed."""
        self.pending.discard(request)
        why = request.failure
        if why and request.is_navigation_request() and not why.endswith("ERR_ABORTED"):
            self.failed = (request.url, why)

    def watch(self, wire, page) -> None:
        """Have a page's DevTools session tell of windows before they are there, and of navigations."""
        wire.on("Page.windowOpen", lambda _: setattr(self, "opening", self.opening + 1))
        wire.on("Page.frameStartedNavigating", lambda _: self.leaving.add(page))
        for end in ("frameNavigated", "frameStoppedLoading", "navigatedWithinDocument"):
            wire.on(f"Page.{end}", lambda _: self.leaving.discard(page))

    def moving(self, page) -> bool:
        """Whether a navigation is under way."""
        return page in self.leaving or any(r.is_navigation_request() for r in self.pending)


def quiet(session, start: float) -> None:
    """Wait at the session's active page, counted from the time `start`; a page that goes on loading is
    stopped. ConnectionError for one that redirects without end."""
    traffic = session.traffic
    shot = None
    while True:
        session.at_hand()
        page = session.page
        here = address(page.url)
        moving = traffic.moving(page)
        left = start + (session.cfg.call_timeout if moving else session.cfg.settle) - time.monotonic()
        known = here in traffic.restless
        if traffic.departures > 8:
            raise ConnectionError(f"{here} redirects without end")
        state = document_state(session, page, 0.1 if known else max(left, 0.05))
        if left <= 0:
            if moving or state in ("moved", "stuck"):
                halt(session)
            traffic.ignored |= {address(r.url) for r in traffic.pending}
            if state in ("restless", "pixels"):
                traffic.restless.add(here)
            return
        if state in ("moved", "stuck") or traffic.pending or traffic.opening or page is not session.page:
            continue
        if state == "pixels" and not known:
            before = shot
            shot = session.screenshot()
            if shot != before:
                continue
        if state != "restless" or known:
            return


def document_state(session, page, seconds: float) -> str:
    """still | pixels (a canvas or video may still move) | restless (not still in time) | moved (the page
    left) | stuck (no answer: Chromium evaluates nothing while a navigation is under way, or the page's
    script is busy)."""
    from playwright.sync_api import Error, TimeoutError
    bound = seconds * 1000
    try:
        # half the price, but a navigation holds it up
        if session.env.quick and page not in session.traffic.leaving:
            return page.evaluate(SETTLED, [0, bound])
        return str(page.wait_for_function(        # a handle, which shows its text
            SETTLED, arg=[session.cfg.quiet * 1000, bound], timeout=bound + 200))
    except TimeoutError:
        return "stuck"
    except Error as e:
        if session.fault(e) not in SITE | {"browser"}:
            raise
        left = page.is_closed() or re.search("context was destroyed|navigat|closed|detached", str(e))
        return "moved" if left else "still"       # else the page has broken what the script needs


def halt(session) -> None:
    """Stop a page that goes on loading, as a person would."""
    traffic = session.traffic
    traffic.ignored |= {address(r.url) for r in traffic.pending if not r.is_navigation_request()}
    session.wire(session.page).send("Page.stopLoading")
    session.note("the page went on loading and was stopped")
    document_state(session, session.page, 0.3)


def frame_of(request):
    """The frame of a request; None where it is too new to have one."""
    from playwright.sync_api import Error
    with contextlib.suppress(Error):
        return request.frame
    return None


def address(url: str) -> str:
    """An address without what changes from visit to visit."""
    return re.split("[?#]", url, maxsplit=1)[0]
