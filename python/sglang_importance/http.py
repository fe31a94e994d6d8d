"""Routes that we add to sglang's own HTTP server, under its own API key."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_importance.control import COMMUNICATOR, KvImportanceReq
from sglang_importance.snapshot import DEFAULT_LIMIT, MAX_LIMIT


class SnapshotQuery(BaseModel):
    """Query parameters of ``GET /kv_importance``.

    Attributes:
        limit: nodes in this page.
        cursor: ``next_cursor`` of the page before.
        min_tokens: leaves out nodes with fewer tokens.
    """

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)
    cursor: str | None = None
    min_tokens: int = Field(0, ge=0)

    @classmethod
    def of(cls, request: Request) -> SnapshotQuery:
        """Parses a request; a bad parameter is answered with 400 and its name, without our source code."""
        try:
            return cls.model_validate(dict(request.query_params))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise HTTPException(status_code=400, detail="; ".join(problems)) from None


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_kv_importance(request: Request) -> dict[str, Any]:
    """The radix tree with its importance: nodes by loss, largest first."""
    query = SnapshotQuery.of(request)
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    communicate = getattr(manager, f"{COMMUNICATOR}_communicator")
    message = KvImportanceReq(limit=query.limit, cursor=query.cursor, min_tokens=query.min_tokens)
    (reply,) = await communicate(message)
    while reply.job is not None:
        (reply,) = await communicate(KvImportanceReq(job=reply.job))
    if reply.error is not None:
        raise HTTPException(status_code=400, detail=reply.error)
    document: dict[str, Any] = json.loads(reply.document)
    return document


def install_routes(app: FastAPI) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    app.get("/kv_importance", tags=["importance"])(get_kv_importance)
