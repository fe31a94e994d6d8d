"""Routes that we add to sglang's own HTTP server, under its own API key."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_importance.control import COMMUNICATOR, KvImportanceReq
from sglang_importance.snapshot import DEFAULT_LIMIT, MAX_LIMIT


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_kv_importance(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="nodes in this page")] = DEFAULT_LIMIT,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
    min_tokens: Annotated[int, Query(ge=0, description="leave out nodes with fewer tokens")] = 0,
) -> dict[str, Any]:
    """The radix tree with its importance: nodes by loss, largest first."""
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    communicate = getattr(manager, f"{COMMUNICATOR}_communicator")
    (reply,) = await communicate(KvImportanceReq(limit=limit, cursor=cursor, min_tokens=min_tokens))
    if reply.error is not None:
        raise HTTPException(status_code=400, detail=reply.error)
    document: dict[str, Any] = json.loads(reply.document)
    return document


def install_routes(app: FastAPI) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    app.get("/kv_importance", tags=["importance"])(get_kv_importance)
