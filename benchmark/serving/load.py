"""Sends a workload through the OpenAI-compatible API, and measures what comes back.

One request at a time gives the deterministic quantities: with several in flight, the order in which they
finish, and so the tree, would hang on the machine. Open loop gives the times: arrivals do not wait for
answers, but for a turn of a conversation the answer to the turn before. ``sglang.bench_serving`` has no
workload with fixed turns at fixed times, and does not tell the cached tokens of each answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from sgl_importance.placement.hints.hints import FIELD
from sgl_importance_lab.workload.workload_request import WorkloadRequest

REQUEST_SECONDS = 300.0
REST_SECONDS = 0.03


class LoadError(RuntimeError):
    """A request failed; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request; seconds from its arrival.

    Attributes:
        late: time between its arrival and its being sent: it waited for its conversation.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    late: float
    first_token: float
    last_token: float
    correct: bool | None


def send_in_order(
    base_url: str,
    model: str,
    requests: Sequence[WorkloadRequest],
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """One request at a time, in order."""

    async def run() -> list[Answer]:
        answers = []
        async with _client(base_url) as client:
            for request in requests:
                answers.append(await _send(client, model, request, time.perf_counter()))
                on_answer()
        return answers

    return asyncio.run(run())


def send_in_turns(
    targets: Mapping[str, tuple[str, str]], requests: Sequence[WorkloadRequest]
) -> dict[str, list[Answer]]:
    """Each request to every target before the next one, in an order drawn anew for each request.

    A server goes on working behind its answer. So the next request waits ``REST_SECONDS``, and no target
    comes behind a certain other one more often than chance has it.

    Args:
        targets: base URL and model, by name.
    """
    order = Random(0)

    async def run() -> dict[str, list[Answer]]:
        answers: dict[str, list[Answer]] = {name: [] for name in targets}
        async with AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(_client(url)) for name, (url, _) in targets.items()
            }
            for request in requests:
                for name in order.sample(list(targets), len(targets)):
                    model = targets[name][1]
                    answers[name].append(await _send(clients[name], model, request, time.perf_counter()))
                    await asyncio.sleep(REST_SECONDS)
        return answers

    return asyncio.run(run())


def send_open_loop(
    base_url: str,
    model: str,
    requests: Sequence[WorkloadRequest],
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Each request at its arrival time; a turn not before the answer to the one before it."""

    async def run() -> list[Answer]:
        before: dict[str, asyncio.Task[Answer]] = {}
        tasks = []
        async with _client(base_url) as client, asyncio.TaskGroup() as group:
            start = time.perf_counter()

            async def one(request: WorkloadRequest, earlier: asyncio.Task[Answer] | None) -> Answer:
                arrival = start + request.seconds
                await asyncio.sleep(arrival - time.perf_counter())
                if earlier is not None:
                    await asyncio.wait([earlier])
                answer = await _send(client, model, request, arrival)
                on_answer()
                return answer

            for request in requests:
                task = group.create_task(one(request, before.get(request.session)))
                before[request.session] = task
                tasks.append(task)
        return [task.result() for task in tasks]

    return asyncio.run(run())


def _client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=REQUEST_SECONDS, trust_env=False, limits=limits)


async def _send(client: httpx.AsyncClient, model: str, request: WorkloadRequest, arrival: float) -> Answer:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": request.max_tokens,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.prompt:
        path, body["prompt"] = "/v1/completions", request.prompt
    else:
        path, body["messages"] = "/v1/chat/completions", request.messages
    if request.hints:
        body[FIELD] = request.hints
    sent = time.perf_counter()
    pieces: list[str] = []
    first = last = None
    usage = None
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.is_error:
                await response.aread()
                raise LoadError(f"{request.id}: status {response.status_code}: {response.text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                if not chunk.get("choices"):
                    continue
                last = time.perf_counter()  # tokens that decode to no text count too
                choice = chunk["choices"][0]
                text = choice["text"] if request.prompt else choice["delta"].get("content")
                if text or request.prompt:  # a chat's first chunk only names the role
                    first = first or last
                    pieces.append(text)
    except httpx.HTTPError as error:
        raise LoadError(f"{request.id}: {error or type(error).__name__}") from error
    if usage is None:
        raise LoadError(f"{request.id}: the answer tells no usage; is it an sglang server?")
    done = time.perf_counter()
    text = "".join(pieces).strip()
    return Answer(
        text=text,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage["completion_tokens"],
        late=sent - arrival,
        first_token=(first or done) - arrival,
        last_token=(last or done) - arrival,
        correct=None if request.answer is None or request.ignore_eos else text == request.answer,
    )
