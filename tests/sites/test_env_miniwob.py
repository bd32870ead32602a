"""MiniWoB++ pages in real Chromium: determinism, rewards, the protocol's corners, unknown names."""

import io
import threading
import urllib.request

import pytest
from PIL import Image

from runtime import UserError
from sites.miniwob import SEEDS_PER_SPLIT, SPLITS, MiniWob, check_page, html_root, make
from web.environment import RolloutConfig
from web.session import Session

PAGES = "choose-date-easy,grid-coordinate,use-spinner,click-tab"


@pytest.fixture(scope="module")
def env():
    environment = MiniWob(PAGES, instances=3)
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def session(env):
    s = Session(env, RolloutConfig())
    yield s
    s.stop()


def look(session, task):
    instruction = session.open(task)
    session.settle()
    return instruction, session.screenshot()


def test_same_seed_same_screenshot_and_instruction(env, session):
    for task in env.tasks("train"):
        assert look(session, task) == look(session, task)
    words = {look(session, env.task("click-tab", seed))[1] for seed in range(4)}
    assert len(words) > 1  # another seed, another page


@pytest.mark.parametrize("page", [*PAGES.split(","), "tic-tac-toe", "email-inbox", "social-media"])
def test_no_action_on_a_page_requests_anything(env, session, page):
    """That is what `quick` says."""
    look(session, env.task(page, 1))
    seen = []
    keep = lambda request: seen.append(request.url)
    session.context.on("request", keep)
    for y in range(55, 210, 12):
        session.page.mouse.click(20 + 37 * y % 120, y)
        session.settle()
    session.context.remove_listener("request", keep)
    assert not [url for url in seen if not url.startswith("data:")]


def test_splits_are_disjoint_and_take_the_pages_in_turn(env):
    tasks = env.tasks("eval")
    assert [t.site for t in tasks[:4]] == PAGES.split(",") and len(tasks) == 12
    seeds = {split: {t.seed for t in env.tasks(split)} for split in SPLITS}
    assert not seeds["train"] & seeds["eval"] and not seeds["train"] & seeds["demonstrations"]
    starts = sorted(SPLITS.values())
    assert all(b - a >= SEEDS_PER_SPLIT for a, b in zip(starts, starts[1:]))
    assert len({t.id for split in SPLITS for t in env.tasks(split)}) == 36


def test_reward_is_1_for_the_right_place_and_0_for_a_wrong_one(env, session):
    for point, reward in (("({0},{1})", 1.0), ("({1},{0})", 0.0)):
        task = env.task("grid-coordinate", 1)
        x, y = session.open(task).split("(")[1].rstrip(").").split(",")
        assert x != y and not env.done(session)
        session.page.locator(f"circle[id='{point.format(x, y)}']").click()
        assert env.done(session)
        assert env.judge(task, session, "").reward == reward


def test_an_unfinished_episode_has_reward_0(env, session):
    task = env.task("choose-date-easy", 5)
    session.open(task)
    session.page.click("#datepicker")
    assert not env.done(session)
    verdict = env.judge(task, session, "some answer")
    assert verdict.reward == 0.0 and "did not end" in verdict.reason


def test_nothing_starts_a_second_episode(env, session):
    task = env.task("grid-coordinate", 1)
    x, y = session.open(task).split("(")[1].rstrip(").").split(",")
    session.page.locator(f"circle[id='({y},{x})']").click()  # wrong
    session.page.mouse.click(80, 105)  # where MiniWoB++ offers its next episode
    assert env.done(session)
    session.page.locator(f"circle[id='({x},{y})']").click()  # right, but too late
    assert env.done(session) and env.judge(task, session, "").reward == 0.0


def test_the_page_has_no_time_limit(env, session):
    session.open(env.task("click-tab", 1))
    assert session.page.evaluate("core.EPISODE_MAX_TIME") == 2147483647  # more would overflow
    session.page.wait_for_timeout(50)
    assert not env.done(session)


def test_an_instruction_with_fields_and_one_beyond_ascii(env, session):
    assert "email" in session.open(env.task("email-inbox-forward-nl", 1))
    assert "Cancél" in session.open(env.task("unicode-test", 1))


def test_scale_changes_the_screenshot_but_not_the_page():
    other, pngs = MiniWob("grid-coordinate", scale=2), []

    def work():  # a thread of its own: Playwright allows one driver per thread
        session = Session(other, RolloutConfig())
        try:
            pngs.append(look(session, other.task("grid-coordinate", 1))[1])
        finally:
            session.stop()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    other.close()
    assert Image.open(io.BytesIO(pngs[0])).size == (320, 420) and (other.width, other.height) == (160, 210)


def test_unknown_names_are_errors_that_list_close_ones(env):
    with pytest.raises(UserError, match="choose-date-easy"):
        MiniWob("choose-date-eazy")
    with pytest.raises(UserError, match="demonstrations, train, eval"):
        env.tasks("test")
    with pytest.raises(UserError, match="scale"):
        MiniWob("click-tab", scale=0)
    with pytest.raises(UserError, match="a page"):
        make(RolloutConfig(env="miniwob", tasks=""))
    assert len(list((html_root() / "miniwob").glob("*.html"))) == 130
    for page in (html_root() / "miniwob").glob("*.html"):
        check_page(page.stem, html_root())


def test_it_listens_on_loopback_only_and_names_the_charset(env):
    assert env.origins(env.task("click-tab", 1)) == [env.base] and env.base.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{env.base}/miniwob/click-tab.html") as reply:
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
