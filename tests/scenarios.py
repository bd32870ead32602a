"""What pages, sites and browsers may do to an episode, one thing each.

PAGES are the site of hostile.py; SCENARIOS say what the agent does on a page and what must come of it. On
most pages the thing happens at a click on (60, 60); then the page says "done", and the episode has succeeded.
Faults that no page can cause (a browser killed, say) are thrown by hostile.py. @PORT@, @OTHER@ and @CLOSED@
are ports: of the site, of another one, of none.
"""

from dataclasses import dataclass

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
