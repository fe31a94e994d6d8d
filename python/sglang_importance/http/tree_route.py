"""``/kv_importance/tree``, ``node``, ``find`` and ``events``: what the live page shows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.scheduler_client import OfRank, answers_in, ask, json_body, validated
from sglang_importance.http.server_state import wants_key
from sglang_importance.http.token_text import text_of
from sglang_importance.http.volatile_text import write_out_beginnings
from sglang_importance.operations.tree_view import DEFAULT_DEPTH, DEFAULT_LIMIT, MAX_LIMIT
from sglang_importance.tree.event_log import CAPACITY


class TreeQuery(OfRank):
    """Query parameters of ``GET /kv_importance/tree``."""

    root: int | None = Field(None, ge=0, description="Node to begin with; without it, the root.")
    depth: int = Field(DEFAULT_DEPTH, ge=1, description="Levels of nodes.")
    min_tokens: int = Field(
        0, ge=0, description="Nodes that hold fewer, themselves and below, are only counted."
    )
    limit: int = Field(
        DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Nodes to list; the others are only counted."
    )


class NodePath(BaseModel):
    """Path parameters of ``GET /kv_importance/node/{node_id}`` and of its prompt."""

    model_config = ConfigDict(extra="forbid")

    node_id: int = Field(description="Of a node that the tree or its events named.")


class EventsQuery(OfRank):
    """Query parameters of ``GET /kv_importance/events``."""

    since: int = Field(
        0, ge=0, description="Serial number of the first event that is wanted: ``next`` of the answer before."
    )
    limit: int = Field(200, ge=1, le=CAPACITY, description="Events at most; of more, the newest.")


@wants_key
async def get_tree(request: Request) -> dict[str, Any]:
    """The radix tree from its root: the largest nodes, and the size of what is left out.

    Answers ``nodes``, parents first, each as in ``GET /kv_importance`` with a ``label`` and what hangs
    below it (``subtree``); ``more`` counts what is left out at each place, ``total`` the whole tree.
    ``ages``, ``volatile``, and ``store_tiers`` where a chain of storage tiers is used, are those of ``GET
    /kv_importance``.
    """
    query = validated(TreeQuery, dict(request.query_params))
    document = await ask("tree", query.model_dump(exclude={"dp_rank"}), query.dp_rank, request=request)
    for each in answers_in(document):
        write_out_beginnings(each)
        for row in each["nodes"]:
            row["label"] = _label(tuple(row.pop("leading_ids")))
    return document


@wants_key
async def get_node(request: Request) -> dict[str, Any]:
    """One node in full.

    Answers what ``GET /kv_importance`` says of it, its ``path``, ``digest``, ``block_type``, ``pins``,
    ``last_move`` with the reason, a ``strip`` of page scores, and its ``text``. 404 once it has left the
    tree.
    """
    document = await _ask_node("node", request)
    for each in answers_in(document):
        _write_out(each)
    return document


def _write_out(document: dict[str, Any]) -> None:
    """Puts a node's text in the place of its tokens."""
    head, tail = document.pop("head_ids"), document.pop("tail_ids")
    page_tokens = document["tokens"] // document["pages"] * document["strip"]["pages_per_cell"]
    cells = [head[start : start + page_tokens] for start in range(0, len(head), page_tokens)]
    document["text"] = {
        "cells": [text_of(cell) for cell in cells],
        "tail": text_of(tail),
        "omitted_tokens": document["tokens"] - len(head) - len(tail),
    }


@wants_key
async def get_node_prompt(request: Request) -> dict[str, Any]:
    """The prefix that ends with a node, as a body for ``pin`` and ``prewarm``."""
    return await _ask_node("node_prompt", request)


async def _ask_node(operation: str, request: Request) -> dict[str, Any]:
    query = validated(OfRank, dict(request.query_params))
    node = {"node": validated(NodePath, request.path_params).node_id}
    return await ask(operation, node, query.dp_rank, request=request)


@wants_key
async def post_find(request: Request) -> dict[str, Any]:
    """Where a prompt lies in the tree. Not a GET: prompts do not belong into access logs.

    Answers ``tokens``, ``matched_tokens`` and the ``path`` of nodes that holds most of it, in any
    namespace unless ``cache_salt`` or ``extra_key`` is given.
    """
    body = validated(Prompt, await json_body(request))
    extra_key, cache_salt = body.namespace
    tokens = await prompt_tokens(body, request)
    prompt = {"tokens": tokens, "extra_key": extra_key, "cache_salt": cache_salt}
    dp_rank = validated(OfRank, dict(request.query_params)).dp_rank
    return await ask("find", prompt, dp_rank, request=request)


@wants_key
async def get_events(request: Request) -> dict[str, Any]:
    """The last moves of nodes and pins, oldest first.

    Answers ``events``, ``next`` (the serial number to go on with), ``left_out`` (how many were missed),
    ``clock`` and ``now``. An event has a ``kind``, a ``node`` or a ``pin_id``, its ``tier`` and the
    ``reason``.
    """
    query = validated(EventsQuery, dict(request.query_params))
    return await ask("events", query.model_dump(exclude={"dp_rank"}), query.dp_rank, request=request)


@lru_cache(maxsize=4096)
def _label(ids: tuple[int, ...]) -> str:
    return text_of(list(ids))
