"""A small HTTP server in threads that answers chats with what a test says, byte for byte, for tests of our clients."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answer = Callable[[Body], Iterable[bytes]]
DONE = b"data: [DONE]\n\n"


def event(finish_reason: str | None = None, **delta: str) -> bytes:
    """Return a chunk of a chat's stream."""
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish_reason}]})}\n\n".encode()


def says(*pieces: str) -> Answer:
    """Answer every question with `pieces`."""
    return lambda body: [*(event(content=piece) for piece in pieces), event("stop"), DONE]


class ScriptedServer:
    """`bodies` are those that came, `keys` the values of Authorization, `num_left` counts clients that left early."""

    def __init__(self, answer: Answer, models: bytes = b'{"data": [{"id": "tiny"}]}') -> None:
        self.answer = answer
        self.models = models
        self.status = 200
        self.bodies: list[Body] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.num_left = 0
        self.has_left = threading.Event()
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler, content: Iterable[bytes]) -> None:
        self.paths.append(handler.path)
        self.keys.append(handler.headers["Authorization"])
        handler.send_response(self.status)
        handler.end_headers()
        try:
            for part in content:
                handler.wfile.write(part)
        except ConnectionError:
            self.num_left += 1
            self.has_left.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.respond(self, [owner.models])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.bodies.append(body)
                owner.respond(self, owner.answer(body))

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
