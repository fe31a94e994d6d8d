"""``/kv_importance/why``: why prompts were not found, for the operator."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field

from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.scheduler_client import OfRank, answers_in, ask, json_body, validated
from sglang_importance.http.server_state import wants_key
from sglang_importance.http.token_text import text_of

MAX_REQUESTS = 200


class WhyQuery(OfRank):
    """Query parameters of ``GET /kv_importance/why``."""

    rid: str | None = Field(None, min_length=1, description="Id of one of the last requests.")
    limit: int = Field(20, ge=1, le=MAX_REQUESTS, description="Requests at most, the newest.")


@wants_key
async def get_why(request: Request) -> dict[str, Any]:
    """Why tokens of the last requests were computed and not found, the newest request first.

    Answers ``requests``, each with its ``prompt_tokens``, ``found_tokens`` by tier, ``missed_tokens`` by
    reason, which add up, ``parts`` in order, and where it ``parted`` from the nearest path of its namespace:
    the ``token``, the request that had asked for that path, and the text in front of the place
    (``before``) and behind it (``asked``, ``known``). ``forgot_at``: when the server forgot something last.
    """
    query = validated(WhyQuery, dict(request.query_params))
    document = await ask("why", query.model_dump(exclude={"dp_rank"}), query.dp_rank, request=request)
    return _written_out(document)


@wants_key
async def post_why(request: Request) -> dict[str, Any]:
    """What a request with this prompt would not find now, and why; nothing is computed or changed.

    Answers as ``GET``, with one request. Storage is not asked.
    """
    body = validated(Prompt, await json_body(request))
    extra_key, cache_salt = body.namespace
    tokens = await prompt_tokens(body, request)
    prompt = {"tokens": tokens, "extra_key": extra_key, "cache_salt": cache_salt}
    dp_rank = validated(OfRank, dict(request.query_params)).dp_rank
    return _written_out(await ask("why_prompt", prompt, dp_rank, request=request))


def _written_out(document: dict[str, Any]) -> dict[str, Any]:
    """With text in the place of token ids."""
    for each in answers_in(document):
        for row in each["requests"]:
            if (parted := row["parted"]) is not None:
                for side in ("before", "asked", "known"):
                    parted[side] = text_of(parted.pop(f"{side}_ids"))
    return document
