"""A local web with WebArena's doors: a shop, its back office, a forum, a code host, a map, on loopback ports.

    with local_sites(replicas=2) as web:    # web.json: a sites.json; web.replicas("reddit"): the live servers

Every server keeps its own state, which pages and REST calls change; GET /__reset makes it as new, and
`web.resets` counts that. What an agent needs stands at fixed places: scripts click and type without
looking. Accounts are webarena_sites.ACCOUNTS. get_x and post_x answer the paths of the route x.
`task` and `html_target` write tasks for it.
"""

import contextlib
import html
import http.server
import json
import re
import secrets
import threading
from urllib.parse import parse_qsl, urlsplit

from sites.webarena.replicas import ACCOUNTS


def written(path, thing) -> str:
    """A JSON file; its path."""
    path.write_text(json.dumps(thing))
    return str(path)


def task(task_id, intent, kind, start, sites, state="", **rules):
    """A task as WebArena's files have it; `rules` goes into its `eval`."""
    rules = {"eval_types": kind if isinstance(kind, list) else [kind], "reference_answers": None,
             "reference_url": "", "program_html": []} | rules
    return {"task_id": task_id, "intent": intent, "start_url": start, "sites": sites, "eval": rules,
            "storage_state": state or f"./.auth/{sites[0]}_state.json"}


def html_target(url, locator, **contents):
    return [{"url": url, "locator": locator, "required_contents": contents}]


def at(x: int, y: int, body: str) -> str:
    return f'<div style="position:absolute;left:{x}px;top:{y}px">{body}</div>'


def form(action: str, *fields: str) -> str:
    return f'<form method="post" action="{action}">{"".join(fields)}</form>'


def box(name: str, x: int, y: int, extra: str = "", value: str = "") -> str:
    return at(x, y,
              f'<input name="{name}" value="{html.escape(value)}" {extra} style="width:300px;height:30px">')


def button(text: str, x: int, y: int, extra: str = "") -> str:
    return at(x, y, f'<button {extra} style="width:160px;height:40px">{text}</button>')


class Server(http.server.ThreadingHTTPServer):
    """One replica of one site. `base` is the path under which it lives, `cookie` the name of its session."""
    daemon_threads = True
    cookie, base, routes = "session", "", ()

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"
        self.address, self.resets, self.visits = self.origin + self.base, 0, []
        self.lock, self.down, self.elsewhere, self.locked = threading.Lock(), False, "", ""
        self.fresh()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fresh(self):
        self.sessions, self.state = set(), self.initial()

    def initial(self):
        return {}

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer("get")

    def do_POST(self):
        self.answer("post")

    def answer(self, method):
        site, parts = self.server, urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.query = dict(parse_qsl(parts.query))
        self.form = json.loads(raw) if raw.startswith("{") else dict(parse_qsl(raw, keep_blank_values=True))
        if site.down:
            return self.send("<h1>Service unavailable</h1>", 503)
        if site.elsewhere:
            return self.go(site.elsewhere + self.path)
        with site.lock:
            site.visits.append((method, self.path))
            if parts.path == "/__reset":
                site.resets += 1
                site.fresh()
                return self.send("as new")
            for pattern, name in site.routes:
                function = getattr(site, f"{method}_{name}", None)
                if function and (m := re.fullmatch(site.base + pattern, parts.path)):
                    return function(self, *m.groups())
        self.send(f'<html><head><link rel="canonical" href="{html.escape(self.path)}"></head><body>'
                  "<h1>404</h1>Page Not Found</body></html>", 404)

    @property
    def inside(self):
        return any(c in self.server.sessions for c in re.findall(rf"{self.server.cookie}=(\w+)",
                                                                 self.headers.get("Cookie") or ""))

    def enter(self, where):
        session = secrets.token_hex(8)
        self.server.sessions.add(session)
        self.go(where, f"{self.server.cookie}={session}; Path=/")

    def go(self, where, cookie=None):
        self.send_response(302)
        self.send_header("Location", where)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, body, status=200, kind="text/html; charset=utf-8"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Shop(Server):
    site, cookie = "shopping", "PHPSESSID"
    routes = (("/", "home"), ("/customer/account/login/", "login"), ("/wishlist/", "wishlist"),
              ("/buy", "buy"),
              (r"/sales/order/view/order_id/(\d+)/", "order"), ("/kit.html", "kit"), ("/contact", "contact"),
              ("/rest/default/V1/integration/admin/token", "token"), ("/rest/V1/orders", "orders"),
              (r"/rest/V1/products/(\w+)/reviews", "reviews"), ("/review", "review"), ("/logout", "logout"))

    def initial(self):
        return {"orders": [(170, "B00OLD")], "reviews": [("Ann", 60)]}

    def get_home(self, h):
        h.send(f"<title>One Stop</title>{at(20, 20, 'Welcome' if h.inside else 'Please sign in')}"
               + form("/buy", '<input type="hidden" name="sku" value="B0738JQG6Q">', button("Buy the kit",
                                                                                            100, 100))
               + at(100, 200, '<a href="/kit.html?size=2&color=red">The kit</a>')
               + at(100, 300, '<a href="/kit.html" target="_blank">In a tab</a>')
               + at(100, 400, '<a href="/contact">Contact us</a>'))

    def get_login(self, h):
        h.send(form("/customer/account/login/", '<label>Email <input name="login"></label>',
                    '<label>Password <input type="password" name="pw"></label><button>Sign In</button>'))

    def post_login(self, h):
        ok = (h.form.get("login"), h.form.get("pw")) == ACCOUNTS["shopping"]
        h.enter("/") if ok else self.get_login(h)

    def get_logout(self, h):
        self.sessions.clear()
        h.go("/")

    def get_wishlist(self, h):
        h.send("Your wishes") if h.inside else h.go("/customer/account/login/")

    def get_kit(self, h):
        h.send("<h1>Make up removal kit</h1><p id=n>12 reviews</p><p>$2.00</p>")

    def get_contact(self, h):
        h.send(at(100, 100, '<textarea title="What\u2019s on your mind?" rows="4" cols="60"></textarea>'))

    def post_buy(self, h):
        if not h.inside:
            return h.go("/customer/account/login/")
        self.state["orders"].append((self.state["orders"][-1][0] + 1, h.form["sku"]))
        h.go(f"/sales/order/view/order_id/{self.state['orders'][-1][0]}/")

    def get_order(self, h, number):
        if not h.inside:
            return h.go("/customer/account/login/")
        found = [sku for n, sku in self.state["orders"] if n == int(number)]
        h.send(f'<div class="order-details-items ordered">SKU {found[0]}</div>' if found else "none", 200)

    def post_token(self, h):
        ok = (h.form["username"], h.form["password"]) == ACCOUNTS["shopping_site_admin"]
        h.send("token" if not ok else json.dumps("t0ken"), 200 if ok else 401, "application/json")

    def get_orders(self, h):
        if h.headers.get("Authorization") != "Bearer t0ken":
            return h.send({"message": "not allowed"}, 401)
        newest = self.state["orders"][::-1][:int(h.query["searchCriteria[pageSize]"])]
        h.send({"items": [{"increment_id": f"{n:09d}"} for n, _ in newest]})

    def get_reviews(self, h, sku):
        h.send([{"nickname": n, "ratings": [{"rating_name": "Rating", "percent": p}]} for n,
                p in self.state["reviews"]])

    def get_review(self, h):
        h.send(form("/review", box("nickname", 100, 100), button("Five stars", 100, 200)))

    def post_review(self, h):
        self.state["reviews"].append((h.form["nickname"], 100))
        h.go("/review")


class Office(Server):
    site, cookie, base = "shopping_admin", "admin", "/admin"
    routes = (("/?", "home"), ("/dashboard", "home"), ("/sales/order/", "grid"), ("/price", "price"))

    def initial(self):
        return {"price": "35.00"}

    def get_home(self, h):
        if h.inside:
            return h.send("<h1>Dashboard</h1>" + at(100, 100, '<a href="/admin/sales/order/">Orders</a>')
                          + at(100, 200, '<a href="/admin/price">Price</a>'))
        h.send(form("/admin/", '<input name="login" placeholder="user name">',
                    '<input type="password" name="pw" placeholder="password"><button>Sign in</button>'))

    def post_home(self, h):
        ok = (h.form.get("login"), h.form.get("pw")) == ACCOUNTS["shopping_admin"]
        h.enter("/admin/dashboard") if ok else self.get_home(h)

    def get_grid(self, h):
        rows = "".join(f"<tr><td>{n}</td><td>{who}</td><td>{total}</td></tr>" for n, who, total in
                       (("000000299", "Sarah Miller", "$194.40"), ("000000170", "Jane Doe", "$365.42")))
        h.send(f"<table class=data-grid>{rows}</table>" if h.inside else "no")

    def get_price(self, h):
        h.send(form("/admin/price", box("product[price]", 100, 100, value=self.state["price"]), button("Save",
                                                                                                       100,
                                                                                                       200)))

    def post_price(self, h):
        self.state["price"] = h.form["product[price]"]
        h.go("/admin/price")


class Forum(Server):
    site, cookie = "reddit", "REMEMBERME"
    routes = (("/", "home"), ("/login", "login"), (r"/user/(\w+)/account", "account"), (r"/f/(\w+)", "forum"),
              (r"/submit/(\w+)", "submit"), (r"/f/(\w+)/(\d+)/[\w-]*", "post"))

    def initial(self):
        return {"posts": []}

    def get_home(self, h):
        h.send(at(100, 100, '<a href="/f/books">books</a>') + at(100, 200,
                                                                 '<a href="/submit/books">Submit</a>'))

    def get_login(self, h):
        h.send(form("/login", '<label>Username <input name="login"></label>',
                    f'<label>Password <input type="password" name="pw" {self.locked}></label>'
                    "<button>Log in</button>"))

    def post_login(self, h):
        h.enter("/") if (h.form.get("login"), h.form.get("pw")) == ACCOUNTS["reddit"] else self.get_login(h)

    def get_account(self, h, user):
        h.send("Delete this account" if h.inside and user == ACCOUNTS["reddit"][0] else "Log in first")

    def get_forum(self, h, forum):
        h.send("".join(f'<article class="submission">{html.escape(t)}</article>' for f,
                       t in self.state["posts"]))

    def get_submit(self, h, forum):
        h.send(form(f"/submit/{forum}", box("title", 100, 100), button("Create", 100, 200))
               + at(100, 300, f"{len(self.state['posts'])} posts so far"))

    def post_submit(self, h, forum):
        if not h.inside:
            return h.go("/login")
        self.state["posts"].append((forum, h.form.get("title", "")))
        slug = re.sub(r"[^a-z0-9]+", "-", h.form.get("title", "").lower())
        h.go(f"/f/{forum}/{len(self.state['posts'])}/{slug}")

    def get_post(self, h, forum, number):
        posts = self.state["posts"]
        if int(number) > len(posts):
            return h.send("<h1>404</h1>", 404)
        h.send(f'<div class="submission__inner"><h1>{html.escape(posts[int(number) - 1][1])}</h1></div>')


class CodeHost(Server):
    site, cookie = "gitlab", "_gitlab_session"
    routes = (("/", "home"), ("/users/sign_in", "login"), ("/-/profile", "profile"), ("/byteblaze", "user"),
              ("/byteblaze/dotfiles/-/project_members", "members"), (r"/a11yproject/-/issues/(\d+)", "issue"))

    def initial(self):
        return {"members": [("@byteblaze", "Owner")], "status": ""}

    def get_home(self, h):
        h.send(at(100, 100, '<a href="/byteblaze/dotfiles/-/project_members">members</a>')
               + at(100, 200, '<a href="/a11yproject/-/issues/719">issue</a>'))

    def get_login(self, h):
        h.send(form("/users/sign_in", '<input name="login" data-testid="username-field">',
                    '<input type="password" name="pw" data-testid="password-field">'
                    '<button data-testid="sign-in-button">Sign in</button>'))

    def post_login(self, h):
        h.enter("/") if (h.form.get("login"), h.form.get("pw")) == ACCOUNTS["gitlab"] else self.get_login(h)

    def get_profile(self, h):
        h.send("Profile") if h.inside else h.go("/users/sign_in")

    def get_user(self, h):
        h.send(f'<div class="cover-status">\n<b>s</b>\n{html.escape(self.state["status"])}\n</div>')

    def get_issue(self, h, number):
        h.send(f"<h1>Issue {number}: homepage content</h1>Closed")

    def get_members(self, h):
        self.state["most"] = max(self.state.get("most", 0), len(self.state["members"]))
        rows = "".join('<tr><td data-label="Account">'
                       f'<span class="gl-avatar-labeled-sublabel">{a}</span></td>'
                       f'<td class="col-max-role"><span>{role}</span></td></tr>' for a,
                       role in self.state["members"])
        h.send(at(500, 20, f"<table>{rows}</table>") + form("/byteblaze/dotfiles/-/project_members",
                                                            box("account", 100, 100), button("Invite", 100,
                                                                                             200)))

    def post_members(self, h):
        self.state["members"].append((f"@{h.form['account']}", "Guest"))
        h.go("/byteblaze/dotfiles/-/project_members")


class Map(Server):
    site = "map"
    routes = (("/", "home"), ("/search", "search"))

    def get_home(self, h):
        h.send(at(100, 100, '<a href="/search?query=Carnegie+Music+Hall">search</a>'))

    def get_search(self, h):
        h.send(f'<div id="sidebar_content">Results for {html.escape(h.query.get("query", ""))}</div>')


class Web:
    """All sites, each `n` times."""

    def __init__(self, n: int, kinds, reset: bool):
        self.servers = [kind() for kind in kinds for _ in range(n)]
        reset = {"reset": "http://{host}:{port}/__reset"} if reset else {}
        self.json = {k.site: {"address": [s.address for s in self.replicas(k.site)]} | reset for k in kinds}

    def replicas(self, site: str) -> list[Server]:
        return [s for s in self.servers if s.site == site]

    def one(self, site: str) -> Server:
        return self.replicas(site)[0]

    @property
    def resets(self) -> int:
        return sum(s.resets for s in self.servers)


@contextlib.contextmanager
def local_sites(replicas: int = 1, kinds=(Shop, Office, Forum, CodeHost, Map), reset: bool = True):
    web = Web(replicas, kinds, reset)
    try:
        yield web
    finally:
        for server in web.servers:
            server.stop()
