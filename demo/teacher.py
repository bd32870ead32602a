"""The demo's teacher: a small OpenAI-compatible server that answers from what the scripted demonstrator had
in mind.

    python demo/teacher.py --port 0 --port_file runs/demo/teacher.port

No language model is behind it, and every answer says so in its metadata. It takes the Responses API
(/v1/responses) and Chat Completions (/v1/chat/completions), and answers in appendix A's form. A trajectory is
found by its task and operations in the request's text; where two have the same, by the X-Client-Request-Id.

In: DEMONSTRATIONS/demonstrator.jsonl (demo/demonstrate.py). The port is written to `port_file` once it is
open.
"""

import json
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import runtime

MODEL = "scripted-local-teacher"
METADATA = {"teacher": "scripted local teacher (demo/teacher.py), no language model answered this"}


@dataclass
class Config:
    demonstrations: str = "runs/demo/trajectories"  # directory with demonstrator.jsonl
    port: int = 0                                   # 0 = any free one
    port_file: str = ""                             # where to write the port


# ----------------------------------------------------------------------------------------------- what it says
class Script:
    """demonstrator.jsonl: {"id", "task", "subtasks": [{"title", "goal"}], "operations": [...],
    "unnecessary"}."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise runtime.UserError(f"no demonstrations at {path}; run demo/demonstrate.py first")
        self.by_task: dict[str, list[dict]] = {}
        for mind in runtime.read_jsonl(path):
            self.by_task.setdefault(mind["task"], []).append(mind)

    def answer(self, text: str, request_id: str = "") -> str:
        """The answer to a request with this text. Raises KeyError for a trajectory it has not seen."""
        minds = [m for task, minds in self.by_task.items() if f"Task: {task}\n" in text for m in minds]
        fitting = [m for m in minds
                   if all(f"Step {k}: {said}" in text for k, said in enumerate(m.get("operations", []), 1))]
        name = request_id.partition("#")[0].rpartition("/")[2]
        fitting.sort(key=lambda m: m["id"] != name)
        if not fitting:
            raise KeyError(request_id)
        return appendix_a(fitting[0])


def appendix_a(mind: dict) -> str:
    subtasks = "\n\n".join(f"SUBTASK {k}:\n\n{s['title']}\n\n  - Goal:\n\n{s['goal'] or s['title']}"
                           for k, s in enumerate(mind["subtasks"], 1))
    steps = ", then ".join(f"{s['title']} ({s['goal']})" for s in mind["subtasks"])
    return (f"[SUBGOAL ANALYSIS]\n\nThe demonstrator means to: {steps}.\n\n[SUBTASKS]\n\n{subtasks}\n\n"
            f"[UNNECESSARY ACTIONS]\n\n{'YES ' + mind['unnecessary'] if mind['unnecessary'] else 'NONE'}\n")


# --------------------------------------------------------------------------------------------- how it says it
def request_text(body: dict) -> str:
    """All words of a request of either API, images left out."""
    turns = body.get("input") or body.get("messages") or []
    contents = [turns] if isinstance(turns, str) else [t.get("content") or "" for t in turns]
    return "\n".join(c if isinstance(c, str) else "\n".join(p.get("text", "") for p in c) for c in contents)


def reply(path: str, text: str, question: str, model: str = MODEL, metadata=METADATA) -> dict:
    """A finished answer of the API at `path`. A token is taken to be four characters."""
    used, said = len(question) // 4, len(text) // 4
    if path.endswith("/responses"):
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                   "content": content}
        return {"id": "resp_1", "object": "response", "created_at": 0, "status": "completed", "error": None,
                "incomplete_details": None, "model": model, "metadata": metadata, "output": [message],
                "parallel_tool_calls": False,
                "usage": {"input_tokens": used, "output_tokens": said, "total_tokens": used + said,
                          "input_tokens_details": {"cached_tokens": 0}}}
    return {"id": "chat_1", "object": "chat.completion", "created": 0, "model": model, "metadata": metadata,
            "choices": [{"index": 0, "finish_reason": "stop",
                         "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": used, "completion_tokens": said, "total_tokens": used + said}}


class Handler(BaseHTTPRequestHandler):
    """`server.script` has `answer(text, request_id)`."""
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per reply: the small ones would wait for each other's acknowledgement

    def do_GET(self):
        self.send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            question = request_text(json.loads(raw))
            text = self.server.script.answer(question, self.headers.get("X-Client-Request-Id", ""))
            self.send(200, reply(self.path, text, question))
        except KeyError:
            self.send(400, {"error": {"message": "this trajectory is not one of the demonstrator's"}})
        except (ValueError, AttributeError, TypeError) as e:
            self.send(400, {"error": {"message": f"not a request: {e}"}})

    def send(self, status: int, body: dict, **headers):
        data = json.dumps(body).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": len(data), **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Nothing: the client counts."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, script, port: int = 0, handler=Handler):
        self.script = script
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as e:
            raise runtime.UserError(f"port {port}: {e.strerror}; give another --port, 0 for any") from None

    def handle_error(self, request, address):
        """A client that hangs up is none of the server's business; anything else is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, address)


def main(cfg: Config) -> None:
    server = Server(Script(Path(cfg.demonstrations) / "demonstrator.jsonl"), cfg.port)
    port = server.server_address[1]
    if cfg.port_file:
        runtime.write_atomic(cfg.port_file, f"{port}\n")
    print(f"scripted local teacher at http://127.0.0.1:{port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    runtime.launch(main)
