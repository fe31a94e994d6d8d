"""Stands between a harness and a server: counts tokens and time, adds fields, keeps answers for a resume."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec

from sgl_importance.json_text import BadJson, read_json

MESSAGE_CHARACTERS = 300


class Exchange(msgspec.Struct):
    """One answered request.

    Attributes:
        request: digest of address, server, path and body.
        cached_tokens: of the prompt, that the server found in its cache; 0 where it does not say.
        seconds: until the whole answer was there.
    """

    request: str
    reply: dict[str, Any]
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    """What is read of an answer."""

    choices: list[Any]
    usage: _Usage | None = None


class RecordingProxy:
    """Forwards to one server.

    Attributes:
        exchanges: all that were answered, in order of their answers.
        problem: what first went wrong; None while nothing has.
    """

    def __init__(
        self,
        url: str,
        served: str,
        api_key: str | None,
        timeout: float,
        fields: dict[str, Any],
        kept_file: Path | None,
        on_answer: Callable[[], None],
    ) -> None:
        self._url = url
        self._served = served
        self._fields = fields
        self._kept_file = kept_file
        self._on_answer = on_answer
        self._kept = {each.request: each for each in _read(kept_file)}
        self._lock = threading.Lock()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout)
        self.exchanges: list[Exchange] = []
        self.problem: str | None = None

    def answer(self, path: str, sent: bytes) -> tuple[int, bytes]:
        """Status and body for the harness; a failure is noted in ``problem``."""
        body = msgspec.json.encode({**msgspec.json.decode(sent), **self._fields}, order="sorted")
        parts = (self._url.encode(), self._served.encode(), path.encode(), body)
        request = hashlib.sha256(b"\0".join(parts)).hexdigest()
        kept = self._kept.get(request)
        if kept is None:
            start = time.perf_counter()
            try:
                response = self._client.post(
                    self._url + path, content=body, headers={"Content-Type": "application/json"}
                )
            except httpx.TimeoutException:
                return self._failed(504, f"{self._url} gave no answer in time: raise --timeout")
            except httpx.HTTPError as error:
                return self._failed(502, f"the connection to {self._url} failed: {error}")
            if response.is_error:
                reason = " ".join(response.text.split())[:MESSAGE_CHARACTERS]
                return self._failed(response.status_code, f"{self._url}{path} answered: {reason}")
            try:
                kept = _exchange(request, response.content, time.perf_counter() - start)
            except (BadJson, msgspec.ValidationError):
                return self._failed(
                    502, f"{self._url}{path} does not answer like an OpenAI server: check the address"
                )
            self._keep(kept)
        with self._lock:
            self.exchanges.append(kept)
        self._on_answer()
        return 200, msgspec.json.encode(kept.reply)

    def close(self) -> None:
        self._client.close()

    def _keep(self, exchange: Exchange) -> None:
        if self._kept_file is None:
            return
        with self._lock, self._kept_file.open("ab") as file:
            file.write(msgspec.json.encode(exchange) + b"\n")

    def _failed(self, status: int, problem: str) -> tuple[int, bytes]:
        with self._lock:
            self.problem = self.problem or problem
        return status, msgspec.json.encode({"error": {"message": problem}})


@contextmanager
def listening(proxy: RecordingProxy) -> Iterator[str]:
    """The proxy's address on this machine, for as long as the harness runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            status, body = proxy.answer(self.path, sent)
            with suppress(ConnectionError):  # a harness that has given up no longer listens
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        proxy.close()


def _exchange(request: str, answer: bytes, seconds: float) -> Exchange:
    """
    Raises:
        BadJson: the answer is no JSON.
        msgspec.ValidationError: it is no completion.
    """
    reply = read_json(answer)
    usage = msgspec.convert(reply, _Completion).usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    return Exchange(request, reply, usage.prompt_tokens or 0, details.cached_tokens or 0, seconds)


def _read(file: Path | None) -> list[Exchange]:
    """What an interrupted run kept; a last line that was cut off is left out."""
    found = []
    if file is not None and file.exists():
        for line in file.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=Exchange))
    return found
