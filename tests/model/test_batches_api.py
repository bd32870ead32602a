"""Many questions by the Batch API: files of bounded size, nothing paid twice, what a kill leaves, errors."""

import json

import pytest
from model_server import serving

from model.batches_api import Batches, pending
from model.llm import Client, LLMError

OK = "It is a cat."
ERROR = {"error": {"message": "no"}}


def client(server, **options):
    return Client("m", server.url, **{"first_pause": 0.01, "timeout": 5.0} | options)


def test_batches_are_split_answered_and_not_paid_twice(tmp_path):
    def answer(path, body, headers):
        word = body["input"][0]["content"]
        return (400, ERROR, {}) if word == "q3" else f"answer to {word}"
    with serving(answer) as server:
        asked = client(server)

        def questions(names):
            return ((name, asked.body("", [("user", name)])) for name in names)
        names = [f"q{i}" for i in range(7)]
        got = dict(Batches(asked, tmp_path, max_requests=3, poll=0.01).run(questions(names)))
        assert {k: getattr(v, "text", "error") for k, v in got.items()} == {
            name: "error" if name == "q3" else f"answer to {name}" for name in names}
        assert set(got["q0"].usage) == {"batch_input", "batch_cached", "batch_output"}
        assert len(server.batches) == 3 and not list(tmp_path.glob("*.jsonl"))

        first = Batches(asked, tmp_path, max_requests=3, poll=0.01)
        assert pending(tmp_path) == []
        results = first.run(questions(["a", "b"]))  # killed before anything is collected
        next(results)
        again = Batches(asked, tmp_path, poll=0.01)
        assert sorted(pending(tmp_path)) == ["a", "b"]
        assert sorted(k for k, _ in again.run(iter(()))) == ["a", "b"] and len(server.batches) == 4


def test_a_batch_created_but_not_noted_is_found_again(tmp_path, monkeypatch):
    with serving(lambda *request: OK) as server:
        asked = client(server)
        batches = Batches(asked, tmp_path, poll=0.01)
        save = Batches._save
        monkeypatch.setattr(Batches, "_save", lambda self, s: 1 / 0 if s["batch"] else save(self, s))
        with pytest.raises(ZeroDivisionError):
            next(batches.run(iter([("a", asked.body("", "x"))])))
        monkeypatch.undo()
        assert [k for k, _ in Batches(asked, tmp_path, poll=0.01).run(iter(()))] == ["a"]
        assert len(server.batches) == 1


def test_size_limit_of_batch_files(tmp_path):
    with serving(lambda *request: OK) as server:
        asked = client(server)
        bodies = [(i, asked.body("", [("user", "x" * 100)])) for i in range(10)]
        line = {"custom_id": "0", "method": "POST", "url": "/v1/responses", "body": bodies[0][1]}
        size = len(json.dumps(line)) + 1
        results = list(Batches(asked, tmp_path, max_bytes=3 * size, poll=0.01).run(iter(bodies)))
        assert sorted(i for i, _ in results) == list(range(10))
        inputs = [server.files[b["input_file_id"]] for b in server.batches.values()]
        assert len(inputs) == 4 and max(map(len, inputs)) <= 3 * size


def test_a_batch_that_is_not_accepted_is_asked_again_by_the_next_run(tmp_path):
    with serving(lambda *request: OK) as server:
        asked = client(server, retries=0)
        look = server.look
        errors = {"object": "list", "data": [{"message": "token limit", "code": "x"}]}
        server.look = lambda name: look(name) | {"status": "failed", "errors": errors}
        with pytest.raises(LLMError, match="not accepted: token limit"):
            list(Batches(asked, tmp_path, poll=0.01).run(iter([("a", asked.body("", "x"))])))
        assert pending(tmp_path) == []
    with pytest.raises(LLMError, match="batches:"):  # nobody is there any more
        list(Batches(client(server, retries=0), tmp_path, poll=0.01).run(iter([("a", asked.body("", "x"))])))


def test_what_a_batch_left_open_is_told_from_what_it_refuses(tmp_path):
    said = {"q0": OK, "q1": None, "q2": (500, ERROR), "q3": (429, ERROR), "q4": (400, ERROR),
            "q5": (401, ERROR), "q6": {"output": [], "status": "failed", "error": {"code": "server_error"}},
            "q7": "a\u2028b\u0085c"}
    with serving(lambda path, body, headers: said[body["input"][0]["content"]]) as server:
        asked = client(server)
        bodies = [(name, asked.body("", [("user", name)])) for name in said]
        got = dict(Batches(asked, tmp_path, poll=0.01).run(iter(bodies)))
        (batch,) = server.batches.values()
        assert batch["status"] == "expired" and len(server.files) == 3
        assert {name for name, e in got.items() if getattr(e, "transient", False)} == {"q1", "q2", "q3", "q6"}
        assert "batch_expired" in str(got["q1"]) and not got["q4"].fatal and got["q5"].fatal
        assert got["q0"].text == OK and got["q7"].text == said["q7"]

        look = server.look  # a file that is not there at all: cancelled before anything was done
        server.look = lambda name: look(name) | {"status": "cancelled", "error_file_id": None}
        got = dict(Batches(asked, tmp_path, poll=0.01).run(iter(bodies)))
        assert set(got) == set(said) and got["q4"].transient and got["q0"].text == OK


def test_errors_of_a_batch_come_between_its_answers(tmp_path):
    def answer(path, body, headers):
        return (400, ERROR) if body["input"][0]["content"] < "5" else OK
    with serving(answer) as server:
        asked = client(server)
        bodies = [(i, asked.body("", [("user", str(i))])) for i in range(10)]
        results = [isinstance(r, LLMError) for _, r in Batches(asked, tmp_path, poll=0.01).run(iter(bodies))]
    assert results == [False, True] * 5


def test_a_batch_is_never_created_twice(tmp_path):
    with serving(lambda *request: OK) as server:
        asked = client(server, retries=3)
        create, tries = server.create, []

        def created_but_not_told(body):
            tries.append(create(body))
            raise ConnectionError  # hangs up
        server.create = created_but_not_told
        with pytest.raises(LLMError, match="batches:"):
            list(Batches(asked, tmp_path, poll=0.01).run(iter([("a", asked.body("", "x"))])))
        assert len(tries) == 1
        server.create = create
        assert [k for k, _ in Batches(asked, tmp_path, poll=0.01).run(iter(()))] == ["a"]
        assert len(server.batches) == 1
