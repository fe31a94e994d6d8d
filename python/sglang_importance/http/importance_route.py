"""``POST /kv_importance/importance``: what is known of pages, by their chained digests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sglang.srt.utils.auth import AuthLevel, auth_level

from sgl_importance.ghost import DIGEST_BYTES
from sglang_importance.http.scheduler_client import ask, json_body, validated
from sglang_importance.operations.page_importance import MAX_KEYS

Digest = Annotated[str, StringConstraints(pattern=f"^[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}$")]


class ImportanceBody(BaseModel):
    """Body of ``POST /kv_importance/importance``.

    Attributes:
        keys: chained digests of pages, hexadecimal.
    """

    model_config = ConfigDict(extra="forbid")

    keys: list[Digest] = Field(max_length=MAX_KEYS)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def post_importance(request: Request) -> dict[str, Any]:
    """What is known of each page, in the order of the keys; null where the page is unknown."""
    return await ask("importance", validated(ImportanceBody, await json_body(request)).model_dump())
