"""``/kv_importance/pin``, ``unpin`` and ``pins``: prefixes that are evicted last."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from sgl_importance.placement.ledger.steady_time import steady_time
from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.scheduler_client import OfRank, ask, json_body, validated
from sglang_importance.http.server_state import server_arguments, wants_key

MAX_TTL_SECONDS = 10 * 366 * 86_400.0


class PinBody(Prompt):
    """Body of ``POST /kv_importance/pin``."""

    ttl_seconds: float | None = Field(
        None,
        gt=0,
        le=MAX_TTL_SECONDS,
        description="How long the pin counts; without it, until it is unpinned or nobody uses it any more.",
    )
    pin_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Its name, so that several servers can hold one pin; without it, a new one.",
    )


class UnpinBody(BaseModel):
    """Body of ``POST /kv_importance/unpin``."""

    model_config = ConfigDict(extra="forbid")

    pin_id: str = Field(min_length=1, description="As the answer to ``pin`` named it.")


@wants_key
async def post_pin(request: Request) -> dict[str, Any]:
    """Pins a prefix, so that it is evicted last.

    Answers ``pin_id``, the ``tokens`` of its whole pages, and by tier the ``granted_tokens`` that the
    budget has room for. 400 under ``--kv-policy observe``, where a pin would move nothing, and beyond the
    bounds of the table. Of several data-parallel ranks each holds the pin: ``dp_ranks`` says what it grants.
    """
    body = validated(PinBody, await json_body(request))
    tokens = await prompt_tokens(body, request)
    page_size = server_arguments().page_size
    if len(tokens) < page_size:
        problem = f"{len(tokens)} tokens are less than one page of {page_size}: there is nothing to pin"
        raise HTTPException(status_code=400, detail=f"{body.form}: {problem}")
    extra_key, cache_salt = body.namespace
    # Name and end are decided here, so that every scheduler is told the same.
    pin = {
        "pin_id": body.pin_id or uuid.uuid4().hex,
        "tokens": tokens,
        "extra_key": extra_key,
        "cache_salt": cache_salt,
        "expires_at": None if body.ttl_seconds is None else steady_time() + body.ttl_seconds,
    }
    answer = await ask("pin", pin, request=request)
    if "dp_ranks" not in answer:
        return answer
    held = [each for each in answer["dp_ranks"] if each is not None]
    return {**held[0], **answer}


@wants_key
async def post_unpin(request: Request) -> dict[str, Any]:
    """Ends a pin, and answers its ``pin_id``; 404 where there is none."""
    body = validated(UnpinBody, await json_body(request))
    await ask("unpin", body.model_dump(), request=request)
    return {"pin_id": body.pin_id}


@wants_key
async def get_pins(request: Request) -> dict[str, Any]:
    """Every pin, oldest first, and the budget by tier.

    Answers ``pins``, each with ``pin_id``, ``source`` (who asked for it), its namespace, ``tokens``,
    ``granted_tokens`` and ``resident_tokens`` by tier, ``strength`` (1 when it was last used),
    ``expires_in_seconds`` and ``survives_restart``; and ``budget``.
    """
    dp_rank = validated(OfRank, dict(request.query_params)).dp_rank
    return await ask("pins", {}, dp_rank, request=request)
