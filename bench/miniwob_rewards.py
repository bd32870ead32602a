"""Does a wrong answer ever count as success on MiniWoB++? Every page, in real Chromium, by the rules of
miniwob_rewards.py, with answers that nobody has to think about.

    python bench/miniwob_rewards.py                  # 20 tasks of each page; the last line is one JSON object
    python bench/miniwob_rewards.py --pages hot-cold --seeds 3

Three answers are tried on the tasks of the split `eval`: nothing at all; pressing what submits at once, where
there is such a thing; and, on every page that has a rule of its own, the right answer without one of its
parts, or beside the mark (`wrong`). The last get the right answer as well, a pixel or two off where aim is
graded.

    idle_success              tasks that are a success without any action
    submit_success_unearned   tasks that submitting at once makes a success with less than the full raw reward
    submit_success_earned     ... with the full one, by page: the default state is what was asked for
    wrong_full_raw            wrong answers that the page itself pays in full: what the witnesses are for
    parts_success_unearned    wrong answers that are a success
    right_failed              right answers that are none, by page
    refused, thresholds       pages that cannot be judged; pages whose rule is less than the full reward
"""

import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runtime import launch
from sites.miniwob import MiniWob, html_root
from sites.miniwob_rewards import RULES, rule_of
from web.environment import RolloutConfig
from web.session import Session


@dataclass
class Config:
    seeds: int = 20  # tasks of each page
    pages: str = ""  # page names, with commas; "" for all
    threads: int = 2  # browsers


SUBMIT = """() => {
    const name = /^(submit|ok|okay|search|login|order!|go!|buy|agree|yes)$/i;
    const there = [...document.querySelectorAll('#area button, .ui-dialog button, .final, .ui-submit')];
    const found = there.filter(e => name.test(e.textContent.trim()) && e.getClientRects().length)[0];
    if (found) found.click();
    return Boolean(found); }"""

# ---------------------------------------------------------------------------------- right and wrong answers
# A page's answer as JavaScript, a function of whether it is to be the right one.
BOXES = """right => {
    const asked = document.querySelector('#query').textContent
        .match(/(?:Select words similar to|Select) (.*) and click/)[1].split(', ');
    const same = (a, b) => a === b || (window.SYNONYMS || []).some(s => s.includes(a) && s.includes(b));
    [...document.querySelectorAll('#area input[type=checkbox]')].forEach((box, i) => {
        const wanted = asked.some(word => same(word, box.parentElement.textContent));
        if (wanted !== (i === 0 && !right)) box.click(); });
    document.querySelector('#subbtn').click(); }"""
ITEM = """right => {
    const text = $('#query').text(), begin = text.match(/starts with "([^"]*)"/)[1];
    const end = (text.match(/ends with "([^"]*)"/) || ['', ''])[1];
    const item = ui_utils.COUNTRIES.find(name => name.startsWith(begin) && name.endsWith(end));
    $('#tags').val(right ? item : begin + 'zz' + end);
    $('#subbtn')[0].click(); }"""
COLOR = """right => {
    const field = document.querySelector('#col'), swatch = document.querySelector('.cc');
    const hex = swatch ? swatch.getAttribute('style').slice(-6)
        : ui_utils.colorNameToHex(document.querySelector('#query').textContent.split(' ')[1]).slice(1);
    const off = right ? [8, 8, 8] : [0, 128, 0];
    field.value = off.map((by, i) => {
        const channel = parseInt(hex.slice(2 * i, 2 * i + 2), 16);
        return (channel + (channel < 128 ? by : -by)).toString(16).padStart(2, '0'); }).join('');
    document.querySelector('#subbtn').click(); }"""
SCRIPTS = {
    "click-checkboxes": BOXES,
    "click-checkboxes-large": BOXES,
    "click-checkboxes-soft": BOXES,
    "click-checkboxes-transfer": BOXES,
    "use-autocomplete": ITEM,
    "use-autocomplete-nodelay": ITEM,
    "use-colorwheel": COLOR,
    "use-colorwheel-2": COLOR,
    "ascending-numbers": """right => {
        const press = e => e.dispatchEvent(new MouseEvent('click', {bubbles: true}));
        press([...document.querySelectorAll('svg text')].find(text => text.textContent === '1'));
        for (const n of right ? [2, 3, 4, 5] : [2, 3, 5])
            press(document.querySelector(`svg rect[data-index="${n}"]`)); }""",
    "odd-or-even": """right => {
        $('.row').each((i, row) => {
            const odd = Math.abs($('.display-number', row).text()) % 2 === 1;
            if (right || i) $(odd ? '.odd' : '.even', row).click(); });
        $('#submit').click(); }""",
    "find-greatest": """right => {
        const cards = [...document.querySelectorAll('.card')].sort((a, b) => b.textContent - a.textContent);
        cards[right ? 0 : 1].click();
        document.querySelector('#submit').click(); }""",
    "phone-book": """right => {
        const [, name, kind] = $('#query').text().match(/Find (.*) in the contact book .* their (\\w+)/);
        for (let n = 0; n < 5 && $('#contact .name').text() !== name; n++) $('#pagination .next a').click();
        const others = ['phone', 'email', 'address'].filter(other => other !== kind);
        $('#contact .' + (right ? kind : others[0])).click(); }""",
    "hot-cold": """right => {
        const at = (event, x, y) => $('#touch-area').trigger($.Event(event, {pageX: x, pageY: y}));
        for (let y = 50; y < 175; y += 3)
            for (let x = 0; x < 160; x += 3) {
                at('mousemove', x, y);
                if ($('#signal').text() === (right ? 'HOT' : 'WARM')) return void at('click', x, y); } }""",
    "button-delay": """right => {
        document.querySelector('#subbtn').click();
        currentTime -= 1000 * timeDelay * (right ? 1.05 : 1.3);
        document.querySelector('#subbtn2').click(); }""",
    "generate-number": """right => {
        const [, kind, limit] = $('#query').text().match(/(less|greater|odd|even)(?: than (\\d+))?/);
        const good = {less: n => n < limit, greater: n => n > limit, odd: n => n % 2, even: n => n % 2 === 0};
        const shown = () => $('#display-number').text();
        while (right && !(shown() !== '-' && good[kind](+shown()))) $('#generate').click();
        $('#submit').click(); }""",
    "form-sequence-2": """right => {
        const [, radio, number, box] = $('#query').text()
            .match(/the (\\d)\\w+ radio .* "(-?\\d+)" into the (\\d)/);
        $('input[type=radio]')[right ? radio - 1 : radio % 3].click();
        $('#input-' + box).val(number);
        $('#subbtn')[0].click(); }""",
    "daily-calendar": """right => {
        const [, length, unit, name, from] = $('#query').text()
            .match(/Create a ([\\d.]+) (hour|min)\\w* event named "(\\w+)", between (\\d+)/);
        const halves = unit === 'hour' ? 2 * length : length / 30;
        const start = {8: 16, 12: 24, 4: 32}[from] - (right ? 0 : halves);
        $('#hh-' + start).mousedown();
        $('#hh-' + (start + halves - 1)).mousemove();
        $('#newEvent').mouseup();
        $('#event-name').val(name);
        $('.create').click(); }""",
}


def spot(page, selector: str, n: int = 0) -> tuple[float, float]:
    """Centre of the n-th element, in page pixels."""
    box = page.locator(selector).nth(n).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def place(page, x: float, y: float) -> None:
    """Click there, then submit."""
    page.mouse.click(x, y)
    page.click("#subbtn")


def stroke(page, points) -> None:
    """A stroke through the points, then the button that submits."""
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point)
    page.mouse.up()
    page.click("#controls button")


AIM = 1.4  # px in both directions, 2 in all, to the side to which the page errs by itself


def circle_center(page, right: bool) -> None:
    x, y = spot(page, ".black-circle")
    radius = page.locator(".black-circle").bounding_box()["width"] / 2
    off = AIM if right else radius / 3
    place(page, x + off, y + off)


def find_midpoint(page, right: bool) -> None:
    (ax, ay), (bx, by) = (spot(page, ".black-circle", n) for n in (0, 1))
    off = AIM if right else 10
    place(page, (ax + bx) / 2 + off, (ay + by) / 2 + off)


def ray(page, corner: tuple, angle: float) -> tuple[float, float]:
    """The point in that direction as far from the corner as the drawing reaches, 60 px at most."""
    area, length = page.locator("#svg-grid").bounding_box(), 60.0
    while length > 1:
        x, y = corner[0] + length * math.cos(angle), corner[1] + length * math.sin(angle)
        if 1 < x < area["width"] - 1 and area["y"] + 1 < y < area["y"] + area["height"] - 1:
            break
        length -= 1
    return x, y


def right_angle(page, right: bool) -> None:
    corner, (x, y) = spot(page, "#init-blue"), spot(page, "#init-black")
    arm = math.atan2(y - corner[1], x - corner[0])
    ends = [ray(page, corner, arm + side * math.radians(92 if right else 115)) for side in (-1, 1)]
    place(page, *max(ends, key=lambda end: math.dist(end, corner)))


def bisect_angle(page, right: bool) -> None:
    corner = spot(page, ".init-blue")
    first, second = (math.atan2(y - corner[1], x - corner[0])
                     for x, y in (spot(page, ".init-black", n) for n in (0, 1)))
    between = (second - first + math.pi) % (2 * math.pi) - math.pi
    x, y = ray(page, corner, first + between * (0.5 if right else 0.25))
    place(page, x - 2, y - 2)  # the page draws its line that far off, which one sees and sets right


def draw_line(page, right: bool) -> None:
    x, y = spot(page, "#circ")
    off = 0 if right else 10
    if "horizontal" in page.locator("#query").inner_text():
        ends = [(x - 25, y + off), (x + 25, y + off)]
    else:
        ends = [(x + off, y - 25), (x + off, y + 25)]
    (ax, ay), (bx, by) = ends
    stroke(page, [(ax + (bx - ax) * k / 10, ay + (by - ay) * k / 10) for k in range(11)])


def draw_circle(page, right: bool) -> None:
    """A circle that wobbles by a pixel or two; the wrong one stops after 250 of 360 degrees."""
    x, y = spot(page, "#circ")
    turns = [(16 + k % 3, math.radians((360 if right else 250) * k / 40)) for k in range(41)]
    stroke(page, [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for radius, turn in turns])


def drag_shapes(page, right: bool) -> None:
    text = page.locator("#query").inner_text()
    asked = text.removeprefix("Drag all ").split()[0]
    tags = {"rectangles": "rect", "circles": "circle", "triangles": "polygon"}
    shapes = page.locator("svg circle, svg polygon, svg rect:not(#shape-container)")
    for n in range(shapes.count() if right else shapes.count() - 1):
        kind, color = shapes.nth(n).evaluate("e => [e.tagName, e.getAttribute('fill')]")
        left = kind == tags[asked] if asked in tags else color == asked
        page.mouse.move(*spot(page, "svg circle, svg polygon, svg rect:not(#shape-container)", n))
        page.mouse.down()
        page.mouse.move((22 if left else 104) + 7 * n, 75, steps=4)
        page.mouse.up()
    page.click("#subbtn")


def terminal(page, right: bool) -> None:
    """The wrong file is one that was put there: its name ends like the extension, without the dot."""
    files, kind = page.evaluate("() => [currentFiles, $('#query .bold').text()]")
    good = [f for f in files if (f.endswith(kind) if kind[0] == "." else "." not in f)]
    name = good[0] if right else f"x{kind[1:]}" if kind[0] == "." else "x.txt"
    page.evaluate("name => { if (!currentFiles.includes(name)) currentFiles.push(name); }", name)
    page.focus("#terminal-target")
    page.keyboard.type(f"rm {name}")
    page.keyboard.press("Enter")


# The ten seconds of these two are the page's own clock, which is wound on by hand.
CIRCLES = """kind => [...document.querySelectorAll(kind)]
    .map(e => [Number(e.getAttribute('cx')) + 2, Number(e.getAttribute('cy')) + 52])
    .find(([x, y]) => x > 4 && x < 156 && y > 54 && y < 208)"""


def chase_circle(page, right: bool) -> None:
    """Follow the circle; the wrong answer loses it half way."""
    for k in range(68):
        page.clock.run_for(150)
        page.mouse.move(*(page.evaluate(CIRCLES, "#circ") if right or k < 34 else (0, 0)))


def moving_items(page, right: bool) -> None:
    """Click a circle whenever one is in sight, all ten or all but one."""
    left = 10 if right else 9
    for _ in range(68):
        page.clock.run_for(150)
        at = page.evaluate(CIRCLES, ".item")
        if at and left:
            page.mouse.click(*at)
            left -= 1


TIMED = {"chase-circle": chase_circle, "moving-items": moving_items}
DRIVERS = {"circle-center": circle_center, "find-midpoint": find_midpoint, "right-angle": right_angle,
           "bisect-angle": bisect_angle, "draw-line": draw_line, "draw-circle": draw_circle,
           "drag-shapes-2": drag_shapes, "terminal": terminal, **TIMED}


def answer(page, name: str, right: bool) -> None:
    if name in SCRIPTS:
        page.evaluate(SCRIPTS[name], right)
    else:
        DRIVERS[name](page, right)


# ------------------------------------------------------------------------------------------------ the tries
def begin(env: MiniWob, session: Session, task) -> None:
    session.open(task)
    if task.site in TIMED:
        session.page.clock.install()
        env.open(task, session)
        session.page.clock.pause_at(session.page.evaluate("Date.now()") / 1000 + 1)
        # Session's style makes every move a transition of 1 ms, which ends in a frame that need not come here
        session.page.evaluate("document.adoptedStyleSheets = []")
        session.spoiled = True  # the next task gets a context whose clock is its own


def verdict(env: MiniWob, session: Session, task) -> tuple[bool, float]:
    """Whether it is a success, and the raw reward (0 where the page did not end the episode)."""
    judged = env.judge(task, session, "")
    return judged.reward == 1, env.leave(session)["raw_reward"] or 0.0


def tries(env: MiniWob, session: Session, task) -> dict[str, tuple[bool, float]]:
    """idle, submit, and where the page has a rule of its own: wrong, right."""
    page, found = task.site, {}
    begin(env, session, task)
    if page in TIMED:
        session.page.clock.run_for(10_500)
    found["idle"] = verdict(env, session, task)
    if session.page.evaluate(SUBMIT):
        found["submit"] = verdict(env, session, task)
    for name, right in (("wrong", False), ("right", True)) if page in RULES else ():
        begin(env, session, task)
        answer(session.page, page, right)
        found[name] = verdict(env, session, task)
    return found


def all_tries(env: MiniWob, tasks: list) -> list[tuple]:
    """(task, its tries) of the tasks, in a browser of their own."""
    session = Session(env, RolloutConfig())
    try:
        return [(task, tries(env, session, task)) for task in tasks]
    finally:
        session.stop()


def main(cfg: Config) -> None:
    start, pages = time.monotonic(), sorted(p.stem for p in (html_root() / "miniwob").glob("*.html"))
    chosen = cfg.pages.split(",") if cfg.pages else pages
    refused = [page for page in chosen if rule_of(page).least is None]
    env = MiniWob(",".join(page for page in chosen if page not in refused), instances=cfg.seeds)
    tasks = env.tasks("eval")
    with ThreadPoolExecutor(cfg.threads) as pool:
        parts = list(pool.map(partial(all_tries, env), [tasks[k::cfg.threads] for k in range(cfg.threads)]))
    env.close()
    counts, earned, failed = Counter(), Counter(), Counter()
    for task, found in sum(parts, []):
        for name, (success, raw) in found.items():
            full = raw >= 1 - 1e-9
            counts[name] += success
            counts["wrong_full"] += name == "wrong" and full
            if name == "submit" and success:
                counts["submit_unearned"] += not full
                earned[task.site] += full
            failed[task.site] += name == "right" and not success
            if success == (name == "right"):
                continue
            if name != "submit" or not full:
                print(f"{task.id} {name}: success {success}, raw reward {raw:.3f}", flush=True)
    print(json.dumps({
        "pages": len(chosen), "seeds": cfg.seeds, "idle_success": counts["idle"],
        "submit_success_unearned": counts["submit_unearned"],
        "submit_success_earned": dict(sorted((+earned).items())),
        "parts_success_unearned": counts["wrong"], "wrong_full_raw": counts["wrong_full"],
        "right_success": counts["right"], "right_failed": dict(+failed), "refused": refused,
        "thresholds": sum(rule_of(page).least not in (None, 1.0) for page in chosen),
        "minutes": round((time.monotonic() - start) / 60, 1)}))


if __name__ == "__main__":
    launch(main)
