"""WebArena, WebArena-Lite and WebArena-Lite-v2 as an environment: real tasks and sites, honest rewards.

`tasks` is a published task file, or a folder that holds them under the names in tasks.FILES (a
folder of installed packages is one: libwebarena and browsergym-webarenalite bring two). Splits: train647
(PAPER-GAP 15: the 812 minus the old_task_ids of the 165), lite165, lite_v2, all812.

sites.json: {"shopping": "http://host:7770", "gitlab": ["http://a:8023", "http://b:8023"], "wikipedia": null,
             "reddit": {"address": [...], "reset": "http://host/reset?port={port}",
                        "account": {"username": "...", "password": "..."}}}
A list is replicas; null leaves out the tasks of a site. `reset` is a command, or an address to GET that
answers once the site is as new; {address}, {host} and {port} are the replica's. The accounts default to the
benchmark's own.

PAPER-GAP 18: an episode leases a replica of each site it needs, a task that changes state (program_html)
alone, others together; a reset runs before each state-changing episode, and before a reader that would find
its changes. Rewards: once, after the episode, in tabs of their own, by `profile` and by each of `also`
(rules.py).
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from language.prompts import load_prompts
from model.llm import Client, LLMError
from runtime import UserError
from sites.webarena.replicas import (
    ACCOUNTS,
    READ_ONLY,
    Lease,
    Leases,
    Replica,
    SiteError,
    check_address,
    fetch,
    load_sites,
    log_in,
    on_form,
    reset,
)
from sites.webarena.rules import PROFILES, Unknown
from sites.webarena.score import ScriptError, evaluate, needs_judge
from sites.webarena.tasks import (
    apply_patch,
    bind,
    changes_state,
    members_of,
    read_split,
    sites_of,
    starts_of,
    task_problems,
    to_placeholders,
)
from web.environment import Environment, Task, Verdict

READ = """() => { try { const v = (%s); return {value: typeof v === 'function' ? v() : v}; }
                catch (e) { return {error: String(e)}; } }"""


# ---------------------------------------------------------------------------------------------- environment
@dataclass
class Visit:
    """One episode on the sites: its leases and its task with addresses filled in."""
    task: dict
    leases: list[Lease] = field(default_factory=list)

    def replica(self, site: str) -> Replica | None:
        return next((lease.replica for lease in self.leases if lease.replica.site == site), None)

    @property
    def record(self) -> dict:
        """What episodes.jsonl keeps: which replica, as its how-manieth visitor, freshly reset or not."""
        return {x.replica.site: {"replica": x.replica.address, "order": x.order, "reset": x.reset}
                for x in self.leases}


class WebArena(Environment):
    """`tasks`: file or folder of task files; `sites`: sites.json; `profile` gives the reward, `also` (names
    with commas) are scored beside it; `judge(kind, question, reference, answer)` -> reply, None where there
    is no judge; `auth`: folder of storage states, "" logs in by form each time; `leases`: folder of the
    locks."""
    name = "webarena"

    def __init__(self, tasks="", sites="sites.json", profile="fixed", also="", judge=None, auth="", leases="",
                 patch="", lease_timeout: float = 3600.0, reset_timeout: float = 900.0, log=None):
        self.profiles = list(dict.fromkeys(p.strip() for p in (profile, *also.split(",")) if p.strip()))
        if unknown := [p for p in self.profiles if p not in PROFILES]:
            raise UserError(f"no evaluator profile is called {unknown[0]!r}; there are {', '.join(PROFILES)}")
        self.source = tasks
        self.patch = patch
        self.judge_model = judge
        self.auth = auth
        self.sites = load_sites(sites)
        own = Path(tempfile.gettempdir()) / f"webarena-leases-{os.getuid()}"
        self.leases = Leases(leases or own, lease_timeout)
        self.reset_timeout = reset_timeout
        self.log = log or (lambda text: print(text, file=sys.stderr))
        self.visits: dict[int, Visit] = {}          # by session; each is touched by its session's thread only
        self.checked = set()                        # replicas that are where the sites file says
        self.said = set()
        self.lock = threading.Lock()
        ports = {urlsplit(r.address).port for s in self.sites.values() if s for r in s.replicas}
        # Chromium refuses some ports (6665-6669, say) unless they are named
        allowed = ",".join(str(port) for port in sorted(port for port in ports if port))
        self.browser_args = [f"--explicitly-allowed-ports={allowed}"] if allowed else []

    # -- tasks
    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split in the file's order; those of sites that are null in the sites file are left
        out."""
        raw, label = read_split(self.source, split)
        if self.patch:
            self.log(f"webarena: {apply_patch(raw, self.patch)} tasks patched from {self.patch}")
        tasks = [to_placeholders(t, self.sites) for t in raw]
        there = [t for t in tasks if not any(s in self.sites and self.sites[s] is None for s in sites_of(t))]
        if len(there) < len(tasks):
            self.log(f"webarena: {len(tasks) - len(there)} tasks left out: a site of theirs is null")
        bad = [f"task {t['task_id']}: {p}" for t in there for p in task_problems(t, self.sites)]
        if bad:
            check = "python -m sites.webarena check"
            more = f" (and {len(bad) - 1} more; {check} lists them)" if len(bad) > 1 else ""
            raise UserError(f"{label}: {bad[0]}{more}")
        if judged := sum(needs_judge(t["eval"]) for t in there):
            if self.judge_model is None:
                raise UserError(f"{label}: {judged} of {len(there)} tasks need a judge; name --judge_model")
            # a key that is missing is an error now, not at the end
            getattr(self.judge_model, "client", None)
        return [self._task(t, label) for t in there]

    def _task(self, task: dict, label: str) -> Task:
        site = task["sites"][0] if len(task["sites"]) == 1 else "multi"
        changes = changes_state(task)
        own = [there for s in sites_of(task) if s not in READ_ONLY and (there := self.sites.get(s))]
        lasting = changes and any(not replica.reset for s in own for replica in s.replicas)
        return Task(f"{label}/{task['task_id']}", site, task["intent"], 0, task, changes, lasting)

    # -- an episode
    def origins(self, task: Task) -> list[str]:
        """All replicas' addresses; once one is leased, `open` narrows the session to it."""
        names = sites_of(task.data)
        own = [r.address for s in names if (there := self.sites.get(s)) for r in there.replicas]
        return sorted({origin(u) for u in (*own, *starts_of(task.data)) if "://" in u})

    def open(self, task: Task, session) -> str:
        """Lease, reset, log in, and bring up the start pages, the first one in front."""
        self.leave(session)
        wanted = [(there, task.changes_state and s not in READ_ONLY) for s in sites_of(task.data)
                  if (there := self.sites[s])]
        with session.paused():
            visit = self.visits[id(session)] = Visit(task.data, self.leases.acquire(wanted))
            for lease in visit.leases:
                self._prepare(lease)
        addresses = {lease.replica.site: lease.replica.address for lease in visit.leases}
        visit.task = bind(task.data, addresses, task.id)
        starts = starts_of(visit.task)
        others = {o for o in session.allowed if o not in self.origins(task)}    # --extra_origins
        session.allowed = tuple({origin(u) for u in (*starts, *addresses.values())} | others)
        first = session.page
        for site in members_of(visit.task):
            self.log_in(session, visit, site)
        for i, url in enumerate(starts):
            session.page = session.context.new_page() if i else first
            session.goto(url)
            at_home(session.page, url)
        session.page = first
        first.bring_to_front()
        return visit.task["intent"]

    def _prepare(self, lease: Lease) -> None:
        """Reset the replica if it has to be; once per replica, see that it is where the sites file says."""
        if lease.reset:
            reset(lease.replica, self.reset_timeout)
            lease.cleaned()
        elif lease.exclusive:
            self._say_once(f"webarena: {lease.replica.site} has no reset in the sites file: an episode that "
                           f"changes its state starts from what earlier ones left there")
        if lease.replica not in self.checked:
            check_address(lease.replica)
            self.checked.add(lease.replica)

    def _say_once(self, text: str) -> None:
        with self.lock:
            if text not in self.said:
                self.said.add(text)
                self.log(text)

    def log_in(self, session, visit: Visit, site: str) -> None:
        replica = visit.replica(site)
        if replica is not None:
            session.secrets |= {self.account(site)[1], self.account("shopping_site_admin")[1]}
            log_in(session.context, replica, self.account(site), self.auth)

    def account(self, name: str) -> tuple[str, str]:
        """(user, password); `shopping_site_admin` is the shop's REST administrator."""
        site = self.sites.get("shopping" if name == "shopping_site_admin" else name)
        return (site.accounts if site else {}).get(name) or ACCOUNTS[name]

    def judge(self, task: Task, session, answer: str) -> Verdict:
        """The reward by each profile, from one look at the pages."""
        visit = self.visits[id(session)]
        tabs = Tabs(self, session, visit)

        def ask(*question):
            if self.judge_model is None:
                raise Unknown("there is no judge")
            with session.paused():
                return self.judge_model(*question)
        try:
            scores = {name: evaluate(visit.task["eval"], visit.task["intent"], answer, tabs.agents, tabs, ask,
                                     PROFILES[name]) for name in self.profiles}
        finally:
            tabs.close()
        first = scores[self.profiles[0]]
        return Verdict(first.value, first.reason, {name: score.value for name, score in scores.items()})

    def leave(self, session) -> dict:
        """The session's visit, if there is one, is over: its replicas are free. Returns site -> replica,
        order (as its how-manieth visitor) and whether it was reset, for the episode's record."""
        visit = self.visits.pop(id(session), None)
        for lease in visit.leases if visit else ():
            lease.release()
        return visit.record if visit else {}

    def close(self) -> None:
        self.leases.close()


def origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def at_home(page, wanted: str) -> None:
    """SiteError where the site has sent the page to another host, or answers with an error of its own."""
    if origin(page.url) != origin(wanted):
        raise SiteError(f"{wanted} redirects to {page.url}; set the site's own base URL to the address in "
                        f"the sites file")
    status = page.evaluate("() => performance.getEntriesByType('navigation')[0]?.responseStatus ?? 200")
    if status >= 500:
        raise SiteError(f"{wanted} answers {status}")


# ------------------------------------------------------------------------------------ pages for evaluators
class View:
    """A Playwright page as score.py wants it."""

    def __init__(self, page, missing: bool = False):
        self.page = page
        self.missing = missing
        self.prepared = set()

    @property
    def url(self) -> str:
        return self.page.url

    def content(self) -> str:
        return self.page.content()

    def read(self, expression: str, prep_actions: tuple):
        """The value of an expression; each list of preparations runs once, however many targets and profiles
        have it."""
        from playwright.sync_api import Error
        if prep_actions not in self.prepared:
            self.prepared.add(prep_actions)
            for action in prep_actions:
                self.page.evaluate(READ % action.rstrip("; "))
        try:
            result = self.page.evaluate(READ % expression.rstrip("; "))
        except Error as e:
            if "SyntaxError" in str(e):
                raise ScriptError(str(e)) from None
            raise
        if "error" in result:
            raise ScriptError(result["error"])
        return result.get("value")


class Tabs:
    """`browser` for score.py: tabs of its own in the episode's context, each address loaded once."""

    def __init__(self, env: WebArena, session, visit: Visit):
        self.env = env
        self.session = session
        self.visit = visit
        self.agents = View(session.page)
        self.tabs = {}

    def open(self, url: str) -> View:
        if url not in self.tabs:
            self.tabs[url] = self._load(url)
        return self.tabs[url]

    def _load(self, url: str) -> View:
        from playwright.sync_api import Error, TimeoutError
        page = self.session.context.new_page()
        try:
            reply = page.goto(url, wait_until="load")
            for lease in self.visit.leases:         # the agent, or time, has ended the session
                if on_form(page.url, lease.replica) and not on_form(url, lease.replica):
                    self.env.log_in(self.session, self.visit, lease.replica.site)
                    reply = page.goto(url, wait_until="load")
            at_home(page, url)
            with contextlib.suppress(TimeoutError):     # some pages never get quiet
                page.wait_for_load_state("networkidle", timeout=3000)
        except (Error, SiteError) as e:
            if not self.session.browser.is_connected():     # not the site's fault: the episode is run again
                raise
            raise Unknown(f"{url} cannot be read: {str(e).splitlines()[0]}") from None
        return View(page, reply is not None and reply.status in (404, 410))

    def site(self, name: str) -> str:
        replica = self.visit.replica(name)
        if replica is None:
            raise Unknown(f"the task has no site {name}")
        return replica.address

    def account(self, name: str) -> tuple[str, str]:
        return self.env.account(name)

    def json(self, url: str, body=None, token: str = ""):
        try:
            return json.loads(fetch(url, body, token)[1])
        except (SiteError, ValueError) as e:
            raise Unknown(str(e)) from None

    def close(self) -> None:
        from playwright.sync_api import Error
        for view in self.tabs.values():
            with contextlib.suppress(Error):
                view.page.close()


# ------------------------------------------------------------------------------------------------------ start
class Judge:
    """The judge model behind an OpenAI-compatible server, asked for once a task needs it (`make_client`
    demands the key); Unknown where it gives no answer."""

    def __init__(self, make_client, prompts):
        self.make_client = make_client
        self.prompts = prompts

    @functools.cached_property
    def client(self) -> Client:
        return self.make_client()

    def __call__(self, kind: str, question: str, reference: str, answer: str) -> str:
        system, user = getattr(self.prompts, f"judge_{kind}")(question, reference, answer)
        try:
            reply = self.client.ask(system, user)
        except LLMError as e:
            raise Unknown(f"no verdict from the judge: {e}") from None
        if reply.status != "ok":
            raise Unknown(f"no verdict from the judge: {reply.status} {reply.reason}")
        return reply.text


def make(cfg) -> WebArena:
    """The environment of a stage's Config (web.environment.RolloutConfig); without a judge_model there is no
    judge."""
    def client():
        return Client(cfg.judge_model, cfg.judge_base_url, cfg.judge_api, retries=4,
                      cache_dir=cfg.judge_cache)
    judge = Judge(client, load_prompts(cfg.prompts))
    return WebArena(cfg.tasks, cfg.sites, cfg.profile, cfg.also, judge if cfg.judge_model else None, cfg.auth,
                    cfg.leases, cfg.patch)
