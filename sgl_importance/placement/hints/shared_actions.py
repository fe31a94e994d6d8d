"""Actions of the envelope that sglang, vLLM, TensorRT-LLM and Dynamo share, as hints of ours.

Each names its type and version; what a consumer does not implement it ignores (sglang's
``srt/managers/kv_hints.py``). Followed are:

- ``kv.deref`` 1.x (Dynamo, ``lib/kv-hints``): the request is the last of its session;
- ``kv.demote`` 1.x: what only this request, or its session, has asked for leaves the device first;
- ``kv.retain`` 1.x (vLLM, ``v1/kv_hints/retain.py``): ``directives`` with ``start``, ``end`` (null: all of
  it), ``priority`` (0: nothing to keep) and ``duration`` in seconds (null: for ever). Kept is the prompt up
  to the furthest ``end``: a part is worth nothing without what is in front of it. Priorities are not told
  apart, and the answer (``covers_output``) is not retained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEREF, DEMOTE, RETAIN = "kv.deref", "kv.demote", "kv.retain"
NOT_FOLLOWED = (
    "kv.prefetch",
    "kv.share",
    "kv.fetch",
    "kv.source_locations",
    "kv.pin",
    "kv.evict",
)
"""Known by name: to bring or move KV without a request for it, or from another server. Of a request's own
prompt, what host and storage hold is loaded while it waits, asked or not."""
OTHER = "other"
SHARED_ACTIONS = (DEREF, DEMOTE, RETAIN, *NOT_FOLLOWED, OTHER)
"""As metrics name them."""
MOST_SECONDS = 30 * 24 * 3600.0
"""Of a directive, in vLLM and here."""
_MAJOR_VERSION = "1"


def name_of(action_type: str) -> str:
    """The action's name in metrics."""
    return action_type if action_type in SHARED_ACTIONS else OTHER


def as_hints(action_type: str, action_version: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The hints that an action stands for; none where it is not followed.

    Raises:
        ValueError: its payload is not what its version says; names the field within the payload.
    """
    if action_version.split(".")[0] != _MAJOR_VERSION:
        return {}
    if action_type == DEREF:
        return {"session_over": True}
    if action_type == DEMOTE:
        return {"demote": True}
    if action_type == RETAIN:
        return _retained(payload.get("directives"))
    return {}


def _retained(directives: Any) -> dict[str, Any]:
    if not isinstance(directives, list) or not all(isinstance(each, dict) for each in directives):
        raise ValueError("directives: must be a list of objects")
    wanted = [each for each in directives if each.get("priority") != 0 and not each.get("covers_output")]
    if not wanted:
        return {}
    furthest = max(wanted, key=_end_of)
    seconds = furthest.get("duration")
    if seconds is None:
        seconds = MOST_SECONDS
    if type(seconds) not in (int, float) or not 0 <= seconds <= MOST_SECONDS:
        raise ValueError(f"directives: duration must be null or seconds, at most {MOST_SECONDS:.0f}")
    return {"retain": {"ttl_seconds": float(seconds), "tokens": furthest.get("end")}} if seconds else {}


def _end_of(directive: Mapping[str, Any]) -> float:
    end = directive.get("end")
    if end is None:
        return float("inf")
    if type(end) is not int or end <= 0:
        raise ValueError("directives: end must be null or a number of tokens")
    return float(end)
