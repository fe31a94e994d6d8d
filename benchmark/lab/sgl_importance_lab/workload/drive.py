"""Sends a workload to a server, open-loop or closed-loop, and grades the answers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_importance.placement.hints.hints import FIELD
from sgl_importance_lab.probe.chat_client import ChatClient, task_group
from sgl_importance_lab.workload.workload_request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request.

    Attributes:
        text: the answer, without the spaces around it.
        prompt_tokens: as the server counts them.
        cached_tokens: prompt tokens that the server found in its cache; None where it does not say.
        seconds: from sending to the whole answer.
    """

    request: WorkloadRequest
    text: str
    prompt_tokens: int
    cached_tokens: int | None
    seconds: float

    @property
    def correct(self) -> bool | None:
        """Whether the answer is the right one; None where there is none."""
        return None if self.request.answer is None else self.text == self.request.answer


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcomes of one kind.

    Attributes:
        exact_match: share of right answers among requests that have one; None where none has.
        cached_tokens: None where the server does not say.
    """

    kind: str
    requests: int
    exact_match: float | None
    prompt_tokens: int
    cached_tokens: int | None


class WorkloadClient(ChatClient):
    """Sends requests of a workload to an OpenAI-compatible server."""

    async def send(self, model: str, request: WorkloadRequest) -> Outcome:
        """Greedy answer of the server.

        Raises:
            ServerError: it cannot be had.
        """
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": request.max_tokens,
            # sglang's own fields; the request id ties the answer to a recording.
            "rid": request.id,
            "ignore_eos": request.ignore_eos,
        }
        if request.hints:
            body[FIELD] = request.hints
        start = time.perf_counter()
        if request.prompt:
            reply = await self._request("POST", "/v1/completions", {**body, "prompt": request.prompt})
        else:
            messages = {"messages": request.messages}
            reply = await self._request("POST", "/v1/chat/completions", {**body, **messages})
        seconds = time.perf_counter() - start
        try:
            choice, usage = reply["choices"][0], reply["usage"]
            text = choice["text"] if request.prompt else choice["message"]["content"]
            details = usage.get("prompt_tokens_details") or {}
            return Outcome(
                request, (text or "").strip(), usage["prompt_tokens"], details.get("cached_tokens"), seconds
            )
        except (KeyError, IndexError, TypeError) as error:
            raise self._not_openai() from error


async def drive(
    client: WorkloadClient,
    requests: Sequence[WorkloadRequest],
    *,
    concurrency: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Sends every request; turns of one session one after the other, always.

    Args:
        client: used as a context manager here.
        requests: in order of arrival.
        concurrency: requests in flight, started in order (closed loop); None sends each at its arrival time
            (open loop).
        on_answer: called after each answer.

    Raises:
        ServerError: one request failed; the others are abandoned.
    """
    outcomes: dict[str, Outcome] = {}
    before: dict[str, asyncio.Event] = {}
    slots = asyncio.Semaphore(concurrency or len(requests) or 1)
    start = time.perf_counter()

    async def run(
        model: str, request: WorkloadRequest, earlier: asyncio.Event | None, done: asyncio.Event
    ) -> None:
        try:
            if concurrency is None:
                await asyncio.sleep(start + request.seconds - time.perf_counter())
                if earlier is not None:
                    await earlier.wait()
                outcomes[request.id] = await client.send(model, request)
            else:
                try:
                    if earlier is not None:
                        await earlier.wait()
                    outcomes[request.id] = await client.send(model, request)
                finally:
                    slots.release()
            on_answer()
        finally:
            done.set()

    async with client:
        model = await client.model()
        start = time.perf_counter()
        async with task_group() as group:
            for request in requests:
                if concurrency is not None:
                    await slots.acquire()
                done = asyncio.Event()
                group.create_task(run(model, request, before.get(request.session), done))
                before[request.session] = done
    return [outcomes[request.id] for request in requests]


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """One row for each kind, in order of appearance, and one for all."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.request.kind].append(outcome)
    if len(groups) > 1:
        groups["all"] = list(outcomes)
    return [_summary(kind, group) for kind, group in groups.items()]


def _summary(kind: str, outcomes: Sequence[Outcome]) -> Summary:
    graded = [outcome.correct for outcome in outcomes if outcome.correct is not None]
    cached = [outcome.cached_tokens for outcome in outcomes if outcome.cached_tokens is not None]
    return Summary(
        kind=kind,
        requests=len(outcomes),
        exact_match=sum(graded) / len(graded) if graded else None,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        cached_tokens=sum(cached) if cached else None,
    )
