"""Models on OpenAI-compatible servers as the roles of an evaluation (table 1): `submit(Request) -> Future`.

    Remote           one role on a server: our decomposer or actor, or a native agent of somebody else's
    PlannerGrounder  an actor of two models: the planner decides the next action in words, from the task and
                     the screenshots so far; the grounder says where on the screenshot that is
    PlannerPrompts   the texts for that actor

A request is one question: system text, the screenshot, then the user's text. With `earlier` > 0 the model
sees as many steps before it again, as turns of their own: the screenshot, then what it answered. Each answer
comes from a thread of its own, never from the pool's. An outage is a ConnectionError that begins with "model
server": data, as the web's weather is (web/chromium.py); a wrong key or name is the user's to mend.

PAPER-GAP (planner + grounder): the paper does not say how the two are joined. Ours follows ScaleCUA's
workflow, but asks the grounder only for calls that have a place, and never uses coordinates that the planner
made up.
"""

import io
import re
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from PIL import Image

from language import actions, dialects
from language.prompts import Prompts
from model.inputs import Sample
from model.llm import Client, LLMError, image_url
from runtime import UserError

PLACED = {name for name, signature in actions.SIGNATURES.items() if "x" in signature} - {"scroll", "hscroll"}


@dataclass
class PlannedSample(Sample):
    said: str = ""                                # the planner's own words, of which `text` is made


def in_thread(ask, request) -> Future:
    """The Future of ask(request), which runs in a thread that no exit waits for."""
    future = Future()

    def work():
        try:
            sample = ask(request)
        except BaseException as e:                # whoever waits for the answer gets it
            future.set_exception(e)
        else:
            future.set_result(sample)
    threading.Thread(target=work, daemon=True, name="model").start()
    return future


class Remote:
    """The model that a server calls `model`; `url` "" is OpenAI's own. The key is in $ROLE_API_KEY, for
    OpenAI in $OPENAI_API_KEY: no server is sent another one's. `min_pixels` and `max_pixels` are those of the
    model's image processor; max_pixels 0: it sees the screenshot as it is."""

    def __init__(self, role: str, model: str, url: str = "", api: str = "chat", concurrency: int = 8,
                 earlier: int = 0, min_pixels: int = 3136, max_pixels: int = 2109744, timeout: float = 120.0):
        if urlsplit(url).password is not None:
            raise UserError(f"--{role}_url: no password in an address, it would be written down; "
                            f"set {role.upper()}_API_KEY instead")
        key = f"{role.upper()}_API_KEY" if url else "OPENAI_API_KEY"
        self.client = Client(model, url, api, concurrency, timeout, retries=3, key_variable=key,
                             detail="high")
        self.role, self.earlier, self.pixels = role, earlier, (min_pixels, max_pixels)

    def submit(self, request) -> Future:
        return in_thread(self.answer, request)

    def answer(self, request) -> Sample:
        """Raises ConnectionError where the server gives no answer, UserError where it never will."""
        turns = []
        for step in request.earlier[-self.earlier:] if self.earlier else ():
            said = getattr(step.sample, "said", step.sample.text)
            turns += [("user", [image_url(step.png)]), ("assistant", said)]
        turns.append(("user", [image_url(request.png), request.user]))
        sampled = request.temperature > 0
        try:
            answer = self.client.ask(
                request.system, turns, max_output_tokens=request.max_new_tokens,
                temperature=None if request.temperature < 0 else request.temperature,
                seed=request.seed if sampled else None)
        except LLMError as e:
            if e.fatal:
                raise UserError(f"--{self.role}_model {self.client.model} at "
                                f"{self.client.base_url or 'OpenAI'}: {e}") from None
            raise ConnectionError(f"model server of the {self.role}: {e}") from None
        size = self.resized(*Image.open(io.BytesIO(request.png)).size)
        return Sample([], request.png, size, [], [], answer.text, answer.status == "truncated")

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The size in which the model sees a screenshot of this one."""
        return actions.smart_resize(width, height, *self.pixels) if self.pixels[1] else (width, height)


class PlannerGrounder:
    """See the module's docstring. The sample's text is the action in our grammar, then what both said."""

    def __init__(self, planner: Remote, grounder: Remote, prompts: Prompts):
        self.planner, self.grounder, self.prompts = planner, grounder, prompts

    def submit(self, request) -> Future:
        return in_thread(self.answer, request)

    def answer(self, request) -> PlannedSample:
        planned = self.planner.answer(request)
        action, described, heard = actions.parse(planned.text), description(planned.text), ""
        text, size, calls = planned.text, planned.image_size, list(action.calls)
        if any(call.name in PLACED for call in calls):
            system, user = self.prompts.grounder(described)
            grounded = self.grounder.answer(replace(request, system=system, user=user, earlier=[]))
            heard, size = grounded.text, grounded.image_size
        if calls:
            point = dialects.read_point(heard)
            block = "\n".join(actions.format_call(placed(call, point)) for call in calls)
            if point is None and heard:
                block = "# the grounder named no place"
            text = (f"<operation>\n{described}\n</operation>\n<action>\n{block}\n</action>\n\n"
                    f"planner: {planned.text}" + (f"\n\ngrounder: {heard}" if heard else ""))
        return PlannedSample([], request.png, size, [], [], text, planned.truncated, said=planned.text)


def placed(call: actions.Call, point) -> actions.Call:
    """The planner's call at the grounder's point, or without any coordinates."""
    args = {param: value for param, value in call.args.items() if param not in actions.AXES}
    return actions.Call(call.name, args | (dict(zip("xy", point)) if point and call.name in PLACED else {}))


def description(text: str) -> str:
    """The comment above the planner's call, else all that it said outside of the code, in one line."""
    code = re.search(r"```(?:python)?(.*?)(?:```|\Z)", text, re.S | re.I)
    comment = re.search(r"^\s*#\s*(.+)$", code[1] if code else text, re.M)
    said = comment[1] if comment else text.replace(code[0], " ") if code else text
    return " ".join(re.sub(r"[<>]", " ", said).split())[:500]     # no tag that `parse` would take for its own


class PlannerPrompts(Prompts):
    """The planner reads what an actor would; its history are the turns before."""

    def actor(self, instruction: str, history: list[str], plan: str = "") -> tuple[str, str]:
        return self.planner(instruction)
