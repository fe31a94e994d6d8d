"""Accounts of misses as JSON: all that is known for the operator, and of its own namespace for a client."""

from __future__ import annotations

from typing import Any

from sgl_importance.misses.account import AccountedRequest, Part, PathParting
from sgl_importance.misses.path_tree import TOKEN_BYTES, unpacked
from sgl_importance.misses.reason import Fate, PathVisit, Reason

NOT_FOUND = "not_found"
"""What a client is told of everything that its own namespace does not explain."""
SHOWN_TOKENS = 12
"""Tokens of both paths that a list of requests shows behind the place where they part."""


def operator_document(request: AccountedRequest, *, shown_tokens: int = SHOWN_TOKENS) -> dict[str, Any]:
    """Everything about one prompt; times count back from the request.

    Args:
        shown_tokens: of both paths, behind the place where they part; 0 shows no tokens at all.
    """
    account, namespace, visit = request.account, request.namespace, request.visit
    parting = account.parting
    return {
        "rid": visit.rid,
        "clock": visit.clock,
        "time": visit.time,
        "extra_key": namespace[0],
        "cache_salt": namespace[1],
        "prompt_tokens": account.tokens,
        "found_tokens": {tier.value: tokens for tier, tokens in account.found.items()},
        "missed_tokens": {reason.value: tokens for reason, tokens in account.missed().items()},
        "parts": [_operator_part(part, visit) for part in account.parts],
        "parted": None if parting is None else _parting(parting, visit, shown_tokens),
    }


def client_document(request: AccountedRequest) -> dict[str, Any]:
    """What the client of a request may know: its own namespace, without other requests' ids and texts."""
    account, visit = request.account, request.visit
    parts: list[Part] = []
    for part in account.parts:
        own = part
        if part.reason is Reason.OTHER_NAMESPACE:
            own = Part(account.unknown, part.start, part.stop)
        if parts and (parts[-1].reason, parts[-1].fate) == (own.reason, own.fate):
            own = Part(own.reason, parts.pop().start, own.stop, own.fate, own.since)
        parts.append(own)
    missed: dict[str, int] = {}
    for part in parts:
        missed[_client_reason(part)] = missed.get(_client_reason(part), 0) + part.tokens
    parting = account.parting
    return {
        "missed_tokens": missed,
        "missed": [
            {"reason": _client_reason(part), "start": part.start, "tokens": part.tokens, **_ago(part, visit)}
            for part in parts
        ],
        "parted": None
        if parting is None
        else {"token": parting.token, "seconds_ago": _seconds(parting.visit, visit)},
    }


def _client_reason(part: Part) -> str:
    return NOT_FOUND if part.reason is Reason.NEVER_SEEN else part.reason.value


def _ago(part: Part, visit: PathVisit) -> dict[str, Any]:
    """When and how the tokens of a part were lost; empty where they were not."""
    if part.since is not None:
        return {"seconds_ago": max(visit.time - part.since, 0.0)}
    fate = part.fate
    if fate is None:
        return {}
    known: dict[str, Any] = {"seconds_ago": max(visit.time - fate.time, 0.0)}
    known["requests_ago"] = max(visit.clock - fate.clock, 0)
    if fate.cause is not None:
        known["cause"] = fate.cause.value
    if fate.tier is not None:
        known["tier"] = fate.tier.value
    if fate.reuse is not None:
        known["predicted_reuse"] = fate.reuse
    return known


def _operator_part(part: Part, visit: PathVisit) -> dict[str, Any]:
    document = {"reason": part.reason.value, "start": part.start, "tokens": part.tokens, **_ago(part, visit)}
    if part.fate is not None and part.fate.room is not None:
        document["needed_by"] = _needed_by(part.fate)
    return document


def _needed_by(fate: Fate) -> dict[str, Any]:
    room = fate.room
    assert room is not None
    return {"work": room.work.value, "rid": room.rid, "other_requests": room.others}


def _parting(parting: PathParting, visit: PathVisit, shown_tokens: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "token": parting.token,
        "rid": None if parting.visit is None else parting.visit.rid,
        "seconds_ago": _seconds(parting.visit, visit),
    }
    if shown_tokens:
        behind = shown_tokens * TOKEN_BYTES
        document["before_ids"] = unpacked(parting.before)
        document["asked_ids"] = unpacked(parting.asked[:behind])
        document["known_ids"] = unpacked(parting.known[:behind])
    return document


def _seconds(earlier: PathVisit | None, now: PathVisit) -> float | None:
    return None if earlier is None else max(now.time - earlier.time, 0.0)
