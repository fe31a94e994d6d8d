"""Grades an OpenAI-compatible server on the retrieval tasks: greedy answers, exact match."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from sgl_importance.probe.tasks import ProbeTask, make_task

_ANSWER_TOKENS = 8
_CONNECT_SECONDS = 5.0


class ServerError(Exception):
    """The server cannot be graded; the message says why and what to do."""


@dataclass(frozen=True)
class EvalRow:
    """Share of exact answers over `n` prompts of one task at one length (tokens of the probe's tokenizer)."""

    task: str
    length: int
    unseen_names: bool
    n: int
    exact_match: float


@dataclass(frozen=True)
class EvalPlan:
    """The prompts to ask. Prompt k of a cell has seed `seed + k`: the same plan, the same prompts."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    n: int
    seed: int = 0

    @property
    def prompts(self) -> int:
        return len(self.tasks) * len(self.lengths) * 2 * self.n

    def cells(self) -> Iterator[tuple[str, int, bool]]:
        """Task, length, and whether the asked names are unseen ones, in the order of the rows."""
        for task in self.tasks:
            for length in self.lengths:
                for unseen_names in (False, True):
                    yield task, length, unseen_names

    def cell_tasks(self, cell: tuple[str, int, bool]) -> list[ProbeTask]:
        task, length, unseen_names = cell
        return [make_task(task, length, self.seed + index, unseen_names) for index in range(self.n)]


class ProbeClient:
    """Asks one server; use as an async context manager. Every failure is a ServerError."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 120.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        try:
            self._client = httpx.AsyncClient(
                base_url=self.base_url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise self._no_url() from error

    async def __aenter__(self) -> ProbeClient:
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

    async def answer(self, model: str, messages: list[dict[str, str]]) -> str:
        """The greedy answer to a chat, without the spaces around it."""
        reply = await self._request(
            "POST",
            "/v1/chat/completions",
            {"model": model, "messages": messages, "temperature": 0, "max_tokens": _ANSWER_TOKENS},
        )
        try:
            return (reply["choices"][0]["message"]["content"] or "").strip()
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._not_openai() from error

    def _no_url(self) -> ServerError:
        return ServerError(f"{self.base_url!r} is no URL: give --url one like http://127.0.0.1:30000")

    def _not_openai(self) -> ServerError:
        return ServerError(f"{self.base_url} does not answer like an OpenAI-compatible server: check --url")

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except UnicodeEncodeError as error:
            raise ServerError(f"{ascii(error.object)[:40]} is no text in UTF-8: correct it") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
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
        except ValueError as error:
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


async def evaluate(
    client: ProbeClient, plan: EvalPlan, concurrency: int, on_answer: Callable[[], None] = lambda: None
) -> list[EvalRow]:
    """Asks every prompt of `plan`, at most `concurrency` at a time; the rows come in the order of its cells.

    Calls `on_answer` after each answer. Raises ServerError at the first request that fails, and asks no more.
    """
    model = await client.model()
    free = asyncio.Semaphore(concurrency)

    async def grade(task: ProbeTask) -> bool:
        async with free:
            answer = await client.answer(model, task.messages)
        on_answer()
        return answer == task.answer

    rows = []
    for cell in plan.cells():
        async with task_group() as group:
            grades = [group.create_task(grade(task)) for task in plan.cell_tasks(cell)]
        task, length, unseen_names = cell
        exact_match = sum(grade.result() for grade in grades) / plan.n
        rows.append(EvalRow(task, length, unseen_names, plan.n, exact_match))
    return rows
