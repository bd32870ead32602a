"""WebArena's evaluators: string_match, url_match and program_html as rules in tables, one table per profile.

`fixed`, the default, is meant to be right. `scalecua_v2`, `vab` and `webarena` score as the published evaluators of
WebArena-Lite-v2, VisualAgentBench and WebArena do, faults included, so that one episode can be scored in several ways.

Pages come in through a small interface, so that the rules also run on fake ones:
    page.url     page.missing (answered 404)     page.content() -> HTML
    page.read(expression, prep_actions) -> the value of a JavaScript expression; ScriptError when the page throws
    browser.open(url) -> page, in a tab of its own     browser.site(name) -> address     browser.json(...), see REST
    judge(kind, question, reference, answer) -> the judge model's reply; kind is "answer" or "reason"
What cannot be known (a judge's outage, a site that is down, a faulty annotation) raises Unknown: in `fixed` the score is
then None, unless another rule has already failed, and never a silent 0.

    score = evaluate(task["eval"], task["intent"], answer, page, browser, judge, PROFILES["fixed"])
"""

import ast
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from posixpath import normpath
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

OR = " |OR| "
LONGEST = 20_000  # characters of a page that a judge gets to read


class Unknown(Exception):
    """The outcome of a rule cannot be had; says why."""


class ScriptError(Exception):
    """A page's JavaScript threw: the element is not there, say. That is an empty element, not a broken page."""


@dataclass(frozen=True)
class Score:
    value: float | None  # 1.0, 0.0, or None where it cannot be known
    reason: str


# ----------------------------------------------------------------------------------------------- text, the right way
SAME = str.maketrans("\u2018\u2019\u201b\u2032\u201c\u201d\u2033\u2010\u2011\u2012\u2013\u2212\u00a0",
                     "''''\"\"\"----- " + " ")[0:0] if False else str.maketrans(
    {**dict.fromkeys("\u2018\u2019\u201b\u2032", "'"), **dict.fromkeys("\u201c\u201d\u2033", '"'),
     **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"), "\u00a0": " ", "\u200b": ""})
WORD = re.compile(r"""
    (?P<opaque>\d+(?:[-/:.]\d+){2,}|\d{1,2}:\d\d(?!\d))       # a date, a time, a version: no number inside it counts
  | (?P<number>(?:(?<![\w.,-])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)
        (?=(?:[^\W\d_]+\d+)?[^\W\d_]+(?!\w)|(?!\w))           # alone, or with its unit: 914km, 3h30min, not 16x24
  | (?P<code>(?=\w*\d)[^\W_]+)                                # letters and digits in one: B0738JQG6Q, 1000xm3
  | (?P<word>[^\W\d_]+(?:'(?!s\b)[^\W\d_]+)*)                 # can't is one word, Teofila's is two
  | (?P<sign>[%&])
    """, re.X)


def tidy(text: str) -> str:
    """One spelling of what looks the same: quotes, dashes, white space, case, one pair of quotes around it all."""
    text = " ".join(unicodedata.normalize("NFC", text).translate(SAME).split()).casefold()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def words(text: str) -> list:
    """The words of a text, numbers as Decimals; punctuation, hyphens and currency signs carry no meaning here."""
    out = []
    for m in WORD.finditer(tidy(text)):
        if m.lastgroup == "number":
            out.append(Decimal(m[0].replace(",", "")))
        else:
            out.append("and" if m[0] == "&" else m[0])
    return out


def includes(reference: str, text: str, alone: bool = True) -> bool:
    """Whether the words of the reference stand in the text one after another. Numbers compare by value: 2 is in
    "2.0 km" and in "$2.00", not in "12", "2.5", a date or a product code. (webarena#144, #211, VWA#71)"""
    wanted, there = words(reference), words(text)
    if not wanted:  # "???", say
        return bool(tidy(reference)) and tidy(reference) in tidy(text)
    return any(there[i:i + len(wanted)] == wanted for i in range(len(there) - len(wanted) + 1))


def excludes(reference: str, text: str, alone: bool = True) -> bool:
    return not includes(reference, text)


def equals(reference: str, text: str, alone: bool = True) -> bool:
    """Equal but for case, white space, surrounding quotes, a full stop at the end, "748 m" or "748m", "20" or "20.00".
    A number that starts with 0, a postal code, is a string. (webarena#104, #134)"""
    a, b = (re.sub(r"(?<=\d) (?=[^\W\d_]+$)", "", re.sub(r"(?<=[^\W_])\.$", "", tidy(t))) for t in (reference, text))
    plain = r"-?(?:[1-9]\d*|0)(?:\.\d+)?"
    return a == b or bool(re.fullmatch(plain, a) and re.fullmatch(plain, b)) and Decimal(a) == Decimal(b)


def satisfies(inequality: str, text: str, alone: bool = True) -> bool:
    """`<= 700` and the like on the one number in the text."""
    numbers = [w for w in words(text) if isinstance(w, Decimal)]
    return len(numbers) == 1 and _compare(inequality, numbers[0], Decimal(0))


def _compare(inequality: str, value, tolerance) -> bool:
    m = re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*", inequality)
    if not m:
        raise Unknown(f"the required value {inequality!r} is no inequality")
    bound = type(value)(m[2]) if isinstance(value, Decimal) else float(m[2])
    return {"<=": value <= bound + tolerance, ">=": value >= bound - tolerance, "<": value < bound + tolerance,
            ">": value > bound - tolerance, "==": abs(value - bound) <= tolerance}[m[1]]


# -------------------------------------------------------------------------------------------- text, as published
def unquote_lower(text: str) -> str:
    """VisualAgentBench's cleaning, kept by ScaleCUA: one pair of quotes off, lower case, white space stays."""
    for mark in "'\"":
        if text.startswith(mark) and text.endswith(mark):
            return text[1:-1].lower()
    return text.lower()


def strip_unquote_lower(text: str) -> str:
    """WebArena's: white space off first."""
    return unquote_lower(text.strip())


ABBREVIATIONS = frozenset("a.m p.m u.s e.g i.e dr mr mrs ms st vs no co inc ltd jr sr ave mt ft jan feb aug sept oct nov "
                          "dec".split())


def tokens(text: str) -> list[str]:
    """nltk's `word_tokenize` on the lower-case English of answers, without nltk and its data (checked against it when
    this was written). Symbols and brackets stand alone; a comma or colon stays before a digit; a full stop is a token
    at the end of the text or of a sentence, and a sentence does not end after a number, an initial or an abbreviation.
    """
    def stop(m):
        stem, closing, last = m[1], m[2], not text[m.end():].strip()
        bare = re.split(r"[\s(\[{<\"`]", stem)[-1].rsplit("-", 1)[-1]
        ends = last or not (re.fullmatch(r"[-.,\d]+|[a-z]", bare) or bare in ABBREVIATIONS)
        return f"{stem} . {closing}" if ends and not stem.endswith(".") else m[0]
    spaced = re.sub(r"(\S+?)\.([\])}>\"'»”’]*)(?=\s|$)", stop, text)
    spaced = re.sub(r"\.{2,}|--|[;@#$%&?!*()\[\]{}<>«»“”‘’„\"`]|[:,](?!\d)", r" \g<0> ", spaced)
    spaced = re.sub(r"(?:(?<=\s)|^)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' ", spaced)
    spaced = re.sub(r"(?<=[^\s'])(n't|'(?:s|m|d|ll|re|ve)?)(?=\s|$)", r" \1", spaced)
    return re.sub(r"\bcan ?not\b", "can not", spaced).split()


def _published(clean, include, exclude=None) -> dict:
    """The rules that the published evaluators share, on cleaned texts."""
    def integer(inequality, text, alone):
        try:
            return _compare(inequality, int(text.strip().replace(",", "")), 1e-8)
        except ValueError:
            return False
    rules = {"exact_match": lambda ref, text, alone: ref == text, "must_include": include}
    if exclude:
        rules |= {"must_exclude": exclude, "one_of": lambda ref, text, alone: ref in text, "required_values": integer}
    return {name: lambda ref, text, alone, rule=rule: rule(clean(ref), clean(text), alone)
            for name, rule in rules.items()}


def _substring(ref, text, alone):
    return ref in text


def _one_character(ref, text, alone):
    """WebArena: only a single character as the only reference is looked up among the tokens."""
    return ref in tokens(text) if alone and len(ref) == 1 else ref in text


def _token(ref, text, alone, slashes=True):
    """VisualAgentBench: a reference of one token must be a token of the text, or a part of one between slashes."""
    if len(tokens(ref)) != 1:
        return ref in text
    found = tokens(text)
    return ref in found or slashes and any(ref in t.split("/") for t in found if "/" in t)


def _no_token(ref, text, alone):
    return not _token(ref, text, alone, slashes=False)


# --------------------------------------------------------------------------------------------------------- addresses
def same_place(url: str, references: list[str], note: str) -> bool:
    """Host, path and query against one of the references, whatever the scheme, the order of the query, letter case and
    escapes in the path. EXACT: equal. GOLD in PRED: the reference's path is the start of the path, cut at a slash, and
    its query is part of the query. A fragment counts where the reference has one. (webarena#25, PR#44, PR#77)"""
    def parts(u):
        p = urlsplit(u.strip())
        host = (p.hostname or "").replace("localhost", "127.0.0.1")
        port = p.port if p.port not in (None, {"http": 80, "https": 443}.get(p.scheme)) else None
        path = normpath("/" + unquote(p.path).lstrip("/")).rstrip("/").casefold()
        return (host, port), path, Counter(parse_qsl(p.query, keep_blank_values=True)), p.fragment
    place, path, query, fragment = parts(url)
    for reference in references:
        ref_place, ref_path, ref_query, ref_fragment = parts(reference)
        inside = path == ref_path or note != "EXACT" and path.startswith(ref_path + "/")
        asked = not ref_query - query and (note != "EXACT" or query == ref_query)
        if place == ref_place and inside and asked and ref_fragment in ("", fragment):
            return True
    return False


def _url_text(url: str, references: list[str], note: str) -> bool:
    """VisualAgentBench and ScaleCUA: plain strings, so that issues/7 is found in issues/71."""
    pred, *refs = (u.replace("localhost", "127.0.0.1").removesuffix("/") for u in (url, *references))
    return pred in refs if note == "EXACT" else any(ref in pred for ref in refs)


def _url_pooled(url: str, references: list[str], note: str) -> bool:
    """WebArena: some host and path within the page's; for every query key of any reference one of its values."""
    def parts(u):
        p = urlsplit(u.rstrip("/"))
        return (p.netloc + p.path).rstrip("/"), parse_qs(p.query)
    if note == "EXACT":
        raise Unknown("WebArena's evaluator has no rule EXACT")
    base, query = parts(url)
    pooled = {}
    refs = [parts(r) for r in references]
    for _, wanted in refs:
        for key, values in wanted.items():
            pooled.setdefault(key, set()).update(values)
    return any(ref in base for ref, _ in refs) and all(values & set(query.get(k, [])) for k, values in pooled.items())


# --------------------------------------------------------------------------------------------------- judge's verdicts
def _strict(kind: str, reply: str) -> bool | None:
    """The verdict must be the whole reply, but for quotes, stars and a full stop; None for anything else."""
    verdict = " ".join(reply.casefold().strip(" \t\r\n'\"`*._").split())
    return {"answer": {"correct": True, "incorrect": False, "partially correct": False},
            "reason": {"same": True, "different": False}}[kind].get(verdict)


def _loose(kind: str, reply: str) -> bool | None:
    """The published evaluators': the words anywhere in the reply."""
    reply = reply.lower()
    no, yes = {"answer": (("partially correct", "incorrect"), "correct"), "reason": (("different",), "same")}[kind]
    return False if any(w in reply for w in no) else True if yes in reply else None


def _loose_no(kind: str, reply: str) -> bool | None:
    """ScaleCUA: what is no verdict counts as incorrect."""
    verdict = _loose(kind, reply)
    return False if verdict is None and kind == "answer" else verdict


# ---------------------------------------------------------------------------------------------------------- profiles
EVERY = ("exact_match", "must_include", "must_exclude", "one_of", "required_values", "fuzzy_match")
HTML_RULES = ("exact_match", "must_include", "must_exclude", "required_values", "fuzzy_match")  # in published order


@dataclass(frozen=True)
class Profile:
    """How one evaluator scores; formats.md 4.1-4.5. A rule is a function (reference, text, alone) -> bool."""
    clean: Callable                  # what happens to the answer first
    rules: dict                      # the rules of string_match, and of program_html's contents
    url: Callable                    # (page's address, references, note) -> bool
    note: str                        # the url_match rule of a task that names none
    verdict: Callable                # (kind, judge's reply) -> bool, None where that is no verdict
    split: tuple = EVERY             # rules of string_match in which ` |OR| ` separates alternatives
    html_rules: tuple = HTML_RULES   # keys of required_contents that are known
    first_only: bool = True          # only the first of html_rules that a target has is looked at
    each: bool = False               # one judge call per fuzzy reference, not one for all
    asks_empty: bool = False         # an empty answer goes to the judge as well
    unescape: bool = False           # HTML entities in an element are read
    agents_page: bool = True         # targets navigate the agent's page, and a later `last` sees that one
    none_text: str = "None"          # what an element that is null reads as
    helpers: bool = True             # func: works
    crash: float | None = None       # the score where the evaluator breaks or the judge is away


_VAB = _published(unquote_lower, _token, _no_token)
PROFILES = {
    "fixed": Profile(
        clean=str.strip, url=same_place, note="EXACT", verdict=_strict, first_only=False, unescape=True,
        agents_page=False, none_text="", html_rules=EVERY,
        rules={"exact_match": equals, "must_include": includes, "must_exclude": excludes, "one_of": includes,
               "required_values": satisfies}),
    # must_exclude without its `not`, helpers that are not imported, errors that count as failures: ScaleCUA's faults
    "scalecua_v2": Profile(
        clean=unquote_lower, url=_url_text, note="EXACT", verdict=_loose_no, helpers=False, crash=0.0,
        split=("must_include", "required_values"), rules=_published(unquote_lower, _substring, _substring)),
    "vab": Profile(
        clean=unquote_lower, url=_url_text, note="EXACT", verdict=_loose, asks_empty=True,
        split=("must_include", "required_values"), rules=_VAB),
    "webarena": Profile(
        clean=strip_unquote_lower, url=_url_pooled, note="GOLD in PRED", verdict=_loose, each=True, unescape=True,
        split=(), html_rules=("exact_match", "must_include"), rules=_published(strip_unquote_lower, _one_character)),
}


# ----------------------------------------------------------------------------------------------------------- helpers
def reddit_get_post_url(browser, url: str) -> str:
    """The address of the post that a page under it belongs to."""
    p = urlsplit(url)
    parts = p.path.split("/")
    return f"{p.scheme}://{p.netloc}/f/{parts[2]}/{parts[3]}/" if len(parts) > 3 and parts[1] == "f" else url


def shopping_get_latest_order_url(browser) -> str | None:
    """The page of the newest order, None where there is none; its number is read as its id, as published."""
    query = "searchCriteria[sortOrders][0][field]=created_at&searchCriteria[sortOrders][0][direction]=DESC" \
            "&searchCriteria[pageSize]=1"
    items = (_rest(browser, f"/rest/V1/orders?{query}") or {}).get("items") or []
    return f"{browser.site('shopping')}/sales/order/view/order_id/{int(items[0]['increment_id'])}/" if items else None


def shopping_get_sku_latest_review_author(browser, sku: str) -> str:
    reviews = _rest(browser, f"/rest/V1/products/{quote(sku, safe='')}/reviews")
    return reviews[-1]["nickname"] if reviews else ""


def shopping_get_sku_latest_review_rating(browser, sku: str) -> str:
    """In percent: 5 stars are 100."""
    reviews = _rest(browser, f"/rest/V1/products/{quote(sku, safe='')}/reviews")
    return str(reviews[-1]["ratings"][0]["percent"]) if reviews else ""


def _rest(browser, path: str):
    """GET from the shop's REST interface, with its administrator's token."""
    shop = browser.site("shopping")
    user, password = browser.account("shopping_site_admin")
    token = browser.json(f"{shop}/rest/default/V1/integration/admin/token", {"username": user, "password": password})
    return browser.json(shop + path, token=token)


ROLES = """Object.fromEntries((([accounts, roles]) => accounts.map((a, i) => [a, roles[i] || '']))(
    ["td[data-label='Account'] span.gl-avatar-labeled-sublabel", "td.col-max-role span"].map(
        s => [...document.querySelectorAll(s)].map(e => e.outerText.trim()))))"""


def gitlab_get_project_memeber_role(browser, page, account: str) -> str:
    """The role beside @account in a project's table of members, "" where it is not there. (The name is theirs.)"""
    try:
        return (page.read(ROLES, ()) or {}).get(f"@{account}", "")
    except ScriptError:
        return ""


PAGE = object()
HELPERS = {f.__name__: (f, arguments) for f, arguments in (
    (reddit_get_post_url, (str,)), (shopping_get_latest_order_url, ()), (gitlab_get_project_memeber_role, (PAGE, str)),
    (shopping_get_sku_latest_review_author, (str,)), (shopping_get_sku_latest_review_rating, (str,)))}


def parse_helper(text: str) -> tuple[Callable, list]:
    """`func:name('literal', __page__)` -> the function and its arguments, PAGE for the page. Nothing is evaluated:
    Unknown for any other name, form, number or type of arguments."""
    try:
        call = ast.parse(text.removeprefix("func:").strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise Unknown(f"the helper call {text!r} cannot be read") from None
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
    if name not in HELPERS or call.keywords:
        raise Unknown(f"the helper call {text!r} is none of {', '.join(HELPERS)}")
    function, wanted = HELPERS[name]
    given = [PAGE if isinstance(a, ast.Name) and a.id == "__page__" else getattr(a, "value", None) for a in call.args]
    if len(given) != len(wanted) or not all(g is w or w is str and isinstance(g, str) for g, w in zip(given, wanted)):
        raise Unknown(f"the helper call {text!r} has other arguments than {name} takes")
    return function, given


def call_helper(text: str, page, browser):
    """The value of a helper; `__last_url__` in a literal is the page's address, put in after parsing."""
    function, arguments = parse_helper(text)
    return function(browser, *(page if a is PAGE else a.replace("__last_url__", page.url) for a in arguments))


# -------------------------------------------------------------------------------------------------------- evaluation
@dataclass
class Episode:
    """What is scored: the answer, the agent's last page, and the means to find out more."""
    rules: dict         # the task's `eval`, addresses filled in
    intent: str
    answer: str
    page: object        # the agent's; `evaluate` moves it along for profiles that navigate it
    browser: object
    judge: Callable
    profile: Profile


def evaluate(rules: dict, intent: str, answer: str, page, browser, judge, profile: Profile) -> Score:
    """The product over the task's eval_types. Rules that need the judge come last and are skipped once one failed."""
    e = Episode(rules, intent, profile.clean(answer), page, browser, judge, profile)
    unknown, held = [], 0
    checks = [c for kind in dict.fromkeys(rules["eval_types"]) for c in EVALUATORS.get(kind, _no_such)(e)]
    if not profile.agents_page:
        checks.sort(key=lambda check: check[0])
    for _, name, holds in checks:
        try:
            passed, seen = holds()
        except Unknown as u:
            if not isinstance(profile.crash, float) and not profile.agents_page:
                unknown.append(f"{name}: {u}")
                continue
            return Score(profile.crash, f"{name}: {u}")
        if not passed:
            return Score(0.0, f"{name} does not hold for {_short(seen)}")
        held += 1
    if unknown or not checks:
        return Score(profile.crash, "unknown: " + ("; ".join(unknown) or "the task has no evaluator"))
    return Score(1.0, f"all {held} checks hold")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _no_such(e: Episode) -> list:
    def fail():
        raise Unknown(f"eval_types {e.rules['eval_types']} are not all known")
    return [(0, "eval_types", fail)]


def string_match(e: Episode) -> list:
    """One check per rule of reference_answers, on the answer."""
    p = e.profile
    known = {k: v for k, v in (e.rules.get("reference_answers") or {}).items() if k == "fuzzy_match" or k in p.rules}
    return [_check(e, f"string_match {rule}", rule, value, p.split, lambda: e.answer) for rule, value in known.items()]


def url_match(e: Episode) -> list:
    """One check: the agent's address when the episode ended."""
    reference, url = e.rules.get("reference_url") or "", e.page.url
    note = e.rules.get("url_note") or e.profile.note

    def holds():
        if note not in ("EXACT", "GOLD in PRED"):
            raise Unknown(f"url_note {note!r} is not known")
        return e.profile.url(url, reference.split(OR), note), url
    return [(0, f"url_match {note} {reference}", holds)]


def program_html(e: Episode) -> list:
    """One check per target and rule: an element of a page, or the whole page."""
    p, checks = e.profile, []
    for i, target in enumerate(e.rules.get("program_html") or []):
        contents = target["required_contents"]
        rules = [r for r in p.html_rules if r in contents]
        element = _element(e, target)
        name = f"program_html {i + 1} ({target['url']} {target['locator'][:60]})"
        checks += [_check(e, f"{name} {rule}", rule, contents[rule], EVERY, element)
                   for rule in rules[:1 if p.first_only else None]]
        if not rules:
            checks.append((1, name, lambda c=contents: _unknown(f"required_contents {list(c)} are not known")))
    return checks


def _unknown(reason: str):
    raise Unknown(reason)


EVALUATORS = {"string_match": string_match, "url_match": url_match, "program_html": program_html}


def _check(e: Episode, name: str, rule: str, value, split: tuple, read: Callable) -> tuple:
    """(cost, name, function that says whether the rule holds and what it was applied to)."""
    wanted = value if isinstance(value, list) else [value]
    where = 1 if name.startswith("program_html") else 0
    if rule == "fuzzy_match":
        return 2, f"{name} {wanted}", lambda: _fuzzy(e, value, read())
    match = e.profile.rules[rule]

    def holds():
        text = read()
        one = (any(match(option, text, len(wanted) == 1) for option in (w.split(OR) if rule in split else [w]))
               for w in wanted)
        return (any if rule == "one_of" else all)(one), text
    return where, f"{name} {wanted}", holds


def _fuzzy(e: Episode, value, text: str) -> tuple[bool, str]:
    """A judge compares; "N/A" as reference asks for the reason in string_note where the answer is not N/A itself."""
    p = e.profile
    if value == "N/A" or value == ["N/A"] and not p.agents_page:
        if p.rules["exact_match"]("N/A", text, True):
            return True, text
        note = e.rules.get("string_note") or ""
        if not p.agents_page and not (note and text):
            return False, text
        return _ask(e, "reason", note, text), text
    if not text and not p.asks_empty:
        return False, text
    if isinstance(value, str) and p.agents_page:
        raise Unknown("fuzzy_match is not a list")
    wanted = [value] if isinstance(value, str) else value
    return all(_ask(e, "answer", reference, text) for reference in (wanted if p.each else [", ".join(wanted)])), text


def _ask(e: Episode, kind: str, reference: str, text: str) -> bool:
    reply = e.judge(kind, e.intent, reference, text[:LONGEST])
    verdict = e.profile.verdict(kind, reply)
    if verdict is None:
        raise Unknown(f"the judge's reply {_short(reply)} is no verdict")
    return verdict


def _element(e: Episode, target: dict) -> Callable:
    """A function that reads the target's element as text, once."""
    seen = []

    def read():
        if not seen:
            seen.append(_read_element(e, target))
        return seen[0]
    return read


def _read_element(e: Episode, target: dict) -> str:
    p, url, locator, page = e.profile, target["url"], target["locator"].strip(), e.page
    if url.startswith("func:") or locator.startswith("func:"):
        if not p.helpers:
            raise Unknown("the helper is not defined (ScaleCUA does not import it)")
    if url.startswith("func:"):
        url = call_helper(url, page, e.browser)
        if url is None:
            return ""
    if url != "last":
        page = e.browser.open(url)
        if p.agents_page:
            e.page = page
    if not locator:
        value = page.content()
        if page.missing and not p.agents_page:  # a 404 page repeats its address in its head
            value = re.sub(r"<(head|script|style)\b.*?</\1>|<[^>]*>", " ", value, flags=re.S | re.I)
    elif locator.startswith("func:"):
        value = call_helper(locator, page, e.browser)
    elif locator.startswith(("document.", "[...document.", "lambda:")):
        try:
            value = page.read(locator.removeprefix("lambda:").strip(), tuple(target.get("prep_actions") or ()))
        except ScriptError:
            value = ""
    else:
        raise Unknown(f"the locator {locator!r} has an unknown form")
    text = p.none_text if value is None else str(value)
    return html.unescape(text) if p.unescape else text


# -------------------------------------------------------------------------------------------------- before an episode
def problems(rules: dict) -> list[str]:
    """What is wrong with a task's `eval`, so that no episode is spent on a task that cannot be scored."""
    out, kinds = [], rules.get("eval_types") or []
    if not kinds:
        out.append("it has no evaluator")
    out += [f"the eval type {k!r} is not one of {', '.join(EVALUATORS)}" for k in kinds if k not in EVALUATORS]
    answers = rules.get("reference_answers") or {}
    if "string_match" in kinds:
        out += ["string_match without reference_answers"] if not answers else _rule_problems(answers)
    if "url_match" in kinds and not rules.get("reference_url"):
        out.append("url_match without reference_url")
    if rules.get("url_note") not in (None, "", "EXACT", "GOLD in PRED"):
        out.append(f"the url_note {rules['url_note']!r} is not known")
    targets = rules.get("program_html") or []
    if "program_html" in kinds and not targets:
        out.append("program_html without a target")
    for target in targets if "program_html" in kinds else ():
        out += _target_problems(target)
    return out


def _rule_problems(rules: dict) -> list[str]:
    out = [f"the rule {rule!r} is not one of {', '.join(EVERY)}" for rule in rules if rule not in EVERY]
    for rule, value in rules.items():
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(v, str) and v for v in values):
            out.append(f"{rule} needs texts to compare with")
    return out


def _target_problems(target: dict) -> list[str]:
    if not all(isinstance(target.get(k), t) for k, t in (("url", str), ("locator", str), ("required_contents", dict))):
        return ["a target of program_html lacks url, locator or required_contents"]
    locator = target["locator"].strip()
    out = _rule_problems(target["required_contents"]) if target["required_contents"] else ["a target without contents"]
    if locator and not locator.startswith(("document.", "[...document.", "lambda:", "func:")):
        out.append(f"the locator {locator!r} has an unknown form")
    for text in (target["url"], locator):
        if text.startswith("func:"):
            try:
                parse_helper(text)
            except Unknown as u:
                out.append(str(u))
    return out


def needs_judge(rules: dict) -> bool:
    """Whether a language model has to say whether an answer is right."""
    contents = [t.get("required_contents") or {} for t in rules.get("program_html") or []]
    return any("fuzzy_match" in c for c in (rules.get("reference_answers") or {}, *contents))
