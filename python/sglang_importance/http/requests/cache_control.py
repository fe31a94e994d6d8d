"""``cache_control`` of Anthropic's messages: a breakpoint, up to which the prompt is to be kept for a while.

Format: Anthropic's Messages API, prompt caching: ``{"type": "ephemeral", "ttl": "5m"}``, on blocks of
``tools``, ``system`` and ``messages`` in this order, or at the top for the whole prompt. sglang drops it.
Here the last breakpoint is a hint to retain the prompt up to its message for its ``ttl``; those in front of
it lie in the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_importance.http.requests.fields.bad_field import BadField

FIELD = "cache_control"
SECONDS = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"


@dataclass(frozen=True)
class Breakpoint:
    """Attributes:
    ttl_seconds: how long what is in front of it is to be kept.
    messages: of the request, that are in front of it; 0 behind ``system`` or ``tools``.
    """

    ttl_seconds: float
    messages: int


def last_breakpoint(body: Mapping[str, Any]) -> Breakpoint | None:
    """The last breakpoint of a request's body; None where it has none.

    Raises:
        BadField: it is none that Anthropic describes.
    """
    for path, control, messages in _from_the_end(body):
        if control is not None:
            return Breakpoint(_seconds(path, control), messages)
    return None


def _from_the_end(body: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Path and value of each ``cache_control``, and the messages in front of it."""
    messages = _list(body.get("messages"))
    yield FIELD, body.get(FIELD), len(messages)
    for index in reversed(range(len(messages))):
        message = messages[index]
        if isinstance(message, Mapping):
            for path, control in _of_blocks(f"messages.{index}.content", message.get("content")):
                yield path, control, index + 1
    for name in ("system", "tools"):
        for path, control in _of_blocks(name, body.get(name)):
            yield path, control, 0


def _of_blocks(path: str, blocks: Any) -> Iterator[tuple[str, Any]]:
    found = _list(blocks)
    for index in reversed(range(len(found))):
        if isinstance(found[index], Mapping):
            yield f"{path}.{index}.{FIELD}", found[index].get(FIELD)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(path: str, control: Any) -> float:
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise BadField(path, 'must be an object of the type "ephemeral"')
    ttl = control.get("ttl")
    if ttl is None:
        ttl = DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in SECONDS:
        raise BadField(f"{path}.ttl", f"must be {' or '.join(SECONDS)}")
    return SECONDS[ttl]
