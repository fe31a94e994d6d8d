"""``/kv_importance/tree``, ``node``, ``find`` and ``events``: what the live page shows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.scheduler_client import ask, json_body, validated
from sglang_importance.operations.tree_view import DEFAULT_DEPTH, DEFAULT_LIMIT, MAX_LIMIT
from sglang_importance.tree.event_log import CAPACITY


class TreeQuery(BaseModel):
    """Query parameters of ``GET /kv_importance/tree``.

    Attributes:
        root: node to begin with; without it, the root.
        depth: levels of nodes.
        min_tokens: nodes that hold fewer, themselves and below, are only counted.
        limit: nodes to list; the others are only counted.
    """

    model_config = ConfigDict(extra="forbid")

    root: int | None = Field(None, ge=0)
    depth: int = Field(DEFAULT_DEPTH, ge=1)
    min_tokens: int = Field(0, ge=0)
    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT)


class EventsQuery(BaseModel):
    """Query parameters of ``GET /kv_importance/events``.

    Attributes:
        since: serial number of the first event that is wanted: ``next`` of the answer before.
        limit: events at most; of more, the newest.
    """

    model_config = ConfigDict(extra="forbid")

    since: int = Field(0, ge=0)
    limit: int = Field(200, ge=1, le=CAPACITY)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_tree(request: Request) -> dict[str, Any]:
    """The radix tree from its root: the largest nodes, and the size of what is left out."""
    query = validated(TreeQuery, dict(request.query_params))
    document = await ask("tree", query.model_dump())
    for row in document["nodes"]:
        row["label"] = _label(tuple(row.pop("leading_ids")))
    return document


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_node(node_id: int) -> dict[str, Any]:
    """One node: pages, queries, pins, the reason of its last move, its text."""
    document = await ask("node", {"node": node_id})
    head, tail = document.pop("head_ids"), document.pop("tail_ids")
    page_tokens = document["tokens"] // document["pages"] * document["strip"]["pages_per_cell"]
    cells = [head[start : start + page_tokens] for start in range(0, len(head), page_tokens)]
    document["text"] = {
        "cells": [_decode(cell) for cell in cells],
        "tail": _decode(tail),
        "omitted_tokens": document["tokens"] - len(head) - len(tail),
    }
    return document


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_node_prompt(node_id: int) -> dict[str, Any]:
    """The prefix that ends with a node, as a body for pin and pre-warm."""
    return await ask("node_prompt", {"node": node_id})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def post_find(request: Request) -> dict[str, Any]:
    """Where a prompt lies in the tree. Not a GET: prompts do not belong into access logs."""
    body = validated(Prompt, await json_body(request))
    extra_key, cache_salt = body.namespace
    tokens = await prompt_tokens(body, request)
    return await ask("find", {"tokens": tokens, "extra_key": extra_key, "cache_salt": cache_salt})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_events(request: Request) -> dict[str, Any]:
    """The last moves of nodes, oldest first."""
    return await ask("events", validated(EventsQuery, dict(request.query_params)).model_dump())


def _decode(ids: list[int]) -> str:
    tokenizer = get_global_state().tokenizer_manager.tokenizer
    if tokenizer is None:  # --skip-tokenizer-init
        return " ".join(map(str, ids))
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@lru_cache(maxsize=4096)
def _label(ids: tuple[int, ...]) -> str:
    return _decode(list(ids))
