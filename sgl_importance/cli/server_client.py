"""A running server's ``/kv_importance`` routes, with failures as one line that says what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

from sgl_importance.errors import ImportanceError

DEFAULT_URL = "http://127.0.0.1:30000"
REQUEST_SECONDS = 60.0
_ONE_OF = {
    "GET ": {"tiers", "dp_ranks"},
    "GET /pins": {"pins", "dp_ranks"},
    "GET /why": {"requests", "dp_ranks"},
    "POST /why": {"requests", "dp_ranks"},
    "POST /pin": {"pin_id"},
    "POST /unpin": {"pin_id"},
    "POST /prewarm": {"job_id"},
}
"""Fields, by question: an answer without any of them is that of something else, which answers every path."""
_NO_SUCH_ROUTE = "Not Found"  # what the server says of a path that nobody serves


class ServerError(ImportanceError):
    """The server is not there, refused, or answered nonsense; the message is one line."""


class NotThere(ServerError):
    """The server holds nothing of the name that was asked for, or no longer."""


class KeyRefused(ServerError):
    """The server wants another API key, or one at all."""


def proxy_problem(error: Exception) -> str:
    """What to say where httpx could not make a client: only a proxy of the environment keeps it from that."""
    reason = " ".join(str(error).split()).rstrip(".")
    return f"the proxy of the environment cannot be used ({reason}): correct or unset ALL_PROXY"


class Server:
    """Asks one server.

    Args:
        url: its address, such as ``http://127.0.0.1:30000``.
        api_key: its API key; None where it demands none.
        seconds: longest wait for an answer.
        left: seconds until the whole of what is asked must be done; later nothing is asked.
        cure: what to give where nobody is at the address, by the command that asks.
        transport: replaces the network, for tests.

    Raises:
        ServerError: the proxy that the environment names cannot be used.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        seconds: float = REQUEST_SECONDS,
        left: Callable[[], float] = lambda: math.inf,
        cure: str = "--url",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._seconds = seconds
        self._left = left
        self._cure = cure
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        try:
            self._client = httpx.Client(headers=headers, transport=transport)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ServerError(proxy_problem(error)) from None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON answer of ``GET /kv_importance<path>``; parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._ask("GET", path, params=given)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer of ``POST /kv_importance<path>``; fields that are None are left out."""
        given = {name: value for name, value in body.items() if value is not None}
        return self._ask("POST", path, json=given)

    def delete(self, path: str) -> dict[str, Any]:
        """The JSON answer of ``DELETE /kv_importance<path>``."""
        return self._ask("DELETE", path)

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        route = f"/kv_importance{path}"
        seconds = min(self._seconds, self._left())
        if seconds <= 0:
            raise ServerError(f"{self.url} was not asked any more: what came before took too long")
        try:
            question = self._client.build_request(method, self.url + route, timeout=seconds, **request)
        except httpx.InvalidURL:
            raise self._no_address() from None
        except UnicodeEncodeError as error:
            raise ServerError(f"{ascii(error.object)[:40]} is no text in UTF-8: correct it") from None
        except ValueError:
            raise ServerError("JSON has neither NaN nor infinity: give finite numbers") from None
        try:
            answer = self._client.send(question)
        except (httpx.UnsupportedProtocol, UnicodeError):  # the latter of names that DNS does not know
            raise self._no_address() from None
        except httpx.TimeoutException:
            raise ServerError(f"{self.url} did not answer in {seconds:.0f} s: look into its log") from None
        except httpx.DecodingError:
            raise self._not_ours(route) from None
        except httpx.TransportError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ServerError(
                f"no server at {self.url} ({reason}): start one, or give {self._cure}"
            ) from None
        if answer.status_code in (401, 403):
            raise KeyRefused(f"{self.url} refuses the key: give --api-key or set SGLANG_API_KEY")
        if answer.is_error:
            raise self._refusal(route, answer)
        document = _json_of(answer)
        one_of = _ONE_OF.get(f"{method} {path}")
        if not isinstance(document, dict) or (one_of is not None and one_of.isdisjoint(document)):
            raise self._not_ours(route)
        return document

    def _not_ours(self, route: str) -> ServerError:
        return ServerError(f"{self.url}{route} did not answer with our JSON: is it a server of sglang?")

    def _no_address(self) -> ServerError:
        return ServerError(f"{self.url!r} is no address: give {self._cure} such as {DEFAULT_URL}")

    def _refusal(self, route: str, answer: httpx.Response) -> ServerError:
        document = _json_of(answer)
        said = document if isinstance(document, dict) else {}
        message = said.get("message") or said.get("detail")
        if answer.status_code == 404 and message in (None, _NO_SUCH_ROUTE):
            cure = "start it with sgl-importance and --kv-policy importance"
            return ServerError(f"{self.url} has no {route}: {cure}")
        if isinstance(message, str):
            kind = NotThere if answer.status_code == 404 else ServerError
            return kind(" ".join(message.split()))
        return ServerError(f"{self.url}{route} answered {answer.status_code}: look into its log")


def _json_of(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None
