"""A stand-in for a vLLM server of one role: the part of its protocol that engine.py uses, answered by a tiny
Policy. It is as strict as the real one: an unknown adapter is 404, one that is loaded already 400, a pause
holds requests back; and it refuses sampling parameters that are not the policy's distribution.

`die()` is a kill: no answers, connections cut, adapters forgotten; `start()` brings it back on the same port.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        names = ["base", *self.server.stub.adapters]
        self.reply(200, {"object": "list", "data": [
            {"id": n, "object": "model", "created": 0, "owned_by": "vllm"} for n in names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        stub, path = self.server.stub, self.path
        stub.seen.append((path, body))
        if path == "/v1/chat/completions":
            return self.reply(*stub.complete(body))
        return self.reply(*stub.administer(path, body))

    def reply(self, status, thing):
        data = json.dumps(thing).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing is printed."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def get_request(self):
        connection, address = super().get_request()
        self.stub.connections.append(connection)
        return connection, address

    def handle_error(self, *_):
        """A connection was cut: as it should be."""


def refused(message):
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


class VllmStub:
    """`change(ids)` may spoil the ids of a response; `drift` is added to its log-probs, `finish` replaces how
    it ended."""

    def __init__(self, policy):
        self.policy, self.adapters, self.seen, self.connections = policy, {}, [], []
        self.lock, self.running, self.change, self.drift = threading.Lock(), threading.Event(), list, 0.0
        self.finish, self.port = "", 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        self.server = Server(("127.0.0.1", self.port), Handler)
        self.server.stub, self.port = self, self.server.server_address[1]
        self.running.set()
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def die(self):
        self.adapters.clear()
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            try:
                connection.shutdown(2)
            except OSError:                       # closed by then
                continue
        self.connections.clear()

    def calls(self, path):
        return [body for p, body in self.seen if p.startswith(path)]

    def administer(self, path, body):
        name = body.get("lora_name")
        if path.startswith("/pause"):
            self.running.clear()
        elif path == "/resume":
            self.running.set()
        elif path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400, refused(f"The lora adapter '{name}' has already been loaded.")
            self.adapters[name] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return 404, refused(f"The lora adapter '{name}' cannot be found.")
        else:
            return 404, refused("Not Found")
        return 200, {}

    def complete(self, body):
        self.running.wait(10)
        wanted = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": True,
                  "return_token_ids": True, "stop_token_ids": self.policy.inputs.stop_ids}
        for key, value in wanted.items():
            if body.get(key) != value:
                return 400, refused(f"{key} is {body.get(key)!r}, not {value!r}")
        tokenizer = self.policy.inputs.tokenizer
        if tokenizer.convert_tokens_to_ids(body["bad_words"]) != self.policy.inputs.banned:
            return 400, refused("image and video ids are not banned")
        turns = {turn["role"]: turn["content"] for turn in body["messages"]}
        image, text = turns["user"]
        request = SimpleNamespace(
            system=turns["system"][0]["text"] if "system" in turns else "", user=text["text"],
            png=base64.b64decode(image["image_url"]["url"].partition("base64,")[2]), seed=body["seed"],
            temperature=body["temperature"], max_new_tokens=body["max_tokens"])
        with self.lock:
            if body["model"] not in self.adapters:
                return 404, refused(f"The model `{body['model']}` does not exist.")
            self.policy.load(self.adapters[body["model"]])
            sample, = self.policy.sample([request])
        ids = self.change(sample.response_ids)
        return 200, {
            "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
            "prompt_token_ids": sample.prompt_ids, "choices": [{
                "index": 0, "finish_reason": self.finish or ("length" if sample.truncated else "stop"),
                "token_ids": ids,
                "message": {"role": "assistant", "content": sample.text},
                "logprobs": {"content": [{"token": "", "logprob": x + self.drift, "top_logprobs": []}
                                         for x in sample.logp]}}]}
