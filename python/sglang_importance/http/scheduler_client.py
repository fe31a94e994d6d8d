"""From an HTTP request to a scheduler and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.operations.messages import KvImportanceReqOutput, ask_schedulers
from sglang_importance.operations.runner import MAX_JOBS

M = TypeVar("M", bound=BaseModel)

MAX_WAITING = 256
"""Questions of requests that wait for a place; further ones are refused."""
TOLD_ERRORS = 8
"""Of a body, the first; a client that mends these sees the next."""
LISTED_ERRORS = 1000
"""Of a body: pydantic lists all of them or none, and a million take 20 s."""
GONE = 499
"""Status of a request whose caller has hung up; nobody reads it."""

_places = asyncio.Semaphore(MAX_JOBS)
# asyncio itself keeps tasks by weak references.
_under_way: set[asyncio.Task[list[KvImportanceReqOutput]]] = set()


def validated(model: type[M], values: Any) -> M:
    """Parses what a caller sent; what is wrong is answered with 400 and the fields' names, without our code.

    Raises:
        HTTPException: a field is wrong, missing or unknown.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise HTTPException(status_code=400, detail=_problems(error)) from None


def _problems(error: ValidationError) -> str:
    if (count := error.error_count()) > LISTED_ERRORS:
        return f"{count} fields or elements are wrong: compare the body with what this route takes"
    return "; ".join(
        ": ".join(filter(None, (_field(each), each["msg"].removeprefix("Value error, "))))
        for each in error.errors()[:TOLD_ERRORS]
    )


async def json_body(request: Request) -> Any:
    """The body of a request.

    Raises:
        HTTPException: 415, it is sent as something else, as any web page may; 400, the body is not JSON.
    """
    sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent_as != "application/json":
        raise HTTPException(
            status_code=415,
            detail=f"Content-Type: application/json is wanted, not {sent_as or 'nothing'}",
        )
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise HTTPException(status_code=400, detail="the body is not JSON") from None


def _field(error: Mapping[str, Any]) -> str:
    return ".".join(map(str, error["loc"]))


class OfRank(BaseModel):
    """Query parameter of the routes that read."""

    model_config = ConfigDict(extra="forbid")

    # Described by an argument, as in the other models: to find docstrings below fields pydantic searches
    # every module, 0.4 s of each process.
    dp_rank: int | None = Field(
        None,
        ge=0,
        description="Data-parallel rank that is asked. Without it all are: where they are several, "
        "`dp_ranks` lists their answers, null from one that refuses.",
    )


async def ask(
    operation: str, arguments: dict[str, Any], dp_rank: int | None = None, *, request: Request | None = None
) -> dict[str, Any]:
    """The scheduler's answer to an operation of ``handlers.OPERATIONS``.

    Args:
        dp_rank: whose answer; None for all: where they are several, ``dp_ranks`` lists what each says, None
            where it refuses.
        request: whose question it is; None for our own.

    Raises:
        HTTPException: all refused, or the rank in question did; the first's message and status. 503, too many
            requests wait.
    """
    replies = await ask_each(operation, arguments, request)
    if dp_rank is None and len(replies) > 1:
        if all(reply.error is not None for reply in replies):
            document_of(replies[0])
        return {"dp_ranks": [None if reply.error is not None else document_of(reply) for reply in replies]}
    rank = dp_rank or 0
    if rank >= len(replies):
        problem = f"dp_rank: there is no rank {rank}, the last one is {len(replies) - 1}"
        raise HTTPException(status_code=400, detail=problem)
    return document_of(replies[rank])


def answers_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank said in an answer of ``ask``."""
    return [each for each in document.get("dp_ranks", [document]) if each is not None]


def document_of(reply: KvImportanceReqOutput) -> dict[str, Any]:
    """What a rank answered.

    Raises:
        HTTPException: it refused; its message and status.
    """
    if reply.error is not None:
        raise HTTPException(status_code=reply.status, detail=reply.error)
    document: dict[str, Any] = json.loads(reply.document)
    return document


async def ask_each(
    operation: str, arguments: dict[str, Any], request: Request | None = None
) -> list[KvImportanceReqOutput]:
    """The answers of all data-parallel ranks, in order.

    While MAX_JOBS others are under way, callers wait, first come, first served. A cancelled caller does not
    stop what it began: sglang's communicator would give the reply to whoever asks next, and the scheduler
    would keep a job that nobody goes on with. What it did not begin yet is dropped: while a scheduler is busy
    with a long step callers run out of time and ask again, and it would work through all of them afterwards.

    Raises:
        HTTPException: 503, too many requests wait; 499, this one's caller has gone.
    """
    if request is not None and len(_under_way) >= MAX_JOBS + MAX_WAITING:
        raise HTTPException(
            status_code=503, detail="too many questions wait for the scheduler: ask again later"
        )
    task = asyncio.create_task(_answers(operation, arguments, request))
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    return await asyncio.shield(task)


async def _answers(
    operation: str, arguments: dict[str, Any], request: Request | None
) -> list[KvImportanceReqOutput]:
    async with _places:
        if request is not None and await request.is_disconnected():
            raise HTTPException(status_code=GONE, detail="the caller has gone")
        return await ask_schedulers(tokenizer_manager(), operation, arguments)
