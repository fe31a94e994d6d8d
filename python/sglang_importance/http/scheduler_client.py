"""From an HTTP request to a scheduler and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError

from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.operations.messages import COMMUNICATOR, KvImportanceReq, KvImportanceReqOutput
from sglang_importance.operations.runner import MAX_JOBS

M = TypeVar("M", bound=BaseModel)

_places = asyncio.Semaphore(MAX_JOBS)
_under_way: set[asyncio.Task[KvImportanceReqOutput]] = set()  # asyncio itself keeps tasks by weak references


def validated(model: type[M], values: Any) -> M:
    """Parses what a caller sent; what is wrong is answered with 400 and the fields' names, without our code.

    Raises:
        HTTPException: a field is wrong, missing or unknown.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = (": ".join(filter(None, (_field(each), each["msg"]))) for each in error.errors())
        raise HTTPException(status_code=400, detail="; ".join(problems)) from None


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


async def ask(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The scheduler's answer to an operation of ``messages.OPERATIONS``, slice by slice.

    While MAX_JOBS others are under way, callers wait, first come, first served. A cancelled caller does not
    stop what it began: sglang's communicator would give the reply to whoever asks next, and the scheduler
    would keep a job that nobody goes on with.

    Raises:
        HTTPException: the operation refused; its message and status.
    """
    task = asyncio.create_task(_answer(operation, arguments))
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    reply = await asyncio.shield(task)
    if reply.error is not None:
        raise HTTPException(status_code=reply.status, detail=reply.error)
    document: dict[str, Any] = json.loads(reply.document)
    return document


async def _answer(operation: str, arguments: dict[str, Any]) -> KvImportanceReqOutput:
    manager = tokenizer_manager()
    manager.auto_create_handle_loop()
    communicate = getattr(manager, f"{COMMUNICATOR}_communicator")
    reply: KvImportanceReqOutput
    async with _places:
        (reply,) = await communicate(KvImportanceReq(operation=operation, arguments=json.dumps(arguments)))
        while reply.job is not None:
            (reply,) = await communicate(KvImportanceReq(job=reply.job))
    return reply
