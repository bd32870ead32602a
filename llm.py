"""One question to a model behind an OpenAI-compatible server: teacher, judge, remote agents.

    client = Client("gpt-5.2-codex")                        # or base_url="http://127.0.0.1:8000/v1",
    api="chat" answer = client.ask("You grade.", [("user", ["Is this a cat?", image_url(png)])]) answer.text,
    answer.status                              # status: "ok", "truncated" or "refused"

A turn is (role, parts); a part is a text, or an image as `image_url` makes it (a data URL, so it is encoded
once). 429, 5xx, timeouts, closed connections and half answers are asked again with growing pauses, never
shorter than the server's Retry-After; other refusals of the server (400, 401, ...) are not. A question that
gets no answer raises LLMError, `fatal` where every other question would meet the same. A Client is safe to
share between threads: at most `concurrency` requests are under way, and one that pauses does not count.
`Batches` asks by the Batch API instead. The key is read from the environment and is never logged; error texts
come without it.
"""

import base64
import email.utils
import hashlib
import io
import json
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from runtime import UserError, write_atomic

FATAL = {401, 403, 404}  # wrong key, no access, no such model: the next question will fare no better
MAX_WAIT = 600.0  # s; a server that asks for a longer pause has closed for the day


class LLMError(Exception):
    """A question without an answer. `fatal`: so will the next ones be. `transient`: it may be answered
    later."""

    def __init__(self, message: str, fatal: bool = False, transient: bool = False):
        super().__init__(message)
        self.fatal, self.transient = fatal, transient


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
    """PNG or JPEG bytes, or a PIL image, -> data URL. `max_side` > 0 scales a larger picture down to it (as
    PNG)."""
    if isinstance(image, bytes) and not max_side:
        kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    from PIL import Image
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image)).convert("RGB")
    if max_side and max(image.size) > max_side:
        scale = max_side / max(image.size)
        image = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=3)
    return image_url(buffer.getvalue())


# --------------------------------------------------------------------------------- request and reply as dicts
def request_body(api: str, model: str, system: str, turns, max_output_tokens: int = 0,
                 temperature: float | None = None, reasoning: str = "", detail: str = "") -> dict:
    """The JSON body of one question, for either API. Unset options are left out: not every model takes
    them."""
    responses = api == "responses"

    def part(role, p):
        if p.startswith("data:image/"):
            extra = {"detail": detail} if detail else {}
            return ({"type": "input_image", "image_url": p} | extra if responses
                    else {"type": "image_url", "image_url": {"url": p} | extra})
        return {"type": ("input_text" if role == "user" else "output_text") if responses else "text", "text": p}
    messages = [{"role": role, "content": parts if isinstance(parts, str) else [part(role, p) for p in parts]}
                for role, parts in turns]
    options = {"max_output_tokens" if responses else "max_completion_tokens": max_output_tokens or None,
               "temperature": temperature}
    if reasoning:
        options |= {"reasoning": {"effort": reasoning}} if responses else {"reasoning_effort": reasoning}
    body = ({"model": model, "input": messages, "store": False} | ({"instructions": system} if system else {})
            if responses else
            {"model": model, "messages": ([{"role": "system", "content": system}] if system else []) + messages})
    return body | {k: v for k, v in options.items() if v is not None}


def read_reply(api: str, reply: dict) -> Answer:
    """The JSON of a reply -> Answer. Raises ValueError for JSON that is no reply at all."""
    if not isinstance(reply, dict) or not isinstance(reply.get("output" if api == "responses" else "choices"), list):
        raise ValueError("the reply is not of the API that was asked")
    text, status, reason = (_read_responses if api == "responses" else _read_chat)(reply)
    used = reply.get("usage") or {}
    details = used.get("input_tokens_details") or used.get("prompt_tokens_details") or {}
    usage = {"input": used.get("input_tokens", used.get("prompt_tokens")) or 0,
             "cached": details.get("cached_tokens") or 0,
             "output": used.get("output_tokens", used.get("completion_tokens")) or 0}
    return Answer(text, status, reason, usage, reply.get("model") or "", reply.get("metadata") or {})


def _read_responses(reply: dict) -> tuple[str, str, str]:
    parts = [p for item in reply["output"] if item.get("type") == "message" for p in item.get("content") or []]
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
    message, stopped = choice.get("message") or {}, choice.get("finish_reason") or ""
    text = message.get("content") or ""
    text = text if isinstance(text, str) else "".join(p.get("text") or "" for p in text)
    if message.get("refusal") or stopped == "content_filter":
        return text, "refused", message.get("refusal") or stopped
    return text, "truncated" if stopped == "length" else "ok", stopped if stopped == "length" else ""


# ----------------------------------------------------------------------------------------------------- client
class Client:
    """See the module's docstring. `prices`: dollars per million input, cached input and output tokens.
    `cache_dir`: answers are kept there by the content of the question, and a question asked before costs
    nothing."""

    def __init__(self, model: str, base_url: str = "", api: str = "responses", concurrency: int = 8,
                 timeout: float = 300.0, retries: int = 8, first_pause: float = 0.5, prices=(0.0, 0.0, 0.0),
                 cache_dir: str = "", key_variable: str = "OPENAI_API_KEY", **options):
        if api not in ("responses", "chat"):
            raise UserError(f"--api {api}: the two are responses and chat")
        key = os.environ.get(key_variable) or ("none" if base_url else "")
        if not key:
            raise UserError(f"no API key: set {key_variable}, or give the --base_url of a server that needs none")
        import openai
        self.openai = openai.OpenAI(api_key=key, base_url=base_url or None, max_retries=0, timeout=timeout)
        self.model, self.base_url, self.api, self.options = model, base_url, api, options
        self.retries, self.first_pause, self.prices, self.cache_dir = retries, first_pause, prices, cache_dir
        self.slots, self.lock, self.stopped = threading.BoundedSemaphore(concurrency), threading.Lock(), threading.Event()
        self.usage = {"input": 0, "cached": 0, "output": 0, "requests": 0, "retries": 0, "cache_hits": 0}
        self._secret = key

    def ask(self, system: str, turns, request_id: str = "") -> Answer:
        """One answer. `turns`: a text, or [(role, text or parts), ...]. `request_id` goes along as the header
        X-Client-Request-Id (ASCII), for the server's logs. Raises LLMError."""
        body = self.body(system, [("user", turns)] if isinstance(turns, str) else turns)
        file = self._cache_file(body)
        if file and file.exists():
            self._count(cache_hits=1)
            return read_reply(self.api, json.loads(file.read_text())["reply"])
        reply, answer = self._persist(body, {"X-Client-Request-Id": request_id} if request_id else {})
        if file and answer.status == "ok":
            write_atomic(file, json.dumps({"reply": reply}))
        self._count(**answer.usage)
        return answer

    def body(self, system: str, turns) -> dict:
        return request_body(self.api, self.model, system, turns, **self.options)

    def cost(self, usage: dict) -> float:
        """Dollars of a usage record."""
        fresh = usage.get("input", 0) - usage.get("cached", 0)
        return sum(n * price for n, price in zip((fresh, usage.get("cached", 0), usage.get("output", 0)), self.prices)) / 1e6

    def stop(self) -> None:
        """Let every pausing question end with LLMError at once."""
        self.stopped.set()

    def _persist(self, body: dict, headers: dict) -> tuple[dict, Answer]:
        """Ask until there is a reply; between two tries at least as long a pause as the server asks for."""
        for attempt in range(self.retries + 1):
            try:
                with self.slots:
                    self._count(requests=1)
                    return self._once(body, headers)
            except LLMError as e:
                if not e.transient or attempt == self.retries:
                    raise
                pause = min(60.0, self.first_pause * 2 ** attempt) * random.uniform(0.75, 1.25)
                pause = max(pause, e.__dict__.get("retry_after", 0.0))
                if pause > MAX_WAIT:
                    raise LLMError(f"the server asks to wait {pause:.0f} s ({e})", fatal=True, transient=True) from None
            self._count(retries=1)
            if self.stopped.wait(pause):
                raise LLMError("stopped", transient=True)
        raise AssertionError("unreachable")

    def _once(self, body: dict, headers: dict) -> tuple[dict, Answer]:
        import openai
        endpoint = self.openai.responses if self.api == "responses" else self.openai.chat.completions
        try:
            reply = json.loads(endpoint.with_raw_response.create(**body, extra_headers=headers).content)
            return reply, read_reply(self.api, reply)
        except openai.APIStatusError as e:
            raise self._status_error(e) from None
        except openai.APIConnectionError as e:  # timeouts too
            raise LLMError(f"no answer: {type(e).__name__} {e.__cause__ or ''}".strip(), transient=True) from None
        except (ValueError, AttributeError, openai.OpenAIError) as e:
            raise LLMError(f"not a reply: {str(e)[:200]}", transient=True) from None

    def _status_error(self, e) -> LLMError:
        """A 4xx or 5xx reply. A 429 for want of money is no rate limit: no pause will mend it."""
        code, text = e.status_code, str(e)[:300].replace(self._secret, "***")
        broke = code == 429 and "insufficient_quota" in str(e)
        error = LLMError(f"HTTP {code}: {text}", fatal=code in FATAL or broke,
                         transient=(code in (408, 409, 429) or code >= 500) and not broke)
        error.retry_after = retry_after(e.response.headers)
        return error

    def _count(self, **more) -> None:
        with self.lock:
            for name, n in more.items():
                self.usage[name] += n

    def _cache_file(self, body: dict) -> Path | None:
        if not self.cache_dir:
            return None
        digest = hashlib.sha256(json.dumps([self.base_url, self.api, body], sort_keys=True).encode()).hexdigest()
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
def read_verdict(text: str, yes: str = "correct", no: str = "incorrect", also_no=("partially correct",)) -> bool | None:
    """A judge's reply -> True, False, or None where it is unclear (lessons.md 5.7, row 71).

    The verdict is the whole reply, or its last line, or what follows "verdict:" there; quotes, stars and a
    full stop do not count, nor does case. A sentence that merely contains the word is no verdict: "not
    incorrect" -> None.
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = re.sub(r"(?i)^\W*(final |my )?(verdict|judge?ment|answer|conclusion|grade)( is)?\s*[:=]?", "", lines[-1]) if lines else ""
    word = re.sub(r"[^a-z' ]+", " ", last.lower().replace("_", " "))
    word = " ".join(word.replace("'", " ").split())
    return True if word == yes else False if word in (no, *also_no) else None


def read_verdicts(text: str, n: int, yes: str = "done", no: str = "not done") -> list[bool | None]:
    """One verdict for each of n numbered lines (`1: done`); None where a line is missing, double or
    unclear."""
    lines = re.findall(r"^\W*(?:subtask\s+)?(\d+)\s*[:.)-]\s*(.*)$", text, re.M | re.I)
    found = {k: [v for number, v in lines if int(number) == k] for k in range(1, n + 1)}
    return [read_verdict(v[0], yes, no, ()) if len(v) == 1 else None for v in found.values()]
