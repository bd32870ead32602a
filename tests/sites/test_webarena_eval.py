"""score.py and rules.py: the golden table, helpers that are parsed and never run, faulty
tasks.
"""

import json
import time
from decimal import Decimal
from pathlib import Path

import pytest

from sites.webarena.rules import PROFILES, Unknown, equals, includes, tokens, words
from sites.webarena.score import (
    ROLES,
    ScriptError,
    call_helper,
    evaluate,
    needs_judge,
    parse_helper,
    problems,
)
from tests import golden_evaluators as golden

DATA = Path(__file__).parents[3] / "shared" / "data"
SIGN = {1.0: "1", 0.0: "0", None: "?"}


class FakePage:
    def __init__(self, url, content="", values=None, missing=False, roles=None, down=False):
        self.url, self.missing, self._content = url, missing, content
        self.values = (values or {}) | ({ROLES: roles} if roles else {})

    def content(self):
        return self._content

    def read(self, expression, prep_actions):
        if expression not in self.values:
            raise ScriptError("TypeError: null")
        return self.values[expression]


class FakeBrowser:
    def __init__(self, pages):
        self.pages, self.opened = pages, []

    def open(self, url):
        self.opened.append(url)
        if self.pages.get(url, {}).get("down"):
            raise Unknown("the site answers 503")
        return FakePage(url, **self.pages.get(url, {"missing": True, "content": "404"}))

    def site(self, name):
        return "http://s:1"

    def account(self, name):
        return "admin", "secret"

    def json(self, url, body=None, token=""):
        path = url.removeprefix("http://s:1")
        if path.endswith("/token"):
            return "t0ken" if body == {"username": "admin", "password": "secret"} else None
        assert token == "t0ken"
        if path.startswith("/rest/V1/orders?searchCriteria"):
            return {"items": [{"increment_id": "000000171"}]}
        assert path == "/rest/V1/products/B1/reviews"
        return [{"nickname": n, "ratings": [{"rating_name": "Rating", "percent": p}]}
                for n, p in (("Ann", 60), ("Emma Lopez", 100))]


def run(rules, answer="", url=golden.HOME, pages=None, reply="no judge was expected"):
    """One sign per profile."""
    pages = pages or {}
    rules = {"reference_answers": {}, "reference_url": "", "program_html": [], "string_note": ""} | rules
    out = ""
    for name in golden.ORDER:
        def judge(kind, question, reference, said):
            if reply is None:
                raise Unknown("the judge is away")
            return reply
        page = FakePage(url, **{k: v for k, v in pages.get(url, {}).items() if k != "down"})
        out += SIGN[evaluate(rules, "the intent", answer, page, FakeBrowser(pages), judge,
                             PROFILES[name]).value]
    return out


@pytest.mark.parametrize("reference, answer, want, why", golden.STRINGS)
def test_string_match(reference, answer, want, why):
    assert run({"eval_types": ["string_match"], "reference_answers": reference}, answer) == want, why


@pytest.mark.parametrize("reference, note, url, want, why", golden.URLS)
def test_url_match(reference, note, url, want, why):
    rules = {"eval_types": ["url_match"], "reference_url": reference} | ({"url_note": note} if note else {})
    assert run(rules, url=url) == want, why


@pytest.mark.parametrize("targets, pages, want, why", golden.PAGES)
def test_program_html(targets, pages, want, why):
    url = "http://s:1/f/nyc/3/title" if "reddit" in targets[0]["url"] else golden.HOME
    assert run({"eval_types": ["program_html"], "program_html": targets}, url=url, pages=pages) == want, why


@pytest.mark.parametrize("rules, note, answer, reply, want, why", golden.JUDGED)
def test_judged(rules, note, answer, reply, want, why):
    kind = {"eval_types": ["string_match"], "reference_answers": rules} if isinstance(rules, dict) else \
        {"eval_types": ["program_html"], "program_html": rules}
    pages = {golden.HOME: {"values": {golden.E: "please refund, it broke"}}}
    assert run(kind | {"string_note": note}, answer, pages=pages, reply=reply) == want, why


def test_the_golden_table_is_large_enough():
    assert sum(len(t) for t in (golden.STRINGS, golden.URLS, golden.PAGES, golden.JUDGED)) >= 120


def test_the_product_over_eval_types_each_once():
    rules = {"eval_types": ["url_match", "string_match", "url_match"], "reference_url": "http://s:1/a",
             "reference_answers": {"exact_match": "Yes"}, "url_note": golden.G}
    assert run(rules, "Yes", "http://s:1/a") == "1111"
    assert run(rules, "Yes", "http://s:1/b") == "0000"
    assert run(rules, "No", "http://s:1/a") == "0000"


def test_the_judge_is_asked_last_and_once_for_joined_references():
    asked = []

    def judge(kind, question, reference, answer):
        asked.append((kind, question, reference, answer))
        return "correct"
    rules = {"eval_types": ["string_match", "url_match"], "reference_answers": {"fuzzy_match": ["a", "b"]},
             "reference_url": "http://s:1/a", "program_html": []}
    page, browser = FakePage("http://s:1/elsewhere"), FakeBrowser({})
    assert evaluate(rules, "q", "both", page, browser, judge, PROFILES["fixed"]).value == 0 and not asked
    page.url = "http://s:1/a"
    assert evaluate(rules, "q", "both", page, browser, judge, PROFILES["fixed"]).value == 1
    assert asked == [("answer", "q", "a, b", "both")]
    evaluate(rules, "q", "both", page, browser, judge, PROFILES["webarena"])
    assert [reference for _, _, reference, _ in asked[1:]] == ["a", "b"]


def test_an_unknown_outcome_says_why():
    rules = {"eval_types": ["program_html"], "program_html": [golden.target(golden.OTHER, "",
                                                                            must_include=["x"])]}
    score = evaluate(rules, "", "", FakePage("u"), FakeBrowser({golden.OTHER: {"down": True}}), None,
                     PROFILES["fixed"])
    assert score.value is None and "503" in score.reason
    score = evaluate({"eval_types": ["looks_nice"]}, "", "", FakePage("u"), FakeBrowser({}), None,
                     PROFILES["fixed"])
    assert score.value is None and "looks_nice" in score.reason


@pytest.mark.parametrize("text", [
    "func:__import__('os').system('true')", "func:reddit_get_post_url(open('/etc/passwd'))", "func:eval('1')",
    "func:reddit_get_post_url()", "func:reddit_get_post_url('a', 'b')", "func:reddit_get_post_url(url='a')",
    "func:shopping_get_latest_order_url(shop='http://elsewhere')",
    "func:reddit_get_post_url(f'{1}')", "func:reddit_get_post_url(7)", "func:shopping_get_latest_order_url",
    "func:gitlab_get_project_memeber_role('p', 'a')", "func:gitlab_get_project_memeber_role(page, 'a')",
    "func:reddit_get_post_url('a'", "func:(lambda: 0)()", "func:"])
def test_helper_calls_outside_the_whitelist_are_refused(text):
    with pytest.raises(Unknown):
        parse_helper(text)


def test_an_address_with_quotes_cannot_change_a_helper_call():
    page = FakePage("http://s:1/f/a/1/x'), __import__('os')")
    assert call_helper("func:reddit_get_post_url('__last_url__')", page, None) == "http://s:1/f/a/1/"


def test_a_helper_that_meets_another_reply_is_unknown():
    browser = FakeBrowser({})
    browser.json = lambda *args, **kwargs: "token" if kwargs.get("token") is None else []
    with pytest.raises(Unknown, match="another form"):
        call_helper("func:shopping_get_latest_order_url()", FakePage("u"), browser)


@pytest.mark.parametrize("rules, problem", [
    ({}, "no evaluator"), ({"eval_types": []}, "no evaluator"), ({"eval_types": ["vqa"]},
                                                                 "'vqa' is not one of"),
    ({"eval_types": ["string_match"]}, "reference_answers has no rule"),
    ({"eval_types": ["string_match"], "reference_answers": {"looks_like": "x"}}, "'looks_like'"),
    ({"eval_types": ["string_match"], "reference_answers": {"must_include": []}}, "nothing to compare"),
    ({"eval_types": ["url_match"], "reference_url": ""}, "without reference_url"),
    ({"eval_types": ["url_match"], "reference_url": "u", "url_note": "ROUGHLY"}, "'ROUGHLY'"),
    ({"eval_types": ["program_html"]}, "without a target"),
    ({"eval_types": ["program_html"], "program_html": [{"url": "last"}]}, "lacks url or locator"),
    ({"eval_types": ["program_html"], "program_html": [golden.target("last", "//a", exact_match="a")]},
     "unknown form"),
    ({"eval_types": ["program_html"], "program_html": [golden.target("func:get()", "", exact_match="a")]},
     "none of"),
    ({"eval_types": ["program_html"], "program_html": [golden.target("last", "")]},
     "required_contents has no rule"),
])
def test_faulty_tasks_are_found_before_an_episode(rules, problem):
    assert any(problem in p for p in problems(rules)), problems(rules)


def test_words_of_numbers_units_codes_and_dates():
    assert words("914km, 3h30min") == [Decimal(914), "km", Decimal(3), "h", Decimal(30), "min"]
    assert words("B0738JQG6Q 16x24 2023-05-31 10:30 1.2.3") == ["b0738jqg6q", "16x24", "2023-05-31", "10:30",
                                                                "1.2.3"]
    assert words("$1,234.50 (-2) 3-5 40.4,-79.9") == [Decimal(n) for n in "1234.50 -2 3 5 40.4 -79.9".split()]
    assert words("can't Teofila\u2019s 65% Alpha&B") == ["can't", "teofila", "s", Decimal(65), "%", "alpha",
                                                        "and", "b"]


def test_words_keep_the_signs_of_names_and_no_others():
    assert words("C, C++, C++17, C#/F#. .NET (.NET) A+ R&D AT&T O'Neil's") == [
        "c", "c++", "c++", Decimal(17), "c#", "f#", ".net", ".net", "a+", "r&d", "at&t", "o'neil", "s"]
    assert words("it ends.Then ...so; page#part #7 1+2 a+b x & y Alpha&B") == [
        *"it ends then so page part".split(), Decimal(7), Decimal(1), Decimal(2), *"a b x and y".split(),
        "alpha", "and", "b"]
    assert words(".5 -.5 $.50 No.5 1.5 v.5 ..5") == [Decimal(n) for n in ".5 -.5 .50".split()] + [
        "no", Decimal(5), Decimal("1.5"), "v", Decimal(5), Decimal(5)]


def test_tokens_are_nltks():
    """Recorded from nltk 3.10's word_tokenize with its English sentence model."""
    for text, expected in {
            "12 reviews, 3/5 ($2.50). done.": ["12", "reviews", ",", "3/5", "(", "$", "2.50", ")", ".",
                                               "done", "."],
            "there are 2. see below.": ["there", "are", "2.", "see", "below", "."],
            "it's 5, not 15; can't be 1,234.": ["it", "'s", "5", ",", "not", "15", ";", "ca", "n't", "be",
                                                "1,234", "."],
            "dr. who at 10:30 a.m. left": ["dr.", "who", "at", "10:30", "a.m.", "left"],
            "cannot open http://x/a?b=1": ["can", "not", "open", "http", ":", "//x/a", "?", "b=1"],
            "50% off... really?": ["50", "%", "off", "...", "really", "?"]}.items():
        assert tokens(text) == expected


@pytest.mark.parametrize("part", ["a", "a1", "_a", "1,", "a.", ".", "'", "n't", "<b>x.</b> "])
def test_a_long_page_takes_seconds_whatever_is_in_it(part):
    page, start = part * (300_000 // len(part)), time.monotonic()
    words(page)
    tokens(page)
    assert time.monotonic() - start < 20


@pytest.mark.skipif(not DATA.exists(), reason="the real task files in ../shared/data are not here")
def test_every_real_reference_includes_itself_and_no_number_includes_a_longer_one():
    tasks = json.loads((DATA / "webarena/test.raw.json").read_text()) + json.loads(
        (DATA / "scalecua/webarena_lite_v2/test.raw.json").read_text())
    references = {r for t in tasks for r in (t["eval"]["reference_answers"] or {}).get("must_include", [])}
    assert len(references) > 300
    for reference in references:
        assert includes(reference, f"The answer is {reference}, I think.")
        if reference.isdigit():
            assert not includes(reference, f"1{reference}") and not includes(reference, f"{reference}7.5")


def references(thing) -> set[str]:
    """Every reference text of every rule anywhere in a JSON value."""
    if isinstance(thing, list):
        return set().union(*map(references, thing))
    if not isinstance(thing, dict):
        return set()
    found = [thing.get(rule) or [] for rule in ("must_include", "must_exclude", "one_of", "exact_match")]
    texts = [text for texts in found for text in ([texts] if isinstance(texts, str) else texts)]
    return {part for text in texts for part in text.split(" |OR| ")}.union(*map(references, thing.values()))


@pytest.mark.skipif(not DATA.exists(), reason="the real task files in ../shared/data are not here")
def test_every_reference_of_every_real_task_file_matches_itself():
    files = sorted(DATA.rglob("*.raw.json"))
    texts = set().union(*(references(json.loads(file.read_text())) for file in files))
    assert len(files) >= 6 and len(texts) > 800
    for text in texts:
        assert includes(text, text) and includes(text, f"It is {text}, I think.") and equals(text, text), text


@pytest.mark.skipif(not DATA.exists(), reason="the real task files in ../shared/data are not here")
def test_the_judge_is_needed_where_the_paper_trail_says():
    tasks = json.loads((DATA / "scalecua/webarena_lite_v2/test.raw.json").read_text())
    judged = [t["task_id"] for t in tasks if needs_judge(t["eval"])]
    assert len(judged) == 43 and judged[:5] == [3, 5, 6, 7, 10] and judged[-1] == 151
