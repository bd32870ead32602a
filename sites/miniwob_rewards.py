"""When an episode on a MiniWoB++ page is a success: the rule of each page, as data, and why.

Most of the 130 pages pay a raw reward of 1 for the right answer and a negative one for any other; there a
success is the full reward. The table below names every page that also pays something in between, or pays in
full for an answer that its own instruction calls wrong. All of them pay 1 at most. The raw reward is the one
before MiniWoB++'s discount for time. Kinds of pages, in the order of the table:

    parts     adds up parts of the answer: only the full reward is a success
    bands     pays less the further off, in steps: the nearest step, which is the page's own tolerance
    distance  pays less the further off, without steps: what a person reaches who takes care, which is
              a pixel or two of aim, or what the eye can tell
    witness   pays in full for some wrong answers: `witness` must hold as well when the page ends the episode
    never     cannot be judged

Errors of a page that cost a right answer its reward are left as they are: `terminal` does not accept
"shark.sh" for the extension .sh, for it looks for the first "sh" of a name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """The least raw reward of a success, the kind of page, the reason, and a JavaScript expression that must
    be true at the moment in which the page ends the episode."""
    least: float | None
    kind: str
    why: str
    witness: str = ""


FULL = Rule(1.0, "full", "pays 1 for the right answer and a negative reward for any other")

BOXES = "pays (right boxes - wrong boxes) / boxes: to submit nothing earns up to 0.67 where few are asked for"
NOT_IN_THE_LIST = Rule(
    1.0, "witness", "takes any text with the right beginning and end; an item is one of the list",
    "ui_utils.COUNTRIES.includes($('#tags').val().trim())")
COLOR = ("pays 1 - mean difference of the channels, two thirds for a colour at random; 0.95 is one pixel off "
         "in each of the picker's three fields; gold for yellow, the nearest names, pays 0.948")

RULES = {
    # ------------------------------------------------------------------------------------------------- parts
    "click-checkboxes": Rule(1.0, "parts", BOXES),
    "click-checkboxes-large": Rule(1.0, "parts", BOXES),
    "click-checkboxes-soft": Rule(1.0, "parts", BOXES),
    "click-checkboxes-transfer": Rule(1.0, "parts", BOXES),
    "ascending-numbers": Rule(1.0, "parts", "pays 0.2 for each number found before the first wrong click"),
    "odd-or-even": Rule(1.0, "parts", "pays 1/3 for each number marked right, -1/3 for any other"),
    "drag-shapes-2": Rule(1.0, "parts", "pays 0.26 for each of five shapes in its box, -0.2 for any other"),
    "find-greatest": Rule(1.0, "parts", "pays 0.1 for a card that is not the greatest"),
    "phone-book": Rule(1.0, "parts", "pays 0.4 for another detail of the right person"),
    "moving-items": Rule(
        0.85, "parts", "pays 0.2 for each of ten circles from -1 up, -0.05 for each click beside: 0.85 is "
        "all ten with three misses, nine without any are 0.8"),
    # ------------------------------------------------------------------------------------------------- bands
    "hot-cold": Rule(1.0, "bands", "pays 0.5 for WARM (10 px) and 0.25 for COLD (40 px); HOT is 5 px"),
    "button-delay": Rule(1.0, "bands", "pays 0.6 and 0.35 for a wait that is 40 and 65 % off; 1 up to 15 %"),
    "draw-line": Rule(
        0.95, "bands", "pays 0.8 for direction and length and 0.2 for the dot: 0.95 is the former in full "
        "and a point of the stroke within 10 px of the page's mark, which is 6 px beside the dot it shows"),
    "draw-circle": Rule(
        0.9, "bands", "pays 1, 0.9, 0.7 ... for a distance from the dot that varies by 2, 4, 7 px: 4 px is a "
        "steady hand; it pays the same for a short straight stroke far away, so no quarter may be missing",
        "((points, dot) => { const turns = points.map(([x, y]) => Math.atan2(y - dot.y - 4, x - dot.x - 4))"
        ".sort((a, b) => a - b); return turns.every((turn, i) => "
        "(turns[i + 1] ?? turns[0] + 2 * Math.PI) - turn < Math.PI / 2); })"
        "(arrayPoints, d3.select('#circ').node().getBBox())"),
    # ---------------------------------------------------------------------------------------------- distance
    "circle-center": Rule(
        0.8, "distance", "pays 1 - distance / radius (25 to 39 px): 0.8 is 5 px in the smallest circle, of "
        "which 2 are of aim and 2 the page's, which puts its dot below and right of the mouse"),
    "find-midpoint": Rule(
        0.8, "distance", "pays 1 - distance / 30 px: 0.8 is 6 px, of which 2 are of aim and 3 the page's"),
    "right-angle": Rule(
        0.91, "distance", "pays 1 - error / 90 degrees: 0.91 is 8 degrees, of which 2 px of aim on an arm of "
        "40 px are 3 and the 3 px by which the page misses the mouse 5"),
    "bisect-angle": Rule(
        0.8, "distance", "pays 1 - error / half the angle: 0.8 is 6 degrees of 60, of which 2 px of aim on "
        "an arm of 60 px are 2 and the page's miss 3; a narrow angle takes a second look at the line"),
    "use-colorwheel": Rule(0.95, "distance", COLOR),
    "use-colorwheel-2": Rule(0.95, "distance", COLOR),
    "chase-circle": Rule(
        0.8, "distance", "pays the share of ten seconds with the mouse inside the circle, a little for none: "
        "0.8 is a second to get there and another of being left behind"),
    # ----------------------------------------------------------------------------------------------- witness
    "generate-number": Rule(
        1.0, "witness", "takes no number at all for an even one; one must have been generated",
        "document.querySelector('#display-number').textContent !== '-'"),
    "form-sequence-2": Rule(
        1.0, "witness", "takes any of the three radio buttons for the one that is asked for",
        "document.querySelector('#query').textContent.includes('the ' + ['1st', '2nd', '3rd']"
        "[document.querySelector('[name=radio]:checked')?.value - 1] + ' radio')"),
    "daily-calendar": Rule(
        1.0, "witness", "looks only at an event's end: it may begin before the time that is asked for",
        "Number($('#newEvent').attr('data-start')) >= "
        "{8: 16, 12: 24, 4: 32}[$('#query').text().match(/between (\\d+)/)[1]]"),
    "terminal": Rule(
        1.0, "witness", "takes names that end like the extension (bash for .sh) or are one letter shorter",
        "(([, file = ''], kind) => kind[0] === '.' ? file.endsWith(kind) : !file.includes('.'))"
        "($('#active-input').text().split(/\\s/), $('#query .bold').text())"),
    "use-autocomplete": NOT_IN_THE_LIST,
    "use-autocomplete-nodelay": NOT_IN_THE_LIST,
    # ------------------------------------------------------------------------------------------------- never
    "hover-shape": Rule(None, "never", "it never ends an episode and never pays a reward"),
}


def rule_of(page: str) -> Rule:
    return RULES.get(page, FULL)


def reaches(rule: Rule, raw: float, witness: bool) -> bool:
    """Whether a raw reward is a success; sums of tenths and thirds are a little off, NaN is none."""
    return rule.least is not None and witness and raw >= rule.least - 1e-9
