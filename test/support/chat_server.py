"""A small HTTP server that answers chats as a test tells it, where no model is needed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]
"""Status and body."""


def completion(text: str | None, **fields: str) -> Reply:
    """A chat completion whose message has this content, and further fields."""
    message = {"content": text, **fields}
    return 200, json.dumps({"choices": [{"message": message}]}).encode()


@contextmanager
def chat_server(
    answer: Callable[[dict[str, Any]], Reply], models: Reply | None = None, port: int = 0
) -> Iterator[str]:
    """Yields the address of a server that answers each chat request with `answer` of its body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(models or (200, b'{"data": [{"id": "served"}]}'))

        def do_POST(self) -> None:
            chat = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert chat["model"] == "served"
            assert chat["temperature"] == 0
            self._send(answer(chat))

        def _send(self, reply: Reply) -> None:
            status, body = reply
            with suppress(ConnectionError):  # the client leaves at the first failure
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
