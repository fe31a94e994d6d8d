"""From an HTTP request to a scheduler and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.http_server import get_global_state

from sglang_importance.operations.messages import COMMUNICATOR, KvImportanceReq

M = TypeVar("M", bound=BaseModel)


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
    """Raises:
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
    """The scheduler's answer to an operation of ``control.OPERATIONS``, slice by slice.

    Raises:
        HTTPException: the operation refused; its message and status.
    """
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    communicate = getattr(manager, f"{COMMUNICATOR}_communicator")
    message = KvImportanceReq(operation=operation, arguments=json.dumps(arguments))
    (reply,) = await communicate(message)
    while reply.job is not None:
        (reply,) = await communicate(KvImportanceReq(job=reply.job))
    if reply.error is not None:
        raise HTTPException(status_code=reply.status, detail=reply.error)
    document: dict[str, Any] = json.loads(reply.document)
    return document
