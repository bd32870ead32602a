"""One question to a model: what is asked again and what is not, what is read out of a reply, verdicts, the
cache."""

import base64
import concurrent.futures
import io
import json
import threading
import time
from types import SimpleNamespace

import pytest
from model_server import serving
from PIL import Image

from model import llm
from model.llm import Client, LLMError, image_url, read_reply, read_verdict, read_verdicts, retry_after
from runtime import UserError

OK = "It is a cat."
ERROR = {"error": {"message": "no"}}


def client(server, **options):
    return Client("m", server.url, **{"first_pause": 0.01, "timeout": 5.0} | options)


def once_then_ok(*replies):
    """First these replies, one each, then a good one."""
    left = list(replies)
    return lambda *request: left.pop(0) if left else OK


# --------------------------------------------------------------------------------------------------- requests
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_what_is_sent_and_read(api):
    png = image_url(b"\x89PNG1234")
    with serving(lambda *request: OK) as server:
        asked = client(server, api=api, max_output_tokens=99, reasoning="low", temperature=0.0)
        turns = [("user", ["Is it?", png, "Well?"]), ("assistant", "Hm."), ("user", "Say.")]
        answer = asked.ask("Look.", turns, "ä#1")
    path, body, headers = server.requests[0]
    assert (answer.text, answer.status, answer.model) == (OK, "ok", "a-model") and answer.usage["output"] == 3
    assert headers["x-client-request-id"] == "\\xe4#1"
    turns = body["input"] if api == "responses" else body["messages"][1:]
    assert [t["role"] for t in turns] == ["user", "assistant", "user"]
    first = turns[0]["content"]
    if api == "responses":
        assert path == "/v1/responses" and body["instructions"] == "Look." and body["store"] is False
        assert [p["type"] for p in first] == ["input_text", "input_image", "input_text"]
        assert first[1]["image_url"] == png and body["reasoning"] == {"effort": "low"}
        assert body["max_output_tokens"] == 99 and body["temperature"] == 0.0
    else:
        assert path == "/v1/chat/completions"
        assert body["messages"][0] == {"role": "system", "content": "Look."}
        assert first[1] == {"type": "image_url", "image_url": {"url": png}} and first[2]["text"] == "Well?"
        assert body["max_completion_tokens"] == 99 and body["reasoning_effort"] == "low"
    assert asked.usage["requests"] == 1 and asked.usage["output"] == 3


def test_options_that_are_not_set_are_not_sent():
    assert set(llm.request_body("chat", "m", "", [("user", "x")])) == {"model", "messages"}
    assert set(llm.request_body("responses", "m", "", [("user", "x")])) == {"model", "input", "store"}


def test_images():
    image = Image.new("RGB", (200, 100), "red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    png = buffer.getvalue()
    assert image_url(png) == "data:image/png;base64," + base64.b64encode(png).decode()
    kind, data = image_url(image, 50).split(";base64,")
    assert kind == "data:image/jpeg" and Image.open(io.BytesIO(base64.b64decode(data))).size == (50, 25)
    assert image.size == (200, 100)
    assert Image.open(io.BytesIO(base64.b64decode(image_url(image, 500).split(",")[1]))).size == (200, 100)


# --------------------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("bad", [
    (429, ERROR, {"Retry_After": "0"}), (500, ERROR, {}), (503, {}, {}), (408, ERROR, {}), None,
    (200, {"hello": "there"}, {}), {"output": [], "status": "failed", "error": {"code": "server_error"}}])
def test_asked_again(bad):
    with serving(once_then_ok(bad, bad)) as server:
        asked = client(server)
        assert asked.ask("", "?").text == OK and len(server.requests) == 3
    assert asked.usage["retries"] == 2 and asked.usage["requests"] == 3


@pytest.mark.parametrize("code, fatal", [(400, False), (401, True), (402, True), (403, True), (404, True),
                                         (422, False)])
def test_not_asked_again(code, fatal):
    with serving(lambda *request: (code, ERROR, {})) as server:
        with pytest.raises(LLMError, match=f"HTTP {code}") as e:
            client(server).ask("", "?")
        assert len(server.requests) == 1 and e.value.fatal == fatal and not e.value.transient


def test_no_money_is_no_rate_limit():
    error = {"error": {"code": "insufficient_quota", "message": "insufficient_quota"}}
    with serving(lambda *request: (429, error, {})) as server:
        with pytest.raises(LLMError) as e:
            client(server).ask("", "?")
        assert len(server.requests) == 1 and e.value.fatal


def test_a_pause_that_the_server_asks_for_is_no_failed_try():
    busy, told = [(429, ERROR, {})] * 6 + [(503, ERROR, {"Retry_After": "0.01"})], []
    with serving(once_then_ok(*busy, (500, ERROR, {}))) as server:
        asked = client(server, retries=1, first_pause=0.001)
        asked.on_wait = told.append
        assert asked.ask("", "?").text == OK and len(server.requests) == 9 and len(told) == 7


@pytest.mark.parametrize("others_are_answered", [True, False])
def test_it_waits_as_long_as_others_are_answered(monkeypatch, others_are_answered):
    now, tries = [0.0], []
    monkeypatch.setattr(llm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asked = Client("m", "http://127.0.0.1:9/v1", retries=0)
    asked.stopped.wait = lambda seconds: now.append(now.pop() + seconds)

    def busy(body, headers):
        tries.append(now[0])
        if others_are_answered:
            asked.answered_at = now[0]
        if len(tries) > 20:
            return {}, llm.Answer(OK)
        raise llm.status_error(429, "slow down", 290.0)
    asked._once = busy
    if others_are_answered:
        assert asked.ask("", "?").text == OK and now[0] == 20 * 290
    else:
        with pytest.raises(LLMError, match="wait 290 s and has answered nothing") as e:
            asked.ask("", "?")
        assert e.value.fatal and now[0] == 2 * 290


def test_half_an_answer_and_a_late_one_are_asked_again():
    late = [True]

    def slow_once(*request):
        if late:
            late.clear()
            time.sleep(0.8)
        return OK
    with serving(slow_once) as server:
        assert client(server, timeout=0.3).ask("", "?").text == OK and len(server.requests) == 2

    with serving(once_then_ok((200, OK, {"Content_Length": "5000"}))) as server:  # says more than it sends
        assert client(server, timeout=0.5).ask("", "?").text == OK and len(server.requests) == 2


def test_retries_run_out():
    with serving(lambda *request: (500, ERROR, {})) as server:
        with pytest.raises(LLMError, match="HTTP 500") as e:
            client(server, retries=2).ask("", "?")
        assert len(server.requests) == 3 and e.value.transient and not e.value.fatal
    with pytest.raises(LLMError, match="no answer"):
        Client("m", server.url, retries=1, first_pause=0.01).ask("", "?")


def test_retry_after_is_honoured():
    with serving(once_then_ok((429, ERROR, {"Retry_After": "0.7"}))) as server:
        begin = time.monotonic()
        assert client(server).ask("", "?").text == OK
        assert 0.7 <= time.monotonic() - begin < 3
    with serving(lambda *request: (429, ERROR, {"Retry_After": "86400"})) as server:
        with pytest.raises(LLMError, match="wait 86400 s") as e:
            client(server).ask("", "?")
        assert e.value.fatal
    in_ten = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 10))
    for headers, low, high in (({"retry-after": "3"}, 3, 3), ({"retry-after-ms": "1500"}, 1.5, 1.5),
                               ({}, 0, 0), ({"retry-after": in_ten}, 8, 10), ({"retry-after": "soon"}, 0, 0)):
        assert low <= retry_after(headers) <= high


def test_a_pause_leaves_its_slot_to_others_and_stop_ends_it():
    waiting = threading.Event()

    def busy_for_one(path, body, headers):
        if "pauses" in json.dumps(body):
            waiting.set()
            return 429, ERROR, {"Retry_After": "60"}
        return OK
    with serving(busy_for_one) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = client(server, concurrency=1)
        paused = pool.submit(asked.ask, "", "pauses")
        assert waiting.wait(5) and asked.ask("", "goes on").text == OK
        asked.stop()
        with pytest.raises(LLMError, match="stopped"):
            paused.result(5)


def test_the_key_is_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    def refuse(path, body, headers):
        return 401, {"error": {"message": "bad key " + headers["authorization"]}}, {}
    with caplog.at_level("DEBUG", "llm"), serving(refuse) as server:
        with pytest.raises(LLMError) as e:
            client(server).ask("", "?")
    assert "sk-secret" not in str(e.value) and "***" in str(e.value) and "sk-secret" not in caplog.text
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        Client("m")


# ---------------------------------------------------------------------------------------------------- replies
def chat(**choice):
    return {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"} | choice]}


def test_refusals_and_cuts_are_seen():
    def message(**part):
        return {"output": [{"type": "reasoning"}, {"type": "message", "content": [part]}]}
    refusal, thought = message(type="refusal", refusal="No."), message(type="output_text", text="x")
    cut = {"output": [], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    filtered = {"output": [], "status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    read = [read_reply("responses", r) for r in (refusal, cut, filtered, thought)]
    assert [(a.status, a.reason, a.text) for a in read] == [
        ("refused", "No.", ""), ("truncated", "max_output_tokens", ""), ("refused", "content_filter", ""),
        ("ok", "", "x")]
    chats = chat(), chat(finish_reason="length"), chat(finish_reason="content_filter"), chat(
        message={"content": None, "refusal": "No."})
    assert [read_reply("chat", r).status for r in chats] == ["ok", "truncated", "refused", "refused"]
    assert read_reply("chat", chat(message={"content": [{"type": "text", "text": "y"}]})).text == "y"


def test_usage_and_cost():
    reply = chat() | {"usage": {"prompt_tokens": 1000, "completion_tokens": 50,
                                "prompt_tokens_details": {"cached_tokens": 400}}}
    usage = read_reply("chat", reply).usage
    assert usage == {"input": 1000, "cached": 400, "output": 50}
    assert llm.cost(usage, (1.75, 0.175, 14.0)) == pytest.approx((600 * 1.75 + 400 * 0.175 + 50 * 14) / 1e6)
    batch = {"batch_input": 1000, "batch_cached": 400, "batch_output": 50}
    assert llm.cost(batch, (2.0, 2.0, 2.0)) == pytest.approx(1050 / 1e6)
    spent = llm.Spent((2.0, 2.0, 2.0))
    spent.add(usage | batch, {}, {"input": 0, "output": 0})  # one by batch and again; none; one not counted
    assert spent.dollars == pytest.approx(3150 / 1e6) and spent.tokens == 2100
    assert (spent.counted, spent.uncounted) == (1, 1)


def test_cache_answers_the_same_question_only(tmp_path):
    with serving(lambda *request: OK) as server:
        for _ in range(2):
            cached = client(server, cache_dir=str(tmp_path))
            assert cached.ask("s", "one").text == OK
        assert len(server.requests) == 1 and cached.usage["cache_hits"] == 1 and cached.usage["output"] == 0
        cached.ask("s", "two")
        client(server, cache_dir=str(tmp_path), temperature=1.0).ask("s", "one")
        assert len(server.requests) == 3
        server.answer = lambda *request: {"output": [], "status": "incomplete"}
        for _ in range(2):
            assert cached.ask("s", "cut").status == "truncated"
        assert len(server.requests) == 5


def test_many_threads_count_right():
    here, most, lock = [], [], threading.Lock()

    def answer(*request):
        with lock:
            here.append(1)
            most.append(len(here))
        time.sleep(0.01)
        with lock:
            here.pop()
        return OK
    with serving(answer) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = client(server, concurrency=4)
        answers = list(pool.map(lambda i: asked.ask("", f"question {i}").text, range(100)))
    assert answers == [OK] * 100 and asked.usage["requests"] == 100 and asked.usage["output"] == 300
    assert max(most) == 4


# --------------------------------------------------------------------------------------------------- verdicts
YES = ["correct", "Correct.", "**correct**", "'CORRECT'", "Verdict: correct", "The answer is correct.",
       "It has all of it.\n\ncorrect"]
NO = ["incorrect", "INCORRECT", "partially correct", "Partially_Correct", "The verdict: incorrect",
      "correct\nincorrect?"]
UNCLEAR = ["not incorrect", "not correct", "wrong", "", "\n \n", "correct or not", "I think it is correct",
           "correctly", "corrected", "correct, incorrect, partially correct", "incorrect\nBut see above"]


@pytest.mark.parametrize("text, verdict", [(t, v) for texts, v in ((YES, True), (NO, False), (UNCLEAR, None))
                                           for t in texts])
def test_verdicts(text, verdict):
    assert read_verdict(text) is verdict


def test_other_verdicts():
    assert read_verdict("Same.", "same", "different") is True
    assert read_verdict("not same", "same", "different") is None
    text = "1: done\n2: not done\nSubtask 3: Done.\n4) maybe\n5: done\n5: not done"
    assert read_verdicts(text, 6) == [True, False, True, None, None, None]
