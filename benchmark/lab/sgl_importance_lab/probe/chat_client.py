"""Chats with an OpenAI-compatible server; every failure is one error that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from sgl_importance.cli.server_client import proxy_problem
from sgl_importance.errors import ImportanceError

_CONNECT_SECONDS = 5.0


class ServerError(ImportanceError):
    """The server cannot be graded; the message says why and what to do."""


class ChatClient:
    """Asks one server; use as an async context manager. Every failure is a ServerError."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        try:
            address = httpx.URL(self.base_url)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise self._no_url() from error
        try:
            self._client = httpx.AsyncClient(
                base_url=address,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ServerError(proxy_problem(error)) from error

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The name of the first model that the server serves."""
        listing = await self._request("GET", "/v1/models")
        try:
            return str(listing["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._not_openai() from error

    async def message(
        self, model: str, messages: list[dict[str, str]], max_tokens: int
    ) -> Mapping[str, str | None]:
        """The greedy reply to a chat: the message of the only choice, with its `content` and other fields."""
        reply = await self._request(
            "POST",
            "/v1/chat/completions",
            {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens},
        )
        try:
            message = reply["choices"][0]["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise self._not_openai() from error
        if not isinstance(message, dict):
            raise self._not_openai()
        for field in ("content", "reasoning_content"):
            if not isinstance(message.get(field), str | None):
                raise self._not_openai()
        return message

    def _no_url(self) -> ServerError:
        return ServerError(f"{self.base_url!r} is no URL: give --url one like http://127.0.0.1:30000")

    def _not_openai(self) -> ServerError:
        return ServerError(f"{self.base_url} does not answer like an OpenAI-compatible server: check --url")

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            request = self._client.build_request(method, path, json=body)
        except UnicodeEncodeError as error:
            raise ServerError(f"{ascii(error.object)[:40]} is no text in UTF-8: correct it") from error
        try:
            response = await self._client.send(request)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise self._no_url() from error
        except httpx.ConnectError as error:
            raise ServerError(f"no server answers at {self.base_url}: start one, or correct --url") from error
        except httpx.TimeoutException as error:
            raise ServerError(
                f"{self.base_url} gave no answer within {self._timeout:g} s: raise --timeout"
            ) from error
        except httpx.HTTPError as error:
            raise ServerError(
                f"the connection to {self.base_url} failed: {error or type(error).__name__}"
            ) from error
        if response.status_code in (401, 403):
            raise ServerError(
                f"{self.base_url} refused the key (status {response.status_code}): give --api-key"
            )
        if response.status_code == 404:
            raise self._not_openai()
        if response.is_error:
            reason = " ".join(response.text.split())[:300]
            raise ServerError(f"{self.base_url}{path} answered status {response.status_code}: {reason}")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise self._not_openai() from error


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """As ``asyncio.TaskGroup``; where nothing but requests failed, the first error is raised, in no group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        # Not ``except*``: some releases of Python 3.11 wrap what is raised in it into a group again.
        _, others = errors.split(ServerError)
        if others is not None:
            raise
        raise errors.exceptions[0] from None
