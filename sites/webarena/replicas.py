"""The sites behind WebArena's tasks: sites.json, accounts and log-in, replicas and their leases, resets.

An episode leases one replica of every site it needs. Readers share a replica, a state-changing episode has it
alone; waiting ones are served in turn, so that readers cannot starve a writer. The locks are files that the
kernel frees when a process dies, so they hold between threads, ranks and runs of one machine (on a shared
folder, of several). Beside each lock lie the count of leases so far and whether a writer has been there since
the last reset.

Passwords stay in here: no error text, log or episode contains one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runtime import UserError, write_atomic

READ_ONLY = {"map", "wikipedia", "homepage"}  # nothing that an agent does there changes them
KNOWN = {"shopping", "shopping_admin", "reddit", "gitlab"} | READ_ONLY
ACCOUNTS = {  # the benchmark's own, public constants
    "shopping": ("emma.lopez@gmail.com", "Password.123"), "shopping_admin": ("admin", "admin1234"),
    "reddit": ("MarvelsGrantMan136", "test1234"), "gitlab": ("byteblaze", "hello1234"),
    "shopping_site_admin": ("admin", "admin1234")}  # the last for the shop's REST interface


class SiteError(ConnectionError):
    """A site is down, elsewhere, or does not let us in: the episode is run again, then it is `infra`."""


@dataclass(frozen=True)
class Replica:
    site: str
    address: str    # without a slash at the end
    reset: str = ""

    @property
    def slug(self) -> str:
        return re.sub(r"[^A-Za-z0-9.]+", "_", urlsplit(self.address).netloc)


@dataclass(frozen=True)
class Site:
    name: str
    replicas: tuple[Replica, ...]
    accounts: dict


# ------------------------------------------------------------------------------------------------ sites.json
def load_sites(path) -> dict[str, Site | None]:
    """sites.json -> sites by name, None for one that is not there on purpose. ScaleCUA's webarena_url.json is
    read too (its names end in _URL). Raises UserError for a file, name or address that cannot be used."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"sites file {path}: {e}; give a JSON object such as "
                        '{"shopping": "http://host:port"}') from None
    if not isinstance(given, dict):
        raise UserError(f"sites file {path}: not a JSON object of sites by name")
    sites = {}
    for key, entry in given.items():
        name = key.lower().removesuffix("_url")
        if name not in KNOWN:
            raise UserError(f"sites file {path}: no site is called {key!r}; the names are "
                            f"{', '.join(sorted(KNOWN))}")
        sites[name] = None if entry is None else _site(path, name, entry)
    return sites


def _site(path, name: str, entry) -> Site:
    entry = entry if isinstance(entry, dict) else {"address": entry}
    if unknown := entry.keys() - {"address", "reset", "account", "rest_account"}:
        raise UserError(f"sites file {path}: {name} has unknown keys {', '.join(sorted(unknown))}")
    addresses, resets = ([v] if isinstance(v, str) else v
                         for v in (entry.get("address") or [], entry.get("reset") or ""))
    for address in addresses:
        if not isinstance(address, str) or not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address.strip()):
            raise UserError(f"sites file {path}: {name}: {address!r} is no address; give http://host:port")
    if not addresses or len(resets) not in (1, len(addresses)):
        raise UserError(f"sites file {path}: {name} needs an address, and one reset or one per address")
    accounts = {who: _account(path, who, entry.get(key)) for who, key in
                ((name, "account"), ("shopping_site_admin", "rest_account")) if entry.get(key)}
    resets = resets * len(addresses) if len(resets) == 1 else resets
    replicas = tuple(Replica(name, a.strip().rstrip("/"), r) for a, r in zip(addresses, resets))
    return Site(name, replicas, accounts)


def _account(path, who: str, given) -> tuple[str, str]:
    if not isinstance(given, dict) or given.keys() != {"username", "password"}:
        raise UserError(f"sites file {path}: the account of {who} needs username and password, only")
    return given["username"], given["password"]


# --------------------------------------------------------------------------------------------------- network
def fetch(url: str, body=None, token: str = "", timeout: float = 30.0) -> tuple[str, bytes]:
    """GET, or POST a JSON body -> (final address, content). SiteError for anything but a 2xx reply in time.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
            return reply.url, reply.read()
    except (OSError, ValueError) as e:
        raise SiteError(f"{url} does not answer as it should: {e}") from None


def check_address(replica: Replica) -> None:
    """SiteError unless the site answers at its own address: Magento, for one, sends visitors to the address
    it was installed with (webarena#18, VWA#35)."""
    try:
        where, _ = fetch(replica.address + "/")
    except SiteError as e:
        raise SiteError(f"site {replica.site}: {e}") from None
    if urlsplit(where).netloc != urlsplit(replica.address).netloc:
        raise SiteError(f"site {replica.site}: {replica.address} redirects to {where}; set the site's own "
                        f"base URL to the address in the sites file")


def reset(replica: Replica, timeout: float) -> None:
    """Run the replica's reset and wait until it has happened."""
    parts = urlsplit(replica.address)
    what = replica.reset.format(address=replica.address, host=parts.hostname, port=parts.port or "")
    if what.startswith(("http://", "https://")):
        fetch(what, timeout=timeout)
        return
    try:
        done = subprocess.run(shlex.split(what), capture_output=True, encoding="utf-8", errors="replace",
                              timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SiteError(f"reset of {replica.site} at {replica.address}: {e}") from None
    if done.returncode:
        raise SiteError(f"reset of {replica.site} at {replica.address} ended with {done.returncode}: "
                        f"{done.stderr.strip()[-300:]}")


# ---------------------------------------------------------------------------------------------------- leases
@dataclass
class Lease:
    """The right to use one replica; `reset` says that it has to be reset first."""
    replica: Replica
    order: int              # how many leases this replica had before, plus one
    exclusive: bool
    reset: bool
    lock: int               # file descriptor that holds the lock
    state: Path

    def cleaned(self) -> None:
        """The reset has happened. A reader leaves the replica as it is now, a writer does not."""
        _write_state(self.state, self.order, dirty=self.exclusive)

    def release(self) -> None:
        os.close(self.lock)
        with Leases.changed:
            Leases.changed.notify_all()


class Leases:
    """Locks on replicas in `directory`, shared with every other process that uses the same one."""
    changed = threading.Condition()     # notified when a thread of this process frees something

    def __init__(self, directory, timeout: float = 3600.0):
        self.directory, self.timeout, self.closed = Path(directory), timeout, False
        self.directory.mkdir(parents=True, exist_ok=True)

    def acquire(self, wanted: list[tuple[Site, bool]]) -> list[Lease]:
        """One replica per (site, exclusive), all or nothing; SiteError after `timeout` seconds of waiting.

        Sites are taken in the order of their names, and whoever holds a replica waits for no earlier one: no
        two episodes can wait for each other."""
        held, deadline = [], time.monotonic() + self.timeout
        try:
            for site, exclusive in sorted(wanted, key=lambda w: w[0].name):
                held.append(self._one(site, exclusive, deadline))
        except BaseException:
            for lease in held:
                lease.release()
            raise
        return held

    def close(self) -> None:
        """Whoever waits gives up."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _one(self, site: Site, exclusive: bool, deadline: float) -> Lease:
        """Behind the gate of the site stands one at a time, so replicas are given out in the order of asking.
        """
        name = hashlib.sha256(repr(sorted(r.address for r in site.replicas)).encode()).hexdigest()[:12]
        gate = self._until(lambda: _lock(self.directory / f"{site.name}.{name}.gate", True), deadline, site)
        try:
            return self._until(lambda: self._try(site, exclusive), deadline, site)
        finally:
            os.close(gate)
            with self.changed:
                self.changed.notify_all()

    def _try(self, site: Site, exclusive: bool) -> Lease | None:
        """A free replica, the least used one first; None when there is none."""
        states = {r: self.directory / f"{r.site}.{r.slug}.json" for r in site.replicas}
        for replica in sorted(site.replicas, key=lambda r: _read_state(states[r])["order"]):
            state = _read_state(states[replica])
            unclean = bool(replica.reset) and (exclusive or state["dirty"])
            lock = _lock(states[replica].with_suffix(".lock"), exclusive or unclean)
            if lock is not None:
                _write_state(states[replica], state["order"] + 1, state["dirty"] or exclusive)
                return Lease(replica, state["order"] + 1, exclusive, unclean, lock, states[replica])
        return None

    def _until(self, attempt, deadline: float, site: Site):
        """Repeat until it succeeds; woken by this process's releases, and often enough for those of others.
        """
        with self.changed:
            while (got := attempt()) is None:
                if self.closed or time.monotonic() > deadline:
                    raise SiteError(f"site {site.name}: no replica became free within {self.timeout:.0f} s")
                self.changed.wait(0.2)
        return got


def _lock(path: Path, exclusive: bool) -> int | None:
    """A locked file descriptor, None when others are in the way."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _read_state(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):   # nobody has been there yet
        return {"order": 0, "dirty": False}


def _write_state(path: Path, order: int, dirty: bool) -> None:
    write_atomic(path, json.dumps({"order": order, "dirty": dirty}))


# ---------------------------------------------------------------------------------------------------- log-in
@dataclass(frozen=True)
class Door:
    """A site's log-in form. Fields are (how to find it, text); `inside` is a page that only members see,
    `keyword` a word on it; without a keyword, a visitor without a session is sent elsewhere."""
    form: str
    user: tuple[str, str]
    password: tuple[str, str]
    button: tuple[str, str]
    inside: str
    keyword: str = ""


DOORS = {
    "shopping": Door("/customer/account/login/", ("exactly", "Email"), ("exactly", "Password"),
                     ("button", "Sign In"), "/wishlist/"),
    "shopping_admin": Door("/", ("placeholder", "user name"), ("placeholder", "password"),
                           ("button", "Sign in"), "/dashboard", "Dashboard"),
    "reddit": Door("/login", ("label", "Username"), ("label", "Password"), ("button", "Log in"),
                   "/user/{user}/account", "Delete"),
    "gitlab": Door("/users/sign_in", ("testid", "username-field"), ("testid", "password-field"),
                   ("testid", "sign-in-button"), "/-/profile"),
}
FIND = {"label": lambda page, text: page.get_by_label(text),
        "exactly": lambda page, text: page.get_by_label(text, exact=True),
        "placeholder": lambda page, text: page.get_by_placeholder(text),
        "button": lambda page, text: page.get_by_role("button", name=text),
        "testid": lambda page, text: page.get_by_test_id(text)}


def log_in(context, replica: Replica, account: tuple[str, str], folder: str = "") -> None:
    """Make the browser context a member's, by the cookies in `folder` where they still work, else by the
    site's form.

    `folder` holds Playwright's storage states, `[host_port/]site[.site]_state.json`; new ones are written
    there. SiteError where the site does not let us in."""
    from playwright.sync_api import Error
    own = Path(folder) / replica.slug / f"{replica.site}_state.json"
    page = context.new_page()
    try:
        for file in _states(folder, own, replica.site):
            context.add_cookies(json.loads(file.read_text(encoding="utf-8"))["cookies"])
            if _is_inside(page, replica, account[0]):
                return
        _fill_in(page, replica, account)
        if not _is_inside(page, replica, account[0]):
            raise SiteError(f"log-in at {replica.site} ({replica.address}) as {account[0]} was refused; "
                            f"check the account in the sites file")
    except Error as e:      # its call log would quote what was typed
        raise SiteError(f"log-in at {replica.site} ({replica.address}): {str(e).splitlines()[0]}") from None
    finally:
        with contextlib.suppress(Error):
            page.close()
    if folder:
        write_atomic(own, json.dumps(context.storage_state()))


def _states(folder: str, own: Path, site: str) -> list[Path]:
    """Storage states that may hold this site's session."""
    if not folder:
        return []
    shared = [f for f in Path(folder).glob("*_state.json") if site in f.name.rsplit("_", 1)[0].split(".")]
    return [f for f in (own, *sorted(shared)) if f.is_file()]


def _fill_in(page, replica: Replica, account: tuple[str, str]) -> None:
    door = DOORS[replica.site]
    page.goto(replica.address + door.form, wait_until="domcontentloaded")
    for (how, text), value in zip((door.user, door.password), account):
        FIND[how](page, text).fill(value)
    with page.expect_navigation(wait_until="domcontentloaded"):
        FIND[door.button[0]](page, door.button[1]).click()


def _is_inside(page, replica: Replica, user: str) -> bool:
    door = DOORS[replica.site]
    wanted = replica.address + door.inside.format(user=user)
    reply = page.goto(wanted, wait_until="domcontentloaded")
    if reply is not None and reply.status >= 500:
        raise SiteError(f"site {replica.site}: {wanted} answers {reply.status}")
    return door.keyword in page.content() if door.keyword else page.url.rstrip("/") == wanted.rstrip("/")


def on_form(url: str, replica: Replica) -> bool:
    """Whether a page is the site's log-in form, which a visitor without a session is sent to."""
    form = DOORS[replica.site].form if replica.site in DOORS else "/"
    return form != "/" and url.startswith(replica.address + form.rstrip("/"))
