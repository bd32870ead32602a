"""What counts as a match in WebArena's evaluators: texts, numbers, addresses, verdicts; profiles as tables.

`fixed`, the default, is meant to be right. `scalecua_v2`, `vab` and `webarena` match as the evaluators
published with WebArena-Lite-v2, VisualAgentBench and WebArena do, faults included; each fault is in its own
profile only. A rule is a function (reference, text, alone) -> bool; `alone`: the only reference of its list.

Known limits of `fixed`: numbers in words ("two") are not read; a right number beside a wrong one passes; the
minus of a grade (A-) is taken for a dash.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from posixpath import normpath
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from model.llm import read_verdict


class Unknown(Exception):
    """The outcome of a rule cannot be had (the judge is away, the annotation is faulty); says why."""


# ------------------------------------------------------------------------------------- texts, the right way
SAME = str.maketrans({**dict.fromkeys("\u2018\u2019\u201b\u2032", "'"), "\u200b": "",
                      **dict.fromkeys("\u201c\u201d\u2033", '"'),
                      **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-")})
WORD = re.compile(r"""
    (?P<opaque>\d+(?:[-/:.]\d+){2,}|\d{1,2}:\d\d(?!\d))     # date, time, version: no numbers inside
  | (?P<number>(?:(?<![\w.-])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+))
        (?=(?:[^\W\d_]+\d+)?[^\W\d_]+(?!\w)|(?!\w))         # alone, or with unit: 914km, 3h30min; not 16x24
  | (?P<unit>(?<=\d)[^\W\d_]+(?=\d))                        # the h of 3h30min
  | (?P<code>(?=[^\W_]*\d)[^\W_]+)                          # letters and digits in one: B0738JQG6Q, 1000xm3
  | (?P<initials>(?<![\w&])[^\W\d_]{1,2}&[^\W\d_]{1,2}(?![\w&]))         # R&D, AT&T
  | (?P<word>(?:(?<![^\s("'\[/,])\.)?                       # .NET, but no full stop before the next sentence
        [^\W\d_]+(?:'(?!s\b)[^\W\d_]+)*                     # can't is one word, Teofila's is two
        (?:\+\+|[+#](?!\w))?)                               # C++, C++17, C#, A+; not 1+2, page#part
  | (?P<sign>[%&])
    """, re.X)


def tidy(text: str) -> str:
    """One spelling of what looks the same: quotes, dashes, white space, case; no pair of quotes around it
    all."""
    text = " ".join(unicodedata.normalize("NFC", text).translate(SAME).split()).casefold()
    return text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def words(text: str) -> list:
    """The words of a text, numbers as Decimals. Punctuation, hyphens and currency signs carry no meaning, the
    signs of a name do."""
    return [Decimal(m[0].replace(",", "")) if m.lastgroup == "number" else "and" if m[0] == "&" else m[0]
            for m in WORD.finditer(tidy(text))]


def spelled_out(there: list) -> list:
    """R&D as three words."""
    return [part for w in there for part in (w.replace("&", " and ").split() if isinstance(w, str) else [w])]


def includes(reference: str, text: str, alone: bool = True) -> bool:
    """Whether the reference's words stand in the text one after another. Numbers compare by value: 2 is in
    "2.0 km" and in "$2.00", not in "12", "2.5", a date or a product code. (webarena#144, #211, VWA#71)"""
    wanted, there = words(reference), words(text)
    if "and" in spelled_out(wanted):  # R&D is "R and D", but holds no R and no D
        wanted, there = spelled_out(wanted), spelled_out(there)
    if not wanted:  # "???", say
        return bool(tidy(reference)) and tidy(reference) in tidy(text)
    return any(there[i:i + len(wanted)] == wanted for i in range(len(there) - len(wanted) + 1))


def excludes(reference: str, text: str, alone: bool = True) -> bool:
    return not includes(reference, text)


def equals(reference: str, text: str, alone: bool = True) -> bool:
    """Equal but for case, white space, quotes around it and a full stop at the end; "748 m" is "748m", and
    "20" is "20.00", but a number that starts with 0 is a code. (webarena#104, #134)"""
    a, b = (re.sub(r"(?<=\d) (?=[^\W\d_]+$)", "", re.sub(r"(?<=[^\W_]|[+#])\.$", "", tidy(t)))
            for t in (reference, text))
    plain = re.compile(r"-?(?:(?:[1-9]\d*|0)(?:\.\d+)?|\.\d+)")
    return a == b or bool(plain.fullmatch(a) and plain.fullmatch(b)) and Decimal(a) == Decimal(b)


def satisfies(inequality: str, text: str, alone: bool = True) -> bool:
    """`<= 700` and the like for the one number in the text."""
    numbers = [w for w in words(text) if isinstance(w, Decimal)]
    return len(numbers) == 1 and compare(inequality, numbers[0], Decimal(0))


def compare(inequality: str, value, tolerance) -> bool:
    """An inequality as a task file writes it; Unknown where it is none."""
    m = re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*", inequality)
    if not m:
        raise Unknown(f"the required value {inequality!r} is no inequality")
    distance = value - type(tolerance)(m[2])
    return {"<=": distance <= tolerance, ">=": distance >= -tolerance, "==": abs(distance) <= tolerance,
            "<": distance < tolerance, ">": distance > -tolerance}[m[1]]


# --------------------------------------------------------------------------------------- texts, as published
def unquoted_lower(text: str) -> str:
    """VisualAgentBench's cleaning, ScaleCUA's too: one pair of quotes off, lower case; white space stays."""
    for mark in "'\"":
        if text.startswith(mark) and text.endswith(mark):
            return text[1:-1].lower()
    return text.lower()


def stripped_unquoted_lower(text: str) -> str:
    """WebArena's: white space off first."""
    return unquoted_lower(text.strip())


ABBREVIATIONS = frozenset("a.m p.m u.s dr mr mrs ms st vs co inc ltd jr sr ave ft jan feb aug sept oct nov "
                          "dec n.c n.j n.y d.c pa ma".split())


def tokens(text: str) -> list[str]:
    """nltk's `word_tokenize` for lower-case English, without nltk and its data: whether a reference is a
    token of an answer was the same in 12,504 pairs made of the task files' references. Symbols and brackets
    stand alone; a comma or colon stays before a digit; a full stop is a token of its own at the end of the
    text or of a sentence, and no sentence ends at an initial, an abbreviation, or a number with a word behind
    it."""
    def stop(m):
        stem, closing, rest = m[1], m[2], text[m.end():].lstrip()
        bare = re.split(r"[\s()\[\]{}<\"`:;@*!?']", stem)[-1].rsplit("-", 1)[-1]
        inner = (re.fullmatch(r"[-.,\d]+", bare) and not closing and rest[:1].isalpha()
                 or len(bare) == 1 and bare.isalpha())
        ends = not rest or not (inner or bare in ABBREVIATIONS)
        return f"{stem} . {closing}" if ends and not stem.endswith(".") else m[0]
    spaced = re.sub(r"(?<!\S)(\S+?)\.([\])}>\"'»”’*]*)(?=\s|$)", stop, text)
    spaced = re.sub(r"\.{2,}|--|[;@#$%&?!*()\[\]{}<>«»“”‘’„\"`]|[:,](?!\d)", r" \g<0> ", spaced)
    spaced = re.sub(r"(?:(?<=\s)|^)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' ", spaced)
    spaced = re.sub(r"(?<=[^\s'])(n't|'(?:s|m|d|ll|re|ve)?)(?=\s|$)", r" \1", spaced)
    return re.sub(r"\bcan ?not\b", "can not", spaced).split()


def substring(ref: str, text: str, alone: bool) -> bool:
    return ref in text


def one_character(ref: str, text: str, alone: bool) -> bool:
    """WebArena: only a single character that is the only reference is looked up among the tokens."""
    return ref in tokens(text) if alone and len(ref) == 1 else ref in text


def token(ref: str, text: str, alone: bool) -> bool:
    """VisualAgentBench: a reference of one token must be a token of the text, or a part of one between
    slashes."""
    return whole_token(ref, text, alone) or len(tokens(ref)) == 1 and any(
        ref in t.split("/") for t in tokens(text) if "/" in t)


def whole_token(ref: str, text: str, alone: bool) -> bool:
    return ref in tokens(text) if len(tokens(ref)) == 1 else ref in text


def no_token(ref: str, text: str, alone: bool) -> bool:
    return not whole_token(ref, text, alone)


def integer(inequality: str, text: str, alone: bool) -> bool:
    try:
        return compare(inequality, int(text.strip().replace(",", "")), 1e-8)
    except ValueError:
        return False


def on_clean(clean: Callable, **rules: Callable) -> dict:
    """The rules, with both sides cleaned first as the published evaluators do."""
    return {name: lambda ref, text, alone, rule=rule: rule(clean(ref), clean(text), alone)
            for name, rule in rules.items()}


def same(ref: str, text: str, alone: bool) -> bool:
    return ref == text


# ------------------------------------------------------------------------------------------------- addresses
def same_place(url: str, references: list[str], note: str) -> bool:
    """Host, path and query against each reference, whatever the scheme, the order of the query, and case and
    escapes in the path. EXACT: equal. GOLD in PRED: the reference's path is the start of the path, cut at a
    slash, and its query is part of the query. A fragment or a host counts where the reference has one (one of
    ScaleCUA's has lost it). (webarena#25, PR#44, PR#77)"""
    def parts(u):
        p = urlsplit(u.strip())
        host = (p.hostname or "").replace("localhost", "127.0.0.1")
        port = p.port if p.port != {"http": 80, "https": 443}.get(p.scheme) else None
        path = normpath("/" + unquote(p.path).lstrip("/")).rstrip("/").casefold()
        return (host, port), path, Counter(parse_qsl(p.query, keep_blank_values=True)), p.fragment
    place, path, query, fragment = parts(url)
    for reference in references:
        ref_place, ref_path, ref_query, ref_fragment = parts(reference)
        inside = path == ref_path or note != "EXACT" and path.startswith(ref_path + "/")
        asked = query == ref_query or note != "EXACT" and not ref_query - query
        if ref_place in (place, ("", None)) and inside and asked and ref_fragment in ("", fragment):
            return True
    return False


def url_text(url: str, references: list[str], note: str) -> bool:
    """VisualAgentBench and ScaleCUA: plain strings, so that issues/7 is found in issues/71."""
    pred, *refs = (u.replace("localhost", "127.0.0.1").removesuffix("/") for u in (url, *references))
    return pred in refs if note == "EXACT" else any(ref in pred for ref in refs)


def url_pooled(url: str, references: list[str], note: str) -> bool:
    """WebArena: some host and path within the page's; for every query key of any reference one of its values.
    """
    def parts(u):
        p = urlsplit(u.rstrip("/"))
        return p.netloc + p.path, parse_qs(p.query)
    if note == "EXACT":
        raise Unknown("WebArena's evaluator has no rule EXACT")
    base, query = parts(url)
    refs, pooled = [parts(r) for r in references], {}
    for key, values in (item for _, wanted in refs for item in wanted.items()):
        pooled.setdefault(key, set()).update(values)
    return any(ref in base for ref, _ in refs) and all(v & set(query.get(k, [])) for k, v in pooled.items())


# -------------------------------------------------------------------------------------------------- verdicts
def strict(kind: str, reply: str) -> bool | None:
    """The judge's verdict alone on its line; None for anything else (PR#272, PR#176)."""
    return read_verdict(reply) if kind == "answer" else read_verdict(reply, "same", "different", ())


def anywhere(kind: str, reply: str) -> bool | None:
    """The published evaluators': the word anywhere in the reply."""
    no, yes = {"answer": ("incorrect", "correct"), "reason": ("different", "same")}[kind]
    reply = reply.lower()
    if no in reply or kind == "answer" and "partially correct" in reply:
        return False
    return True if yes in reply else None


# -------------------------------------------------------------------------------------------------- profiles
RULES = ("exact_match", "must_include", "must_exclude", "one_of", "required_values", "fuzzy_match")
NO_ONE_OF = ("exact_match", "must_include", "must_exclude", "required_values", "fuzzy_match")


@dataclass(frozen=True)
class Profile:
    """How one evaluator scores."""
    clean: Callable                  # str -> str, what happens to the answer first
    rules: dict                      # the rules of string_match and of program_html's required_contents
    url: Callable                    # (page's address, references, note) -> bool
    note: str                        # url_match's rule where a task names none
    verdict: Callable                # (kind, the judge's reply) -> bool, None where it is no verdict
    split: tuple = ("must_include", "required_values")  # string_match's rules where ` |OR| ` has alternatives
    html_rules: tuple = NO_ONE_OF    # the keys of required_contents that are known, in the order of looking
    first_only: bool = True          # only the first such key of a target is looked at
    each: bool = False               # one judge call per fuzzy reference, not one for all of them
    asks_empty: bool = False         # an empty answer goes to the judge as well
    unescape: bool = False           # HTML entities in what a target shows are read
    agents_page: bool = True         # targets navigate the agent's page, and a later `last` sees that one
    locators: tuple = ("document.", "[...document.", "lambda:")    # beside an empty one and func:
    none_text: str = "None"          # what an element that is null reads as
    helpers: bool = True             # `func:` works
    crash: float | None = None       # the score where the evaluator breaks or the judge is away


PROFILES = {
    "fixed": Profile(
        clean=str.strip, url=same_place, note="EXACT", verdict=strict, split=RULES, html_rules=RULES,
        first_only=False, unescape=True, agents_page=False, none_text="",
        rules={"exact_match": equals, "must_include": includes, "must_exclude": excludes, "one_of": includes,
               "required_values": satisfies}),
    # ScaleCUA's faults: must_exclude lost its `not`, helpers are not imported, an error is a failure
    "scalecua_v2": Profile(
        clean=unquoted_lower, url=url_text, note="EXACT", verdict=anywhere, helpers=False, crash=0.0,
        rules=on_clean(unquoted_lower, exact_match=same, must_include=substring, must_exclude=substring,
                       one_of=substring, required_values=integer)),
    "vab": Profile(
        clean=unquoted_lower, url=url_text, note="EXACT", verdict=anywhere, asks_empty=True,
        rules=on_clean(unquoted_lower, exact_match=same, must_include=token, must_exclude=no_token,
                       one_of=substring, required_values=integer)),
    "webarena": Profile(
        clean=stripped_unquoted_lower, url=url_pooled, note="GOLD in PRED", verdict=anywhere, split=(),
        each=True, asks_empty=True, unescape=True, html_rules=("exact_match", "must_include"),
        locators=("document.", "[...document."),
        rules=on_clean(stripped_unquoted_lower, exact_match=same, must_include=one_character)),
}
