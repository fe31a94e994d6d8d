"""``GET /kv_importance``: the radix tree with its importance."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_importance.http.scheduler_client import ask, validated
from sglang_importance.operations.snapshot import DEFAULT_LIMIT, MAX_LIMIT


class SnapshotQuery(BaseModel):
    """Query parameters.

    Attributes:
        limit: nodes in this page.
        cursor: ``next_cursor`` of the page before.
        min_tokens: leaves out nodes with fewer tokens.
    """

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)
    cursor: str | None = None
    min_tokens: int = Field(0, ge=0)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_kv_importance(request: Request) -> dict[str, Any]:
    """The radix tree with its importance: nodes by loss, largest first."""
    query = validated(SnapshotQuery, dict(request.query_params))
    return await ask("snapshot", query.model_dump())
