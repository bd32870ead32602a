"""One question to a model behind an OpenAI-compatible server: teacher, judge, remote agents.

    client = Client("gpt-5.2-codex")        # or Client(name, base_url="http://127.0.0.1:8000/v1", api="chat")
    answer = client.ask("You grade.", [("user", ["Is this a cat?", image_url(png)])])

A turn is (role, parts); a part is a text, or an image as `image_url` makes it (a data URL, so it is encoded
once). `answer.status` is "ok", "truncated" or "refused". 5xx, timeouts, closed connections and half answers
are asked again `retries` times with growing pauses; 429 and whatever has a Retry-After for as long as the
server answers others; other errors (400, 401, ...) are not. A question that gets no answer raises LLMError,
`fatal` where every other question would meet the same. A Client is safe to share between threads: at most
`concurrency` requests are under way, and one that pauses does not count. batches_api.py
asks by the Batch API instead. The key is read from the environment and appears in no log or error.
"""

import base64
import email.utils
import hashlib
import io
import itertools
import json
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from runtime import UserError, write_atomic

FATAL = {401, 402, 403, 404}  # key, money, access, no such model: the next question will fare no better
MAX_WAIT = 600.0  # s; a server that answers nothing for longer and asks to wait has closed for the day


class LLMError(Exception):
    """A question without an answer. `fatal`: so will the next ones be. `transient`: one may ask again later.
    `busy`: the server asks to do so, after `retry_after` seconds where it says how many."""

    def __init__(self, message: str, fatal: bool = False, transient: bool = False, busy: bool = False,
                 retry_after: float = 0.0):
        super().__init__(message)
        self.fatal = fatal
        self.transient = transient
        self.busy = busy
        self.retry_after = retry_after


def status_error(code: int, said: str, retry_after: float = 0.0) -> LLMError:
    """A reply that is none. A 429 for want of money is no rate limit: no pause will mend it."""
    broke = "insufficient_quota" in said
    again = not broke and (code in (408, 409, 429) or code >= 500)
    busy = again and (code == 429 or retry_after > 0)
    return LLMError(f"HTTP {code}: {said[:300]}", code in FATAL or broke, again, busy, retry_after)


@dataclass(frozen=True)
class Answer:
    """`usage`: tokens {"input", "cached", "output"}; cached ones are among the input. `reason`: why it is not
    ok."""
    text: str
    status: str = "ok"
    reason: str = ""
    usage: dict = field(default_factory=dict)
    model: str = ""
    metadata: dict = field(default_factory=dict)


def image_url(image, max_side: int = 0) -> str:
    """PNG or JPEG bytes -> data URL, as they are. A PIL image -> the same as JPEG, scaled down to `max_side`
    (0: not)."""
    if not isinstance(image, bytes):
        if max_side and max(image.size) > max_side:
            image = image.copy()
            image.thumbnail((max_side, max_side))
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=92, subsampling=0)
        image = buffer.getvalue()
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


# --------------------------------------------------------------------------------- request and reply as dicts
def request_body(api: str, model: str, system: str, turns, max_output_tokens: int = 0,
                 temperature: float | None = None, reasoning: str = "", detail: str = "",
                 seed: int | None = None) -> dict:
    """The JSON body of one question, for either API. Unset options are left out: not every model takes
    them. The Responses API has no seed."""
    messages = messages_of(api, turns, detail)
    if api == "responses":
        body: dict = {"model": model, "store": False, "input": messages}
        if system:
            body["instructions"] = system
        options: dict = {"max_output_tokens": max_output_tokens or None, "temperature": temperature,
                   "reasoning": {"effort": reasoning} if reasoning else None}
    else:
        if system:
            messages.insert(0, {"role": "system", "content": system})
        body = {"model": model, "messages": messages}
        options = {"max_completion_tokens": max_output_tokens or None, "temperature": temperature,
                   "seed": seed, "reasoning_effort": reasoning or None}
    return body | {k: v for k, v in options.items() if v is not None}


def messages_of(api: str, turns, detail: str = "") -> list:
    """Turns as either API has them; a turn that is one text stays a text."""
    return [{"role": role, "content": parts if isinstance(parts, str) else
             [_part(api, role, part, detail) for part in parts]} for role, parts in turns]


def _part(api: str, role: str, part: str, detail: str) -> dict:
    """A part of a turn: a text, or an image where it is a data URL."""
    image = part.startswith("data:image/")
    extra = {"detail": detail} if image and detail else {}
    if api == "chat":
        return {"type": "image_url", "image_url": {"url": part} | extra} if image else \
            {"type": "text", "text": part}
    if image:
        return {"type": "input_image", "image_url": part} | extra
    return {"type": "input_text" if role == "user" else "output_text", "text": part}


def read_reply(api: str, reply: dict) -> Answer:
    """The JSON of a reply -> Answer. Raises ValueError for JSON that is no reply at all."""
    content = "output" if api == "responses" else "choices"
    if not isinstance(reply, dict) or not isinstance(reply.get(content), list):
        raise ValueError("the reply is not of the API that was asked")
    text, status, reason = (_read_responses if api == "responses" else _read_chat)(reply)
    used = reply.get("usage") or {}
    details = used.get("input_tokens_details") or used.get("prompt_tokens_details") or {}
    usage = {"input": used.get("input_tokens", used.get("prompt_tokens")) or 0,
             "cached": details.get("cached_tokens") or 0,
             "output": used.get("output_tokens", used.get("completion_tokens")) or 0}
    return Answer(text, status, reason, usage, reply.get("model") or "", reply.get("metadata") or {})


def _read_responses(reply: dict) -> tuple[str, str, str]:
    messages = (item for item in reply["output"] if item.get("type") == "message")
    parts = [p for message in messages for p in message.get("content") or []]
    text = "".join(p.get("text") or "" for p in parts if p.get("type") == "output_text")
    refusal = "".join(p.get("refusal") or "" for p in parts if p.get("type") == "refusal")
    stopped = (reply.get("incomplete_details") or {}).get("reason") or ""
    if refusal or stopped == "content_filter":
        return text, "refused", refusal or stopped
    if reply.get("status") == "failed" or reply.get("error"):
        raise ValueError(f"the server gave up: {str(reply.get('error'))[:200]}")
    return text, "truncated" if reply.get("status") == "incomplete" else "ok", stopped


def _read_chat(reply: dict) -> tuple[str, str, str]:
    choice = (reply["choices"] or [{}])[0]
    message = choice.get("message") or {}
    stopped = choice.get("finish_reason") or ""
    text = message.get("content") or ""
    text = text if isinstance(text, str) else "".join(p.get("text") or "" for p in text)
    if message.get("refusal") or stopped == "content_filter":
        return text, "refused", message.get("refusal") or stopped
    if stopped == "length":
        return text, "truncated", stopped
    return text, "ok", ""


def cost(usage: dict, prices) -> float:
    """Dollars of a usage record; `prices` per million input, cached input and output tokens. Those of the
    Batch API (batch_input, ...) cost half."""
    def part(kind):
        cached = usage.get(kind + "cached", 0)
        tokens = usage.get(kind + "input", 0) - cached, cached, usage.get(kind + "output", 0)
        return sum(n * p for n, p in zip(tokens, prices)) / 1e6
    return part("") + part("batch_") / 2


class Spent:
    """Dollars and tokens of some usage records; `counted`: those that have tokens; `uncounted`: the server
    sent none."""

    def __init__(self, prices):
        self.prices = prices
        self.dollars = 0.0
        self.tokens = 0
        self.counted = 0
        self.uncounted = 0

    def add(self, *usages: dict) -> None:
        for usage in usages:
            tokens = sum(n for kind, n in usage.items() if not kind.endswith("cached"))
            self.dollars += cost(usage, self.prices)
            self.tokens += tokens
            self.counted += tokens > 0
            self.uncounted += bool(usage) and not tokens

    def __str__(self):
        return f"${self.dollars:.2f} and {self.tokens:,} tokens"


# ----------------------------------------------------------------------------------------------------- client
class Client:
    """See the module's docstring. `usage` counts tokens, requests, retries and cache hits. With a `cache_dir`
    answers are kept by the content of the question, and a question asked before costs nothing."""

    def __init__(self, model: str, base_url: str = "", api: str = "responses", concurrency: int = 8,
                 timeout: float = 300.0, retries: int = 8, first_pause: float = 0.5,
                 cache_dir: str = "", key_variable: str = "OPENAI_API_KEY", **options):
        if api not in ("responses", "chat"):
            raise UserError(f"--api {api}: the two are responses and chat")
        key = os.environ.get(key_variable) or ("no-key-needed" if base_url else "")
        if not key:
            raise UserError(f"no API key: set {key_variable}, or give the address of a server without")
        import openai
        self.openai = openai.OpenAI(api_key=key, base_url=base_url or None, max_retries=0, timeout=timeout)
        self.model = model
        self.base_url = base_url
        self.api = api
        self.options = options                    # of every question: temperature, reasoning, ...
        self.retries = retries
        self.first_pause = first_pause
        self.cache_dir = cache_dir
        self.slots = threading.BoundedSemaphore(concurrency)
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.answered_at = 0.0
        self.on_wait = lambda seconds: None  # told of every pause that the server asked for
        self.usage = {"input": 0, "cached": 0, "output": 0, "requests": 0, "retries": 0, "cache_hits": 0}
        self._secret = key

    def ask(self, system: str, turns, request_id: str = "", **options) -> Answer:
        """One answer. `turns`: a text, or [(role, text or parts), ...]. `request_id` goes along as the header
        X-Client-Request-Id, for the server's logs; `options` are this question's own. Raises LLMError."""
        body = self.body(system, turns, **options)
        file = self._cache_file(body)
        if file and file.exists():
            self.count(cache_hits=1)
            return read_reply(self.api, json.loads(file.read_text(encoding="utf-8"))["reply"])
        name = request_id.encode("ascii", "backslashreplace").decode()[:512]  # what OpenAI takes
        reply, answer = self._persist(body, {"X-Client-Request-Id": name} if name else {})
        if file and answer.status == "ok":
            write_atomic(file, json.dumps({"reply": reply}))
        self.count(**answer.usage)
        return answer

    def body(self, system: str, turns, **options) -> dict:
        turns = [("user", turns)] if isinstance(turns, str) else turns
        return request_body(self.api, self.model, system, turns, **self.options | options)

    def without_key(self, text: str) -> str:
        return text.replace(self._secret, "***") if len(self._secret) > 8 else text

    def stop(self) -> None:
        """Let every pausing question end with LLMError at once."""
        self.stopped.set()

    def _persist(self, body: dict, headers: dict) -> tuple[dict, Answer]:
        """Ask until there is a reply; between two tries at least as long a pause as the server asks for. Such
        a pause is no failed try, as long as other questions are answered meanwhile."""
        begin = time.monotonic()
        failed = 0
        for attempt in itertools.count():
            if self.stopped.is_set():
                raise LLMError("stopped", transient=True)
            try:
                with self.slots:
                    self.count(requests=1)
                    found = self._once(body, headers)
                self.answered_at = time.monotonic()
                return found
            except LLMError as e:
                if not e.transient or failed >= self.retries and not e.busy:
                    raise
                pause = min(60.0, self.first_pause * 2 ** min(attempt, 9)) * random.uniform(0.75, 1.25)
                pause = max(pause, e.retry_after)
                failed += not e.busy
                if e.busy:
                    silent = time.monotonic() + pause - max(begin, self.answered_at)
                    if silent > MAX_WAIT:
                        raise LLMError(f"the server asks to wait {pause:.0f} s and has answered nothing "
                                       f"meanwhile ({e})", fatal=True) from None
                    self.on_wait(pause)
            self.count(retries=1)
            self.stopped.wait(pause)
        raise AssertionError("tries are without end")

    def _once(self, body: dict, headers: dict) -> tuple[dict, Answer]:
        import openai
        endpoint = self.openai.responses if self.api == "responses" else self.openai.chat.completions
        try:
            reply = json.loads(endpoint.with_raw_response.create(**body, extra_headers=headers).content)
            return reply, read_reply(self.api, reply)
        except openai.APIStatusError as e:
            said = self.without_key(str(e))
            raise status_error(e.status_code, said, retry_after(e.response.headers)) from None
        except openai.APIConnectionError as e:  # timeouts too
            raise LLMError(f"no answer ({type(e).__name__}: {e.__cause__ or e})", transient=True) from None
        except (ValueError, AttributeError, openai.OpenAIError) as e:
            raise LLMError(f"not a reply: {str(e)[:200]}", transient=True) from None

    def count(self, **more) -> None:
        """Add to `usage`."""
        with self.lock:
            for name, n in more.items():
                self.usage[name] += n

    def _cache_file(self, body: dict) -> Path | None:
        if not self.cache_dir:
            return None
        question = json.dumps([self.base_url, self.api, body], sort_keys=True)
        digest = hashlib.sha256(question.encode()).hexdigest()
        return Path(self.cache_dir) / digest[:2] / f"{digest}.json"


def retry_after(headers) -> float:
    """Seconds that the server asks to wait (`retry-after-ms`, or Retry-After as seconds or a date); 0 where
    unsaid."""
    if ms := headers.get("retry-after-ms"):
        return float(ms) / 1000 if re.fullmatch(r"\d+\.?\d*", ms) else 0.0
    value = headers.get("retry-after") or ""
    if re.fullmatch(r"\d+\.?\d*", value):
        return float(value)
    date = email.utils.parsedate_tz(value)
    return max(0.0, email.utils.mktime_tz(date) - time.time()) if date else 0.0


# --------------------------------------------------------------------------------------------------- verdicts
_LEAD = re.compile(r"^\W*((the|my|final|student's)\s+)*(verdict|judge?ment|answer)(\s+is)?\b", re.I)


def read_verdict(text: str, yes: str = "correct", no: str = "incorrect",
                 also_no: tuple = ("partially correct",)) -> bool | None:
    """A judge's reply -> True, False, or None where it is unclear.

    The verdict is the last line, or what follows "verdict:", "the answer is" there; quotes, stars, a full
    stop and case do not count. A sentence that merely contains the word is no verdict: "not incorrect" ->
    None.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    words = re.sub(r"[^a-z]+", " ", _LEAD.sub("", lines[-1]).lower()).split() if lines else []
    verdict = " ".join(words)
    if verdict == yes:
        return True
    return False if verdict in (no, *also_no) else None


def read_verdicts(text: str, n: int, yes: str = "done", no: str = "not done") -> list[bool | None]:
    """One verdict for each of n numbered lines (`1: done`); None where a line is missing, double or
    unclear."""
    lines = re.findall(r"^\W*(?:subtask\s+)?(\d+)\s*[:.)-]\s*(.*)$", text, re.M | re.I)
    found = {k: [verdict for number, verdict in lines if int(number) == k] for k in range(1, n + 1)}
    return [read_verdict(v[0], yes, no, ()) if len(v) == 1 else None for v in found.values()]
