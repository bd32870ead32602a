"""WebArena, WebArena-Lite and WebArena-Lite-v2 as an environment: real task files, real sites, honest rewards.

    python env_webarena.py check --tasks FILE --sites sites.json     # what is in a task file, and every problem

Task files are read as published: WebArena's 812, VisualAgentBench's 165, ScaleCUA's 154 (UTF-8 or GBK, raw or with
addresses filled in), WebAgent-R1's 647 in both versions. `--tasks` is such a file, or a folder that holds them
under the names in FILES (a folder of installed packages is one: libwebarena and browsergym-webarenalite bring the
first two). Splits: train647 (PAPER-GAP 15: the 812 minus the old_task_ids of the 165), lite165, lite_v2, all812.

sites.json: {"shopping": "http://host:7770", "gitlab": ["http://a:8023", "http://b:8023"], "wikipedia": null,
             "reddit": {"address": [...], "reset": "http://host/reset?port={port}",
                        "account": {"username": "...", "password": "..."}}}
A list is replicas; null leaves out the tasks of a site. `reset` is a command, or an address to GET that answers once
the site is as new, with {address}, {host} and {port} of the replica. The accounts default to the benchmark's own.

PAPER-GAP 18: an episode leases a replica of each site it needs, a task that changes state (program_html) alone,
others together; a reset runs before each state-changing episode, and before a reader that would find its changes.
Rewards: once, after the episode, in tabs of their own, by `profile` and by each of `also`.
"""

import contextlib
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from llm import Client, LLMError
from prompts import load_prompts
from rollout import Environment, Task, Verdict
from runtime import UserError, launch
from webarena_eval import ScriptError, evaluate, needs_judge, problems
from webarena_rules import PROFILES, Unknown
from webarena_sites import (ACCOUNTS, DOORS, KNOWN, READ_ONLY, Lease, Leases, Replica, Site, SiteError,
                            check_address, fetch, load_sites, log_in, on_form, reset)

FILES = {"all812": ("webarena/test.raw.json", "all812.json"),
         "lite165": ("visualagentbench/test_webarena_lite.raw.json", "lite165.json",
                     "browsergym/webarenalite/test_webarena_lite.raw.json"),
         "lite_v2": ("scalecua/webarena_lite_v2/test.raw.json", "lite_v2.json"),
         "train647": ("train647.json",)}
PLACEHOLDER = re.compile(r"__([A-Z][A-Z_]*?)__")
READ = """() => { try { const v = (%s); return {value: typeof v === 'function' ? v() : v}; }
                catch (e) { return {error: String(e)}; } }"""


# ------------------------------------------------------------------------------------------------ task files
def read_tasks(path) -> list[dict]:
    """The task objects of a file, in one schema; UserError for a file that holds none."""
    data = Path(path).read_bytes() if Path(path).is_file() else None
    if data is None:
        raise UserError(f"task file {path}: there is no such file; the README says where to get the task files")
    for encoding in ("utf-8-sig", "gbk"):       # ScaleCUA writes its substituted file in GBK
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode(encoding)
            break
    else:
        raise UserError(f"task file {path}: neither UTF-8 nor GBK; give the file as it was published")
    try:
        tasks = json.loads(text)
    except ValueError as e:
        raise UserError(f"task file {path}: not JSON ({e}); give the file as it was published") from None
    tasks = tasks if isinstance(tasks, list) else [tasks]
    for i, task in enumerate(tasks):
        if not isinstance(task, dict) or not isinstance(task.get("intent"), str) or "task_id" not in task:
            raise UserError(f"task file {path}: entry {i} is no task (it needs task_id and intent)")
    if not tasks or all("eval" not in t for t in tasks):
        raise UserError(f"task file {path}: holds no task with an evaluator")
    return [normal(task) for task in tasks]


def normal(task: dict) -> dict:
    """One schema for all files: null, {} and "" for nothing; a text for a list of one; WebArena's older lists."""
    rules = dict(task.get("eval") or {})
    answers = rules.get("reference_answers") or {}
    answers = {"must_include": answers} if isinstance(answers, list) else answers
    targets = [t for t in rules.get("program_html") or [] if t.get("url") or t.get("locator") or t.get("required_contents")]
    rules |= {"eval_types": list(rules.get("eval_types") or []), "reference_answers": _listed(answers),
              "reference_url": rules.get("reference_url") or "",
              "program_html": [t | {"required_contents": _listed(t.get("required_contents"))} for t in targets]}
    return task | {"eval": rules, "sites": list(task.get("sites") or []), "start_url": task.get("start_url") or "",
                   "storage_state": task.get("storage_state") or ""}


def _listed(rules):
    """must_include as a list also where a file has a text."""
    return {k: [v] if k == "must_include" and isinstance(v, str) else v for k, v in rules.items()} \
        if isinstance(rules, dict) else rules


def derive_train(all812: list[dict], lite165: list[dict]) -> list[dict]:
    """PAPER-GAP 15: the training tasks are those of the 812 that no task of the 165 was made from."""
    taken = {t["old_task_id"] for t in lite165}
    return [t for t in all812 if t["task_id"] not in taken]


def apply_patch(tasks: list[dict], path) -> int:
    """Repair annotations from {"task_id": {"eval": {...}}}, merged key by key; returns how many were changed."""
    try:
        patch = json.loads(Path(path).read_text(encoding="utf-8"))
        by_id = {str(t["task_id"]): t for t in tasks}
        for task_id, change in patch.items():
            by_id[task_id] |= {k: v for k, v in change.items() if k != "eval"}
            by_id[task_id]["eval"] |= change.get("eval", {})
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise UserError(f"patch file {path}: {e}; give an object of changes by task_id") from None
    except KeyError as e:
        raise UserError(f"patch file {path}: there is no task {e} to change") from None
    return len(patch)


def rewrite(thing, replace):
    """`replace` on every string of a JSON value."""
    if isinstance(thing, str):
        return replace(thing)
    if isinstance(thing, dict):
        return {k: rewrite(v, replace) for k, v in thing.items()}
    return [rewrite(v, replace) for v in thing] if isinstance(thing, list) else thing


def to_placeholders(task: dict, sites: dict[str, Site | None]) -> dict:
    """Addresses of the sites file back to `__SITE__`, for files in which they are filled in already."""
    known = sorted(((r.address, f"__{s.name.upper()}__") for s in sites.values() if s for r in s.replicas),
                   key=lambda pair: -len(pair[0]))

    def replace(text):
        for address, placeholder in known:
            text = re.sub(re.escape(address) + r"(?![\w.:-])", placeholder, text)
        return text
    return rewrite(task, replace)


def bind(task: dict, addresses: dict[str, str], name: str) -> dict:
    """Every `__SITE__` replaced by its address; UserError naming the task where one is left."""
    bound = rewrite(task, lambda text: PLACEHOLDER.sub(lambda m: addresses.get(m[1].lower(), m[0]), text))
    if left := PLACEHOLDER.search(json.dumps(bound)):
        raise UserError(f"task {name}: the placeholder {left[0]} has no address; add {left[1].lower()!r} to the "
                        f"sites file")
    return bound


def sites_of(task: dict) -> list[str]:
    """The sites that a task needs: those it lists and those it mentions."""
    mentioned = {m.lower() for m in PLACEHOLDER.findall(json.dumps(task))}
    return sorted(mentioned | (KNOWN & set(task["sites"])))


def members_of(task: dict) -> list[str]:
    """The sites to log in to, by the name of the task's storage state: gitlab.reddit_state.json -> gitlab, reddit."""
    names = Path(task["storage_state"]).name.rsplit("_", 1)[0].split(".") if task["storage_state"] else []
    return [name for name in names if name in DOORS]


def task_problems(task: dict, sites: dict[str, Site | None]) -> list[str]:
    """Everything that would keep a task from being run or scored."""
    found = problems(task["eval"])
    found += [f"the site {site!r} is missing in the sites file" for site in sites_of(task) if site not in sites]
    for url in task["start_url"].split(" |AND| "):
        if not re.match(r"https?://|__[A-Z_]+__", url.strip()):
            found.append(f"the start page {url!r} is no address")
    return found


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
        return {lease.replica.site: {"replica": lease.replica.address, "order": lease.order, "reset": lease.reset}
                for lease in self.leases}


@dataclass
class WebArenaVerdict(Verdict):
    rewards: dict = field(default_factory=dict)     # profile -> reward, from the same episode
    details: dict = field(default_factory=dict)     # site -> replica, order, reset


class WebArena(Environment):
    """`tasks`: file or folder of task files; `sites`: sites.json; `profile` gives the reward, `also` (names with commas)
    are scored beside it; `judge(kind, question, reference, answer)` -> reply, None where there is no judge;
    `auth`: folder of storage states, "" logs in by form each time; `leases`: folder of the locks."""
    name = "webarena"

    def __init__(self, tasks="", sites="sites.json", profile="fixed", also="", judge=None, auth="", leases="",
                 patch="", lease_timeout: float = 3600.0, reset_timeout: float = 900.0, log=None):
        self.profiles = list(dict.fromkeys([profile, *filter(None, also.split(","))]))
        if unknown := [p for p in self.profiles if p not in PROFILES]:
            raise UserError(f"no evaluator profile is called {unknown[0]!r}; choose among {', '.join(PROFILES)}")
        self.source, self.patch, self.judge_model, self.auth = tasks, patch, judge, auth
        self.sites = load_sites(sites)
        self.leases = Leases(leases or Path(tempfile.gettempdir()) / "webarena-leases", lease_timeout)
        self.reset_timeout = reset_timeout
        self.log = log or (lambda text: print(text, file=sys.stderr))
        self.visits: dict[int, Visit] = {}          # by session; each is touched by its session's thread only
        self.checked, self.said, self.lock = set(), set(), threading.Lock()
        ports = {urlsplit(r.address).port for s in self.sites.values() if s for r in s.replicas} - {None}
        # Chromium refuses some ports (6665-6669, say) unless they are named
        self.browser_args = [f"--explicitly-allowed-ports={','.join(map(str, sorted(ports)))}"] if ports else []

    # -- tasks
    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split in the file's order, without those of sites that are null in the sites file."""
        raw, label = self._read(split)
        if self.patch:
            self.log(f"webarena: {apply_patch(raw, self.patch)} tasks patched from {self.patch}")
        tasks = [to_placeholders(t, self.sites) for t in raw]
        there = [t for t in tasks if not any(s in self.sites and self.sites[s] is None for s in sites_of(t))]
        if len(there) < len(tasks):
            self.log(f"webarena: {len(tasks) - len(there)} tasks left out: their sites are null in the sites file")
        bad = [f"task {t['task_id']}: {p}" for t in there for p in task_problems(t, self.sites)]
        if bad:
            raise UserError(f"{label}: {bad[0]}" + (f" (and {len(bad) - 1} more; python env_webarena.py check lists "
                                                    f"them)" if len(bad) > 1 else ""))
        if not self.judge_model and (judged := sum(needs_judge(t["eval"]) for t in there)):
            raise UserError(f"{label}: {judged} of {len(there)} tasks need a judge; name its model with --judge_model")
        return [self._task(t, label) for t in there]

    def _read(self, split: str) -> tuple[list[dict], str]:
        """A split's raw tasks and the first part of their ids."""
        source = Path(self.source or ".")
        if self.source and not source.is_dir():
            return read_tasks(source), source.stem
        if split not in FILES:
            raise UserError(f"webarena has no split {split!r}; choose one of {', '.join(FILES)}, or name a file with "
                            f"--tasks")
        found = next((source / name for name in FILES[split] if (source / name).is_file()), None)
        if found is None and split == "train647":
            return derive_train(self._read("all812")[0], self._read("lite165")[0]), split
        if found is None:
            raise UserError(f"split {split}: no {FILES[split][0]} in {source}; --tasks names a task file or the folder "
                            f"with the task files")
        return read_tasks(found), split

    def _task(self, task: dict, label: str) -> Task:
        site = task["sites"][0] if len(task["sites"]) == 1 else "multi"
        return Task(f"{label}/{task['task_id']}", site, task["intent"], 0, task,
                    changes_state="program_html" in task["eval"]["eval_types"])

    # -- an episode
    def origins(self, task: Task) -> list[str]:
        """All replicas' addresses; once one is leased, `open` narrows the session to it."""
        names = sites_of(task.data)
        own = [r.origin for s in names if self.sites.get(s) for r in self.sites[s].replicas]
        start = [urlsplit(u.strip()) for u in task.data["start_url"].split(" |AND| ")]
        return sorted({*own, *(f"{u.scheme}://{u.netloc}" for u in start if u.scheme)})

    def open(self, task: Task, session) -> str:
        """Lease, reset, log in, and bring up the start pages, the first one in front."""
        self.leave(session)
        wanted = [(self.sites[s], task.changes_state and s not in READ_ONLY) for s in sites_of(task.data)]
        visit = self.visits[id(session)] = Visit(task.data, self.leases.acquire(wanted))
        try:
            for lease in visit.leases:
                self._prepare(lease)
            visit.task = bind(task.data, {x.replica.site: x.replica.address for x in visit.leases}, task.id)
            starts = [u.strip() for u in visit.task["start_url"].split(" |AND| ")]
            session.allowed = tuple({f"{u.scheme}://{u.netloc}" for u in map(
                urlsplit, [*starts, *(lease.replica.address for lease in visit.leases)])})
            first = session.page
            for site in members_of(visit.task):
                self._log_in(session, visit, site)
            for i, url in enumerate(starts):
                session.page = session.context.new_page() if i else first
                session.goto(url)
                _landed(session.page, url)
            session.page = first
            first.bring_to_front()
        except BaseException:
            self.leave(session)
            raise
        return visit.task["intent"]

    def _prepare(self, lease: Lease) -> None:
        """Reset the replica if it has to be; once per replica, see that it is where the sites file says."""
        if lease.reset:
            reset(lease.replica, self.reset_timeout)
            lease.cleaned()
        elif lease.exclusive:
            self._say_once(f"webarena: {lease.replica.site} has no reset in the sites file: an episode that changes its "
                           f"state starts from what earlier ones left there")
        if lease.replica not in self.checked:
            check_address(lease.replica)
            self.checked.add(lease.replica)

    def _say_once(self, text: str) -> None:
        with self.lock:
            if text not in self.said:
                self.said.add(text)
                self.log(text)

    def _log_in(self, session, visit: Visit, site: str) -> None:
        replica = visit.replica(site)
        if replica is not None:
            log_in(session.context, replica, self.account(site), self.auth)

    def account(self, name: str) -> tuple[str, str]:
        """(user, password); `shopping_site_admin` is the shop's REST administrator."""
        site = self.sites.get("shopping" if name == "shopping_site_admin" else name)
        return (site.accounts if site else {}).get(name) or ACCOUNTS[name]

    def judge(self, task: Task, session, answer: str) -> Verdict:
        """The reward by each profile, from one look at the pages; then the replicas are free for the next episode."""
        visit = self.visits[id(session)]
        session.settle()                            # the last action may still be at work
        tabs = Tabs(self, session, visit)
        try:
            scores = {name: evaluate(visit.task["eval"], visit.task["intent"], answer, tabs.agents, tabs,
                                     self._ask_judge, PROFILES[name]) for name in self.profiles}
        finally:
            tabs.close()
            self.leave(session)
        first = scores[self.profiles[0]]
        return WebArenaVerdict(first.value, first.reason, {name: s.value for name, s in scores.items()}, visit.record)

    def _ask_judge(self, kind: str, question: str, reference: str, answer: str) -> str:
        if self.judge_model is None:
            raise Unknown("there is no judge")
        return self.judge_model(kind, question, reference, answer)

    def leave(self, session) -> dict:
        """End the session's visit, if there is one, and free its replicas; the pool calls it after every attempt, also
        after one that failed. Returns what the episode's record should keep."""
        visit = self.visits.pop(id(session), None)
        for lease in visit.leases if visit else ():
            lease.release()
        return visit.record if visit else {}


def _landed(page, wanted: str) -> None:
    """SiteError unless the page is where it should be, answered by a site that works."""
    if urlsplit(page.url).netloc != urlsplit(wanted).netloc:
        raise SiteError(f"{wanted} redirects to {page.url}; set the site's own base URL to the address in the sites file")
    status = page.evaluate("() => performance.getEntriesByType('navigation')[0]?.responseStatus ?? 200")
    if status >= 500:
        raise SiteError(f"{wanted} answers {status}")


# ---------------------------------------------------------------------------------------- pages for evaluators
class View:
    """A Playwright page as webarena_eval.py wants it."""

    def __init__(self, page, missing: bool = False):
        self.page, self.missing, self.prepared = page, missing, set()

    @property
    def url(self) -> str:
        return self.page.url

    def content(self) -> str:
        return self.page.content()

    def read(self, expression: str, prep_actions: tuple):
        """The value of an expression; each list of preparations runs once, however many targets and profiles have it."""
        from playwright.sync_api import Error
        if prep_actions not in self.prepared:
            self.prepared.add(prep_actions)
            for action in prep_actions:
                self.page.evaluate(READ % action)
        try:
            result = self.page.evaluate(READ % expression)
        except Error as e:
            if "SyntaxError" in str(e):
                raise ScriptError(str(e)) from None
            raise
        if "error" in result:
            raise ScriptError(result["error"])
        return result.get("value")


class Tabs:
    """`browser` for webarena_eval.py: tabs of its own in the episode's context, each address loaded once."""

    def __init__(self, env: WebArena, session, visit: Visit):
        self.env, self.session, self.visit = env, session, visit
        self.agents, self.tabs = View(session.page), {}

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
                    self.env._log_in(self.session, self.visit, lease.replica.site)
                    reply = page.goto(url, wait_until="load")
            if reply is not None and reply.status >= 500:
                raise Unknown(f"{url} answers {reply.status}")
            _landed(page, url)
            with contextlib.suppress(TimeoutError):     # some pages never get quiet
                page.wait_for_load_state("networkidle", timeout=3000)
        except (Error, SiteError) as e:
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
    """The judge model behind an OpenAI-compatible server; Unknown where it gives no answer."""

    def __init__(self, client: Client, prompts):
        self.client, self.prompts = client, prompts

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
    """The environment of a stage's Config (rollout.RolloutConfig); without a judge_model there is no judge."""
    get = vars(cfg).get
    judge = None
    if get("judge_model"):
        client = Client(get("judge_model"), get("judge_base_url", ""), get("judge_api", "responses"), retries=4,
                        cache_dir=get("judge_cache", ""))
        judge = Judge(client, load_prompts(get("prompts", "")))
    return WebArena(cfg.tasks, cfg.sites, get("profile", "fixed"), get("also", ""), judge, get("auth", ""),
                    get("leases", ""), get("patch", ""))


@dataclass
class Config:
    tasks: str                      # task file
    sites: str = "sites.json"       # addresses, accounts, replicas and resets of the sites
    patch: str = ""                 # repairs of annotations, by task_id
    live: bool = False              # also ask every replica whether it answers at its address


def check(cfg: Config) -> None:
    """What a task file holds and every problem of it; UserError when there are some."""
    sites = load_sites(cfg.sites)
    raw = read_tasks(cfg.tasks)
    patched = apply_patch(raw, cfg.patch) if cfg.patch else 0
    tasks = [to_placeholders(t, sites) for t in raw]
    found = [(t["task_id"], p) for t in tasks for p in task_problems(t, sites)]
    found += [(i, "the task_id is there more than once") for i, n in Counter(t["task_id"] for t in tasks).items() if n > 1]
    bad = {task_id for task_id, _ in found}
    print(f"{cfg.tasks}: {len(tasks)} tasks, {sum(t['task_id'] not in bad for t in tasks)} readable, {patched} patched")
    print(f"  need a judge   {sum(needs_judge(t['eval']) for t in tasks)}")
    print(f"  change state   {sum('program_html' in t['eval']['eval_types'] for t in tasks)}")
    for name, n in sorted(Counter(s for t in tasks for s in sites_of(t)).items()):
        there = sites.get(name)
        print(f"  need {name:15} {n:4}   " + (f"{len(there.replicas)} replica(s)" + (
            ", reset" if any(r.reset for r in there.replicas) else "") if there else
            "left out" if name in sites else "MISSING"))
    for kind, n in sorted(Counter("+".join(t["eval"]["eval_types"]) for t in tasks).items()):
        print(f"  {kind:30} {n:4}")
    for replica in [r for s in sites.values() if s for r in s.replicas] if cfg.live else ():
        try:
            check_address(replica)
        except SiteError as e:
            found.append((replica.site, str(e)))
    for task_id, problem in found:
        print(f"  PROBLEM {task_id}: {problem}")
    if found:
        raise UserError(f"{cfg.tasks}: {len(found)} problems, listed above")


if __name__ == "__main__":
    launch(check, check)
