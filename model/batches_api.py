"""Many questions to a model at half the price, by the Batch API of an OpenAI-compatible server.

    client = Client("gpt-5.2-codex")                                # llm.py
    questions = ((name, client.body("You grade.", question)) for name, question in ...)
    for name, answer in Batches(client, "runs/batches").run(questions):     # an Answer, or an LLMError

`pending` says which questions an earlier run has sent and nobody has collected yet.
"""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

from model.llm import Client, LLMError, read_reply, status_error
from runtime import write_atomic


def open_batches(directory) -> dict[str, dict]:
    """The batches that earlier runs wrote and nobody has collected yet: name -> state."""
    states = (json.loads(p.read_text(encoding="utf-8")) for p in sorted(Path(directory).glob("*.json")))
    return {s["name"]: s for s in states if not s["collected"]}


def pending(directory) -> list:
    """The tags of their questions."""
    return [tag for state in open_batches(directory).values() for tag in state["tags"]]


class Batches:
    """Many questions at half the price, answered within a day. State is kept in `directory`, one NAME.json
    per batch, so that a killed run finds its batches again: the name travels as the batch's metadata, and a
    batch that was created but not yet written down is recognised by it, not paid for twice."""

    def __init__(self, client: Client, directory, max_bytes: int = 190_000_000, max_requests: int = 50_000,
                 max_open: int = 4, poll: float = 60.0):
        self.client = client
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.max_requests = max_requests
        self.max_open = max_open
        self.poll = poll
        self.url = "/v1/responses" if client.api == "responses" else "/v1/chat/completions"
        self.openai = client.openai.with_options(max_retries=client.retries)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.open = open_batches(self.directory)
        for file in self.directory.glob("*.jsonl"):
            if file.stem not in self.open:
                file.unlink()  # a kill left it half written

    def run(self, questions):
        """Yield (tag, Answer or LLMError) for what is pending and for `questions`, an iterator of (tag,
        body); a tag is any JSON value. A batch is marked as collected when its last answer has been taken and
        the next one is asked for. The error is `transient` where the batch left a question open."""
        import openai
        try:
            yield from self._run(questions)
        except openai.OpenAIError as e:
            raise LLMError(f"batches: {self.client.without_key(str(e))[:300]}", transient=True) from None

    def _run(self, questions):
        for state in self.open.values():
            self._submit(state)  # one that a kill kept from being submitted
        more = self._write(questions)
        state = {}
        while state is not None or self.open:
            while state is not None and len(self.open) < self.max_open:
                if state := next(more, None):
                    self.open[state["name"]] = state
                    self._submit(state)
            finished = [s for s in self.open.values() if self._finished(s)]
            for done in finished:
                yield from self._results(done)
                self._save(done | {"collected": True})
                del self.open[done["name"]]
            if self.open and not finished and self.client.stopped.wait(self.poll):
                return

    def _write(self, questions):
        """Files of at most max_requests lines and max_bytes bytes; yields the state of each once it is
        complete."""
        questions = iter(questions)
        waiting = next(questions, None)
        while waiting is not None:
            name = f"{time.time_ns():x}"
            tags = []
            size = 0
            with open(self.directory / f"{name}.jsonl", "wb") as f:
                while waiting is not None:
                    line = json.dumps({"custom_id": str(len(tags)), "method": "POST", "url": self.url,
                                       "body": waiting[1]})
                    if tags and (size + len(line) + 1 > self.max_bytes or len(tags) == self.max_requests):
                        break
                    f.write(line.encode() + b"\n")
                    size += len(line) + 1
                    tags.append(waiting[0])
                    waiting = next(questions, None)
            state = {"name": name, "tags": tags, "batch": "", "collected": False}
            self._save(state)
            yield state

    def _save(self, state: dict) -> None:
        write_atomic(self.directory / f"{state['name']}.json", json.dumps(state))

    def _submit(self, state: dict) -> None:
        """Upload and create, unless that has happened; then forget the file."""
        file = self.directory / f"{state['name']}.jsonl"
        if not state["batch"]:
            name = {"name": state["name"]}
            batch = next((b for b in self.openai.batches.list(limit=100) if b.metadata == name), None)
            if not batch:
                uploaded = self.openai.files.create(file=file, purpose="batch")
                batch = self.client.openai.batches.create(  # never tried twice: a second one is paid for too
                    completion_window="24h", endpoint=self.url, input_file_id=uploaded.id, metadata=name)
            state["batch"] = batch.id
            self._save(state)
        file.unlink(missing_ok=True)

    def _finished(self, state: dict) -> bool:
        status = self.openai.batches.retrieve(state["batch"]).status
        return status in ("completed", "failed", "expired", "cancelled")

    def _results(self, state: dict):
        batch = self.openai.batches.retrieve(state["batch"])
        if batch.status == "failed":
            problems = "; ".join(str(e.message) for e in (batch.errors and batch.errors.data) or [])
            self._save(state | {"collected": True})  # its questions are asked again by the next run
            raise LLMError(f"batch {batch.id} was not accepted: {problems[:300]}", fatal=True)
        files = [self.openai.files.content(file).content.splitlines()  # of bytes: at \n, not at U+2028
                 for file in (batch.output_file_id, batch.error_file_id) if file]
        left = dict(enumerate(state["tags"]))
        # in turns: many errors one after another are to mean that nothing works
        for line in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*files))):
            o = json.loads(line)
            if (k := int(o["custom_id"])) in left:
                yield left.pop(k), self._result(o)
        for tag in left.values():
            yield tag, LLMError(f"batch: no answer, it is {batch.status}", transient=True)

    def _result(self, o: dict):
        response = o.get("response")
        error = o.get("error") or {}
        if not response:  # batch_expired, batch_cancelled, request_timeout
            return LLMError(f"batch: {error.get('code')}: {error.get('message')}", transient=True)
        if response.get("status_code") != 200:
            return status_error(response.get("status_code") or 500, str(response.get("body") or error))
        try:
            answer = read_reply(self.client.api, response["body"])
        except (ValueError, KeyError, AttributeError) as e:
            return LLMError(f"batch: not a reply: {e}", transient=True)
        self.client.count(requests=1, **answer.usage)
        return replace(answer, usage={f"batch_{kind}": n for kind, n in answer.usage.items()})
