"""A server on this machine that speaks the protocol of embeddings, and badly when told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIM = 6


def true_vector(text: str) -> list[float]:
    """Return a vector that depends on every character of a text."""
    x = np.random.default_rng(list(text.encode())).standard_normal(DIM)
    return (x / np.linalg.norm(x)).astype(np.float32).tolist()


def usual(texts: list[str]) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": true_vector(t)} for i, t in enumerate(texts)]
    return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}


Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.seen.append((time.monotonic(), self.path, dict(self.headers), asked))
        script: list[Answer] = server.script
        answer = script.pop(0) if script else respond
        answer(self, asked)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def respond(handler: Handler, asked: dict[str, Any]) -> None:
    handler.send(200, json.dumps(usual(asked["input"])).encode())


def status(code: int, body: bytes = b"busy", **headers: str) -> Answer:
    return lambda handler, asked: handler.send(code, body, **headers)


def changed(change: Callable[[dict[str, Any]], Any]) -> Answer:
    def answer(handler: Handler, asked: dict[str, Any]) -> None:
        reply = usual(asked["input"])
        handler.send(200, json.dumps(change(reply) or reply).encode())

    return answer


@contextmanager
def serving() -> Iterator[Any]:
    """Run a server whose `seen` are the requests, and whose `script` the answers to the next ones."""
    made: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads, made.seen, made.script = True, [], []
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()
        thread.join()
