"""A local OpenAI-compatible server for tests: every reply is what a function says; it also has files and
batches."""

import contextlib
import email
import json
import socket
import threading
from email.policy import HTTP

from demo import teacher


def whole(path: str, body: dict, reply) -> dict:
    """A text -> the reply that has it; a reply is left as it is."""
    if isinstance(reply, str):
        return teacher.reply(path, reply, teacher.request_text(body), "a-model", {})
    return reply


class Handler(teacher.Handler):
    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = self.server
        if self.path == "/v1/files":
            kind = f"Content-Type: {self.headers['Content-Type']}\n\n"
            form = email.message_from_bytes(kind.encode() + raw, policy=HTTP)
            data = next(p for p in form.iter_parts() if p.get_filename()).get_payload(decode=True)
            return self.send(200, server.keep(data))
        body = json.loads(raw)
        if self.path == "/v1/batches":
            return self.send(200, server.create(body))
        headers = {name.lower(): value for name, value in self.headers.items()}
        server.requests.append((self.path, body, headers))
        said = server.answer(self.path, body, headers)
        if said is None:  # hang up
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        status, reply, headers = said if isinstance(said, tuple) else (200, said, {})
        return self.send(status, whole(self.path, body, reply), **headers)

    def do_GET(self):
        _, _, kind, *rest = self.path.partition("?")[0].split("/")
        if kind == "files":
            data = self.server.files[rest[0]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            return self.wfile.write(data)
        if not rest:
            batches = list(self.server.batches.values())
            return self.send(200, {"object": "list", "data": batches, "has_more": False})
        return self.send(200, self.server.look(rest[0]))


class ModelServer(teacher.Server):
    """`answer(path, body, headers)` -> a text, a whole reply, (status, reply, headers), or None to hang
    up."""

    def __init__(self, answer, polls: int = 1):
        super().__init__(None, handler=Handler)
        self.answer, self.requests, self.files, self.batches, self.polls = answer, [], {}, {}, polls

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def keep(self, data: bytes) -> dict:
        name = f"file-{len(self.files)}"
        self.files[name] = data
        return {"id": name, "object": "file", "bytes": len(data), "created_at": 0, "filename": "f",
                "purpose": "batch", "status": "processed"}

    def create(self, body: dict) -> dict:
        batch = {"id": f"batch-{len(self.batches)}", "object": "batch", "status": "in_progress", "looks": 0,
                 "created_at": 0, **body}
        return self.batches.setdefault(batch["id"], batch)

    def look(self, name: str) -> dict:
        """A batch is done at the look after `polls` others; its answers are then in a file, in reverse order,
        and what is no answer is in another one. None for an answer: the batch expires before that."""
        batch = self.batches[name]
        batch["looks"] += 1
        if batch["looks"] > self.polls and batch["status"] == "in_progress":
            lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
            results = [self.result(line) for line in reversed(lines)]
            expired = any(r["response"] is None for r in results)
            batch |= {"status": "expired" if expired else "completed"}
            right = [r for r in results if r["response"] and r["response"]["status_code"] == 200]
            wrong = [r for r in results if r not in right]
            for file, of_it in ("output_file_id", right), ("error_file_id", wrong):
                if of_it:
                    data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in of_it).encode()
                    batch[file] = self.keep(data)["id"]
        return batch

    def result(self, line: dict) -> dict:
        said = self.answer(line["url"], line["body"], {})
        if said is None:
            error = {"code": "batch_expired", "message": "This request could not be executed in time."}
            return {"custom_id": line["custom_id"], "response": None, "error": error}
        status, reply = said[:2] if isinstance(said, tuple) else (200, said)
        response = {"status_code": status, "body": whole(line["url"], line["body"], reply)}
        return {"custom_id": line["custom_id"], "response": response, "error": None}


@contextlib.contextmanager
def serving(answer, **options):
    server = ModelServer(answer, **options)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
