"""``POST /kv_importance/importance``: what is known of pages, by their chained digests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sgl_importance.nodes.digests import DIGEST_BYTES
from sglang_importance.http.scheduler_client import OfRank, ask, json_body, validated
from sglang_importance.http.server_state import wants_key
from sglang_importance.operations.page_importance import MAX_KEYS

Digest = Annotated[str, StringConstraints(pattern=f"^[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}$")]


class ImportanceBody(BaseModel):
    """Body of ``POST /kv_importance/importance``."""

    model_config = ConfigDict(extra="forbid")

    keys: list[Digest] = Field(max_length=MAX_KEYS, description="Chained digests of pages, hexadecimal.")


@wants_key
async def post_importance(request: Request) -> dict[str, Any]:
    """What is known of each page.

    Answers ``version``, ``page_size`` and ``importance`` in the order of the keys: an object of the
    specification, or null where the page is unknown.
    """
    body = validated(ImportanceBody, await json_body(request))
    dp_rank = validated(OfRank, dict(request.query_params)).dp_rank
    return await ask("importance", body.model_dump(), dp_rank, request=request)
