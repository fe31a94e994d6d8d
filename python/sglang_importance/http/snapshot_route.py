"""``GET /kv_importance``: the radix tree with its importance."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import Field

from sglang_importance.http.scheduler_client import OfRank, answers_in, ask, validated
from sglang_importance.http.server_state import wants_key
from sglang_importance.http.volatile_text import write_out_beginnings
from sglang_importance.operations.snapshot import DEFAULT_LIMIT, MAX_LIMIT


class SnapshotQuery(OfRank):
    """Query parameters of ``GET /kv_importance``."""

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description="Nodes in this page.")
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
    query = validated(SnapshotQuery, dict(request.query_params))
    document = await ask("snapshot", query.model_dump(exclude={"dp_rank"}), query.dp_rank, request=request)
    for each in answers_in(document):
        write_out_beginnings(each)
    return document
