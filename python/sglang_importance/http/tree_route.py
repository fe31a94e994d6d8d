"""Routes that read the tree and what it remembers: for the live page, the operator and other caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sgl_importance.nodes.digests import DIGEST_BYTES
from sgl_importance.observe.volatile.volatile_place import CURE, sentence
from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.scheduler_client import OfRank, answers_in, ask, json_body, validated
from sglang_importance.http.server_state import tokenizer_manager, wants_key
from sglang_importance.operations import snapshot, tree_view
from sglang_importance.operations.page_importance import MAX_KEYS
from sglang_importance.tree.event_log import CAPACITY


class SnapshotQuery(OfRank):
    """Query parameters of ``GET /kv_importance``."""

    limit: int = Field(snapshot.DEFAULT_LIMIT, ge=1, le=snapshot.MAX_LIMIT, description="Nodes in this page.")
    cursor: str | None = Field(None, description="``next_cursor`` of the page before.")
    min_tokens: int = Field(0, ge=0, description="Leaves out nodes with fewer tokens.")


@wants_key
async def get_kv_importance(request: Request) -> dict[str, Any]:
    """The radix tree with its importance: nodes by loss, largest first.

    Answers ``policy``, ``page_size``, ``clock`` (admitted requests), ``tiers``, ``hits`` (tokens by tier
    since the start), ``faults`` (``counts`` by place, and the ``fallback`` to LRU or null), ``ages`` (of
    what is asked for again, evicted and held, in seconds, and a ``sentence``), ``volatile`` (places where the
    text of prompts changes with each request, and what that costs), ``nodes`` and ``next_cursor``, null on
    the last page; under ``observe`` also ``observe``, with a ledger ``ledger``
    (``place``, ``is_written``, ``lost_visits``), with a store ``store``, with tiered pages ``pages`` (what
    the device holds of them, and what has moved). Each node has its place (``id``, ``parent``,
    ``depth_tokens``, ``tokens``, ``tiers``), what attention gave it (``body_mass``, ``peak``, ``self_mass``,
    ``cross_mass``, ``queries``), and what the policy makes of it (``accesses``, ``answer_end``,
    ``age``, ``p_reuse``, ``loss``, ``pinned``). ``answer_end`` says how the answer of the last request on
    its path ended: ``tool_call``, ``end_of_turn``, ``length``, ``abort`` or ``unknown``.
    """
    document = await _ask_by_query("snapshot", SnapshotQuery, request)
    for each in answers_in(document):
        write_out_beginnings(each)
    return document


class TreeQuery(OfRank):
    """Query parameters of ``GET /kv_importance/tree``."""

    root: int | None = Field(None, ge=0, description="Node to begin with; without it, the root.")
    depth: int = Field(tree_view.DEFAULT_DEPTH, ge=1, description="Levels of nodes.")
    min_tokens: int = Field(
        0, ge=0, description="Nodes that hold fewer, themselves and below, are only counted."
    )
    limit: int = Field(
        tree_view.DEFAULT_LIMIT,
        ge=1,
        le=tree_view.MAX_LIMIT,
        description="Nodes to list; the others are only counted.",
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
    document = await _ask_by_query("tree", TreeQuery, request)
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
    namespace unless ``cache_salt`` or ``extra_key`` is given: an empty one is that of requests without.
    """
    body, prompt = await _prompt_in(request)
    prompt["any_namespace"] = body.cache_salt is None and body.extra_key is None
    return await _ask_rank("find", prompt, request)


@wants_key
async def get_events(request: Request) -> dict[str, Any]:
    """The last moves of nodes and pins, oldest first.

    Answers ``events``, ``next`` (the serial number to go on with), ``left_out`` (how many were missed),
    ``clock`` and ``now``. An event has a ``kind``, a ``node`` or a ``pin_id``, its ``tier`` and the
    ``reason``.
    """
    return await _ask_by_query("events", EventsQuery, request)


@lru_cache(maxsize=4096)
def _label(ids: tuple[int, ...]) -> str:
    return text_of(list(ids))


def text_of(ids: Sequence[int]) -> str:
    """The text; the numbers themselves where there is no tokenizer, or none for these."""
    tokenizer = tokenizer_manager().tokenizer
    if tokenizer is None:  # --skip-tokenizer-init
        return _numbers(ids)
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))
    except Exception:  # a model may have more ids than its tokenizer; some raise at those
        return _numbers(ids)


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def write_out_beginnings(document: dict[str, Any]) -> None:
    """
    Args:
        document: of one rank; each of its ``volatile`` gets ``before``, ``variants`` and ``after`` as texts,
            a ``sentence`` that says what happens, and a ``cure``.
    """
    for place in document["volatile"]:
        place["before"], place["after"] = text_of(place.pop("before_ids")), text_of(place.pop("after_ids"))
        place["variants"] = [text_of(ids) for ids in place.pop("variants_ids")]
        place |= {"sentence": sentence(place), "cure": CURE}


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
    return _written_out(await _ask_by_query("why", WhyQuery, request))


@wants_key
async def post_why(request: Request) -> dict[str, Any]:
    """What a request with this prompt would not find now, and why; nothing is computed or changed.

    Answers as ``GET``, with one request. Storage is not asked.
    """
    _, prompt = await _prompt_in(request)
    return _written_out(await _ask_rank("why_prompt", prompt, request))


def _written_out(document: dict[str, Any]) -> dict[str, Any]:
    """With text in the place of token ids."""
    for each in answers_in(document):
        for row in each["requests"]:
            if (parted := row["parted"]) is not None:
                for side in ("before", "asked", "known"):
                    parted[side] = text_of(parted.pop(f"{side}_ids"))
    return document


Digest = Annotated[str, StringConstraints(pattern=f"^[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}$")]


class ImportanceBody(BaseModel):
    """Body of ``POST /kv_importance/importance``."""

    model_config = ConfigDict(extra="forbid")

    keys: list[Digest] = Field(
        max_length=MAX_KEYS, fail_fast=True, description="Chained digests of pages, hexadecimal."
    )


@wants_key
async def post_importance(request: Request) -> dict[str, Any]:
    """What is known of each page.

    Answers ``version``, ``page_size`` and ``importance`` in the order of the keys: an object of the
    specification, or null where the page is unknown.
    """
    body = validated(ImportanceBody, await json_body(request))
    return await _ask_rank("importance", body.model_dump(), request)


async def _ask_by_query(operation: str, model: type[OfRank], request: Request) -> dict[str, Any]:
    """An operation whose arguments are the query of its route."""
    query = validated(model, dict(request.query_params))
    return await ask(operation, query.model_dump(exclude={"dp_rank"}), query.dp_rank, request=request)


async def _prompt_in(request: Request) -> tuple[Prompt, dict[str, Any]]:
    """The body of a route, and its prompt as an operation takes it."""
    body = validated(Prompt, await json_body(request))
    extra_key, cache_salt = body.namespace
    tokens = await prompt_tokens(body, request)
    return body, {"tokens": tokens, "extra_key": extra_key, "cache_salt": cache_salt}


async def _ask_rank(operation: str, arguments: dict[str, Any], request: Request) -> dict[str, Any]:
    """An operation of the rank that the query of its route names, or of all."""
    dp_rank = validated(OfRank, dict(request.query_params)).dp_rank
    return await ask(operation, arguments, dp_rank, request=request)
