"""WebArena's evaluators, string_match, url_match and program_html: an episode's end -> its terminal reward R.

    score = evaluate(task["eval"], task["intent"], answer, page, browser, judge, PROFILES["fixed"])

How texts and addresses are compared is in rules.py, by profile; here is what is compared with what.
Pages come in through a small interface, so that everything also runs on fake ones:

    page.url    page.missing (answered 404)    page.content() -> HTML
    page.read(expression, prep_actions) -> value of a JavaScript expression; ScriptError when the page throws
    browser.open(url) -> page in a tab of its own, Unknown when the site is down
    browser.site(name) -> address    browser.account(name) -> (user, password)
    browser.json(url, body=None, token="") -> decoded JSON, Unknown when there is none
    judge(kind, question, reference, answer) -> the judge's reply, kind answer or reason; Unknown in an outage

What cannot be known is never a silent 0: in `fixed` the score is then None, unless another rule fails anyway.
"""

import ast
import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from sites.webarena.rules import PROFILES, RULES, Profile, Unknown

OR = " |OR| "
LONGEST = 20_000  # characters of a page that a judge gets to read
NOTES = ("EXACT", "GOLD in PRED")


class ScriptError(Exception):
    """A page's JavaScript threw, because the element is not there, say: an empty element, not a broken page.
    """


@dataclass(frozen=True)
class Score:
    value: float | None  # 1.0, 0.0, or None where it cannot be known
    reason: str


# --------------------------------------------------------------------------------------------------- helpers
def reddit_get_post_url(browser, url: str) -> str:
    """The address of the post that a page below it belongs to; any other address as it is."""
    p = urlsplit(url)
    parts = p.path.split("/")
    return f"{p.scheme}://{p.netloc}/f/{parts[2]}/{parts[3]}/" if len(parts) > 3 and parts[1] == "f" else url


def shopping_get_latest_order_url(browser) -> str | None:
    """The page of the newest order, None where there is none; its number serves as its id, as published."""
    query = ("searchCriteria[sortOrders][0][field]=created_at&searchCriteria[sortOrders][0][direction]=DESC"
             "&searchCriteria[pageSize]=1")
    orders = _rest(browser, f"/rest/V1/orders?{query}").get("items") or [None]
    shop = browser.site("shopping")
    return f"{shop}/sales/order/view/order_id/{int(orders[0]['increment_id'])}/" if orders[0] else None


def shopping_get_sku_latest_review_author(browser, sku: str) -> str:
    reviews = _rest(browser, f"/rest/V1/products/{quote(sku, safe='')}/reviews")
    return reviews[-1]["nickname"] if reviews else ""


def shopping_get_sku_latest_review_rating(browser, sku: str) -> str:
    """In percent: five stars are 100."""
    reviews = _rest(browser, f"/rest/V1/products/{quote(sku, safe='')}/reviews")
    return str(reviews[-1]["ratings"][0]["percent"]) if reviews else ""


def _rest(browser, path: str):
    """GET from the shop's REST interface, with its administrator's token."""
    shop, (user, password) = browser.site("shopping"), browser.account("shopping_site_admin")
    login = {"username": user, "password": password}
    token = browser.json(f"{shop}/rest/default/V1/integration/admin/token", login)
    return browser.json(shop + path, token=token)


ROLES = """Object.fromEntries(
    [...document.querySelectorAll("td[data-label='Account'] span.gl-avatar-labeled-sublabel")].map(e =>
        [e.outerText.trim(), e.closest('tr')?.querySelector('td.col-max-role span')?.outerText ?? '']))"""


def gitlab_get_project_memeber_role(browser, page, account: str) -> str:
    """The role in @account's row of a project's members, "" without such a row. (The name is spelt as
    published.)"""
    try:
        return (page.read(ROLES, ()) or {}).get(f"@{account}", "")
    except ScriptError:
        return ""


PAGE = object()
HELPERS = {f.__name__: (f, arguments) for f, arguments in (
    (reddit_get_post_url, (str,)),
    (shopping_get_latest_order_url, ()),
    (shopping_get_sku_latest_review_author, (str,)),
    (shopping_get_sku_latest_review_rating, (str,)),
    (gitlab_get_project_memeber_role, (PAGE, str)))}


def parse_helper(text: str) -> tuple[Callable, list]:
    """`func:name('literal', __page__)` -> the function and its arguments, PAGE for the page. Nothing is
    evaluated: Unknown for any other name, form, or number and kind of arguments."""
    try:
        call: Any = ast.parse(text.removeprefix("func:").strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise Unknown(f"the helper call {text!r} cannot be read") from None
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
    if name not in HELPERS or call.keywords:
        raise Unknown(f"the helper call {text!r} is none of {', '.join(HELPERS)}")
    function, wanted = HELPERS[name]
    given = [PAGE if isinstance(a, ast.Name) and a.id == "__page__" else getattr(a, "value", None)
             for a in call.args]
    fits = [g is w or w is str and isinstance(g, str) for g, w in zip(given, wanted)]
    if len(given) != len(wanted) or not all(fits):
        raise Unknown(f"the helper call {text!r} has other arguments than {name} takes")
    return function, given


def call_helper(text: str, page, browser):
    """The value of a helper; `__last_url__` in a literal is the page's address, put in after parsing."""
    function, given = parse_helper(text)
    arguments = [page if a is PAGE else a.replace("__last_url__", page.url) for a in given]
    try:
        return function(browser, *arguments)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        raise Unknown(f"{function.__name__}: the site's reply has another form ({e!r})") from e


# ------------------------------------------------------------------------------------------------ evaluation
@dataclass
class Case:
    """What is scored: the task's `eval` with addresses filled in, the answer, and the means to find out more.
    """
    rules: dict
    intent: str
    answer: str
    page: Any           # the agent's; moved along where the profile's targets navigate it
    browser: Any
    judge: Callable
    profile: Profile


@dataclass
class Check:
    """One factor of the product. `holds` -> whether it holds, and what it was applied to; or raises Unknown.
    """
    cost: int           # 0 text, 1 page, 2 judge
    name: str
    holds: Callable


def evaluate(rules: dict, intent: str, answer: str, page, browser, judge, profile: Profile) -> Score:
    """The product over the task's eval_types (each counts once). A 0 ends it; `fixed` asks the judge last."""
    case = Case(rules, intent, profile.clean(answer), page, browser, judge, profile)
    kinds = dict.fromkeys(rules["eval_types"])
    checks = [check for kind in kinds for check in EVALUATORS.get(kind, _no_such_type)(case)]
    if not profile.agents_page:
        checks.sort(key=lambda check: check.cost)
    unknown = [] if checks or profile.agents_page else ["there is nothing to check"]
    for check in checks:
        try:
            holds, seen = check.holds()
        except Unknown as u:
            unknown.append(f"{check.name}: {u}")
            if profile.agents_page:
                break
            continue
        if not holds:
            return Score(0.0, f"{check.name} does not hold for {_short(seen)}")
    return Score(profile.crash, "unknown: " + "; ".join(unknown)) if unknown else Score(
        1.0, "; ".join(check.name for check in checks))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _raise(reason: str):
    raise Unknown(reason)


def _no_such_type(case: Case) -> list[Check]:
    return [Check(0, "eval_types", lambda: _raise(f"not all of {case.rules['eval_types']} are known"))]


def string_match(case: Case) -> list[Check]:
    """One check per rule of reference_answers, on the answer; rules that a profile does not know are passed
    over."""
    answers = case.rules.get("reference_answers") or {}
    return [_check(case, 0, "string_match", rule, value, case.profile.split, lambda: case.answer)
            for rule, value in answers.items() if rule == "fuzzy_match" or rule in case.profile.rules]


def url_match(case: Case) -> list[Check]:
    """One check: the agent's address when the episode ended."""
    url, reference = case.page.url, case.rules.get("reference_url") or ""
    note = case.rules.get("url_note") or case.profile.note

    def holds():
        if note not in NOTES:
            raise Unknown(f"the url_note {note!r} is not known")
        return case.profile.url(url, reference.split(OR), note), url
    return [Check(0, f"url_match {note} {reference}", holds)]


def program_html(case: Case) -> list[Check]:
    """One check per target and rule: an element of a page, or the whole page."""
    profile, checks = case.profile, []
    for i, target in enumerate(case.rules.get("program_html") or [], 1):
        contents, name = target["required_contents"], f"program_html {i}"
        known = [rule for rule in profile.html_rules if rule in contents]
        read = _once(lambda target=target: _element(case, target))
        checks += [_check(case, 1, name, rule, contents[rule], RULES, read)
                   for rule in known[:1 if profile.first_only else None]]
        if not known:
            checks.append(Check(1, name, lambda keys=list(contents): _raise(f"no rule of {keys} is known")))
    return checks


EVALUATORS = {"string_match": string_match, "url_match": url_match, "program_html": program_html}


def _once(function: Callable) -> Callable:
    seen = []

    def first():
        if not seen:
            seen.append(function())
        return seen[0]
    return first


def _check(case: Case, cost: int, name: str, rule: str, value, split: tuple, read: Callable) -> Check:
    """`rule` with its reference or references on the text that `read` gives."""
    wanted = value if isinstance(value, list) else [value]
    name = f"{name} {rule} {wanted}"
    if rule == "fuzzy_match":
        return Check(2, name, lambda: _fuzzy(case, value, read()))
    match = case.profile.rules[rule]

    def holds():
        text = read()
        options = (w.split(OR) if rule in split else [w] for w in wanted)
        each = (any(match(option, text, len(wanted) == 1) for option in some) for some in options)
        return (any if rule == "one_of" else all)(each), text
    return Check(cost, name, holds)


def _fuzzy(case: Case, value, text: str) -> tuple[bool, str]:
    """The judge compares. Where the reference is N/A, an answer other than that must give string_note's
    reason."""
    p = case.profile
    if value == "N/A" or value == ["N/A"] and not p.agents_page:
        note = case.rules.get("string_note") or ""
        if p.rules["exact_match"]("N/A", text, True):
            return True, text
        return (bool(note and text) or p.agents_page) and _ask(case, "reason", note, text), text
    if not text and not p.asks_empty:
        return False, text
    if isinstance(value, str) and p.agents_page:
        raise Unknown("fuzzy_match is not a list")
    wanted = [value] if isinstance(value, str) else value
    return all(_ask(case, "answer", ref, text) for ref in (wanted if p.each else [", ".join(wanted)])), text


def _ask(case: Case, kind: str, reference: str, text: str) -> bool:
    reply = case.judge(kind, case.intent, reference, text[:LONGEST])
    verdict = case.profile.verdict(kind, reply)
    if verdict is None:
        raise Unknown(f"the judge's reply {_short(reply)} is no verdict")
    return verdict


def _element(case: Case, target: dict) -> str:
    """The text of a target: of an element, of what a helper finds, or of the whole page."""
    p, page, url, locator = case.profile, case.page, target["url"], target["locator"].strip()
    if not p.helpers and any(s.startswith("func:") for s in (url, locator)):
        raise Unknown("the helper is not imported")
    if url.startswith("func:"):
        url = call_helper(url, page, case.browser)
        if url is None:
            return _raise("there is no such page") if p.agents_page else ""
    if url != "last":
        page = case.browser.open(url)
        if p.agents_page:
            case.page = page
    if not locator:
        value = page.content()
        if page.missing and not p.agents_page:  # the head of a 404 page repeats its address
            value = re.sub(r"<(head|script|style)\b.*?</\1>|<[^>]*>", " ", value, flags=re.S | re.I)
    elif locator.startswith("func:"):
        value = call_helper(locator, page, case.browser)
    elif locator.startswith(p.locators):
        try:
            preparations = tuple(target.get("prep_actions") or ())
            value = page.read(locator.removeprefix("lambda:").strip(), preparations)
        except ScriptError:
            value = ""
    else:
        raise Unknown(f"the locator {locator!r} has an unknown form")
    text = p.none_text if value is None else str(value)
    return html.unescape(text) if p.unescape else text


# ------------------------------------------------------------------------------------------ before an episode
def problems(rules: dict) -> list[str]:
    """What is wrong with a task's `eval`, so that no episode is spent on a task that cannot be scored."""
    kinds, answers = rules.get("eval_types") or [], rules.get("reference_answers") or {}
    targets = rules.get("program_html") or []
    found = [] if kinds else ["it has no evaluator"]
    found += [f"the eval type {kind!r} is not one of {', '.join(EVALUATORS)}"
              for kind in kinds if kind not in EVALUATORS]
    if "string_match" in kinds:
        found += _rule_problems("reference_answers", answers)
    if "url_match" in kinds and not rules.get("reference_url"):
        found.append("url_match without reference_url")
    if rules.get("url_note") and rules["url_note"] not in NOTES:
        found.append(f"the url_note {rules['url_note']!r} is not one of {', '.join(NOTES)}")
    if "program_html" in kinds:
        found += [] if targets else ["program_html without a target"]
        found += [problem for target in targets for problem in _target_problems(target)]
    return found


def _rule_problems(where: str, rules) -> list[str]:
    if not isinstance(rules, dict) or not rules:
        return [f"{where} has no rule"]
    found = [f"the rule {rule!r} in {where} is not one of {', '.join(RULES)}"
             for rule in rules if rule not in RULES]
    for rule, value in rules.items():
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(v, str) and v for v in values):
            found.append(f"the rule {rule!r} in {where} has nothing to compare with")
    return found


def _target_problems(target: dict) -> list[str]:
    if not isinstance(target, dict) or not all(isinstance(target.get(k), str) for k in ("url", "locator")):
        return ["a target of program_html lacks url or locator"]
    found = _rule_problems("required_contents", target.get("required_contents"))
    locator = target["locator"].strip()
    if locator and not locator.startswith((*PROFILES["fixed"].locators, "func:")):
        found.append(f"the locator {locator!r} has an unknown form")
    for text in (target["url"], locator):
        if text.startswith("func:"):
            try:
                parse_helper(text)
            except Unknown as u:
                found.append(str(u))
    return found


def needs_judge(rules: dict) -> bool:
    """Whether a language model has to say whether the task was solved."""
    contents = [target.get("required_contents") or {} for target in rules.get("program_html") or []]
    return any("fuzzy_match" in c for c in (rules.get("reference_answers") or {}, *contents))
