"""sglang's ``/close_session``, for every session that requests name: what only it asked for is given back.

sglang itself knows the sessions that ``/open_session`` opened; its handler closes these, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import signature
from typing import Any

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from sglang_importance.http.adapter_namespaces import namespace_of
from sglang_importance.http.requests.fields.text_rules import MAX_NAME
from sglang_importance.http.scheduler_client import ask, validated
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

Endpoint = Callable[..., Awaitable[Any]]


class CloseBody(BaseModel):
    """Body of ``POST /close_session``. sglang's has ``session_id`` alone; others are ignored as there."""

    model_config = ConfigDict(extra="ignore", strict=True)

    session_id: str = Field(min_length=1, max_length=MAX_NAME)
    cache_salt: str | None = Field(None, max_length=MAX_NAME, description="As the session's requests had it.")
    extra_key: str | None = Field(None, max_length=MAX_NAME, description="As the session's requests had it.")
    lora_path: str | None = Field(None, max_length=MAX_NAME, description="As the session's requests had it.")
    at_once: bool = Field(False, description="Frees the session's own KV now, instead of evicting it first.")


def closing(endpoint: Endpoint) -> Endpoint:
    """sglang's handler of the route, with ours in front."""

    @wraps(endpoint)
    async def close_session(obj: Any, request: Request) -> Any:
        manager = tokenizer_manager()
        if importance_options(manager.server_args) is None:
            return await endpoint(obj, request)
        body = validated(CloseBody, await request.json())
        name = {
            "session_id": body.session_id,
            "extra_key": namespace_of(body.extra_key, body.lora_path, manager),
            "cache_salt": body.cache_salt or None,
            "at_once": body.at_once,
        }
        try:
            answer = await ask("close_session", name)  # also for a client that has hung up, or when many wait
        except HTTPException:
            await endpoint(obj, request)  # a fault of ours keeps no session of sglang open
            raise
        ranks = [each for each in answer.get("dp_ranks", [answer]) if each is not None]
        if any(each.pop("is_opened") for each in ranks):
            await endpoint(obj, request)
        return answer

    close_session.__signature__ = signature(endpoint, eval_str=True)  # type: ignore[attr-defined]  # FastAPI reads it
    return close_session
