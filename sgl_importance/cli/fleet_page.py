"""Serves the page of a fleet on this machine. It holds no key: the browser sends one, servers check it."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sgl_importance.cli.fleet_view import FleetView
from sgl_importance.cli.server_client import KeyRefused, ServerError
from sgl_importance.ui.page_files import HEADERS, MEDIA_TYPES, SHARED, parts_in

HOST = "127.0.0.1"
LARGEST_BODY = 1 << 16
IDLE_SECONDS = 60.0
_BEARER = "Bearer "


class FleetPage(ThreadingHTTPServer):
    """The page and what it asks, on ``127.0.0.1`` alone.

    Args:
        view: of the servers.
        port: to listen on; 0 is any.
    """

    daemon_threads = True

    def __init__(self, view: FleetView, port: int) -> None:
        self.view = view
        self.files: dict[str, Path] = {f"/ui/{name}": file for name, file in parts_in(SHARED).items()}
        self.files["/"] = SHARED / "fleet.html"
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the browser has gone."""


class _Refused(Exception):
    """The request is not answered; the status, and the message for whoever asks."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server: FleetPage

    def do_GET(self) -> None:
        if (file := self.server.files.get(self.path)) is not None:
            self._send(HTTPStatus.OK, file.read_bytes(), MEDIA_TYPES[file.suffix])
            return
        self._answer({"/fleet": lambda: self.server.view.show(self._key())})

    def do_POST(self) -> None:
        self._answer({"/pin": self._pin, "/unpin": self._unpin})

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal is for what the operator should read."""

    # ---- what it answers ----

    def _pin(self) -> dict[str, Any]:
        body = self._body()
        prefix, ttl = body.get("prefix"), body.get("ttl_seconds")
        if not isinstance(prefix, str) or not (ttl is None or type(ttl) in (int, float)):
            raise _Refused(HTTPStatus.BAD_REQUEST, "a pin wants prefix, a name, and perhaps ttl_seconds")
        try:
            return self.server.view.pin(self._key(), prefix, ttl)
        except KeyError:
            raise _Refused(HTTPStatus.NOT_FOUND, "this prefix is shown no more: choose another") from None

    def _unpin(self) -> dict[str, Any]:
        pin = self._body().get("pin_id")
        if not isinstance(pin, str):
            raise _Refused(HTTPStatus.BAD_REQUEST, "an unpin wants pin_id")
        return self.server.view.unpin(self._key(), pin)

    def _answer(self, routes: dict[str, Any]) -> None:
        try:
            self._refuse_other_sites()
            if (route := routes.get(self.path)) is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "nothing is here: the page is /")
            status, document = HTTPStatus.OK, route()
        except _Refused as refused:
            status, document = refused.status, {"message": str(refused)}
            self.close_connection = True  # a body may be left unread
        except KeyRefused as error:
            status, document = HTTPStatus.UNAUTHORIZED, {"message": str(error)}
        except ServerError as error:
            status, document = HTTPStatus.BAD_GATEWAY, {"message": str(error)}
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, media_type: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{media_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    # ---- who asks, and for what ----

    def _refuse_other_sites(self) -> None:
        """Neither pages of other sites, nor those that a foreign name leads here.

        Raises:
            _Refused: a browser asks for one of them.
        """
        port = self.server.server_port
        own = {f"{name}:{port}" for name in (HOST, "localhost")}
        if port == 80:  # browsers leave it out
            own |= {HOST, "localhost"}
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        origin = self.headers.get("Origin")
        is_own = origin is None or origin.removeprefix("http://") in own
        if self.headers.get("Host") not in own or site not in ("none", "same-origin") or not is_own:
            raise _Refused(HTTPStatus.FORBIDDEN, f"only its own page is answered: open {self.server.url}")

    def _key(self) -> str | None:
        given = self.headers.get("Authorization", "")
        # What no header carries would reach no server, and never be refused: the page would keep it.
        if not (given.isascii() and given.isprintable()):
            raise KeyRefused("the key holds characters that no header carries: give the servers' key")
        return given.removeprefix(_BEARER) if given.startswith(_BEARER) else None

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdecimal() and len(length) <= 20  # int() takes no thousands
        if not (is_number and int(length) <= LARGEST_BODY):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"a body wants a length of up to {LARGEST_BODY:,} bytes")
        try:
            document = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body is no JSON object")
        return document
