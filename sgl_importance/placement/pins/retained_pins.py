"""Pins that requests ask for by a hint, and their part of a request's report."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from sgl_importance.nodes.named_sessions import Session
from sgl_importance.placement.pins.pin import Pin, PinSource
from sgl_importance.tiers import Tier

PREFIX = "hint-"
SPENT = "the budget of pins on the device is spent (--kv-importance-pin-budget)"


def pin_of(
    prompt: array[int],
    digests: list[bytes],
    *,
    extra_key: str | None,
    cache_salt: str | None,
    expires_at: float,
    page_size: int,
    session: Session | None = None,
) -> Pin:
    """The pin of a prompt, named after its text: asking again prolongs it.

    Args:
        prompt: token ids; what follows the pages of ``digests`` is left out.
        digests: chained digest of each leading page that is pinned; at least one.
        extra_key: namespace of the request, beside the salt.
        cache_salt: namespace of the request, and the tenant whose budget is spent.
        expires_at: Unix time.
        page_size: tokens per page.
        session: of the request.
    """
    name = PREFIX + digests[-1].hex()
    return Pin(
        name,
        prompt[: len(digests) * page_size],
        extra_key,
        cache_salt,
        expires_at,
        source=PinSource.HINTED,
        session=session,
        digests=digests,
    )


def superseded(pins: Iterable[Pin], pin: Pin) -> list[str]:
    """Of ``pins``, those of earlier hints that ``pin`` makes needless: on its beginning, for no longer.

    Without this each turn of a long session would leave a pin of its own.
    """
    assert pin.expires_at is not None
    pages = set(pin.digests)
    return [
        other.pin_id
        for other in pins
        if other.source is PinSource.HINTED
        and other.digests[-1] in pages
        and (other.expires_at is not None and other.expires_at <= pin.expires_at)
    ]


def retained(pin: Pin, page_size: int, made_room: int = 0) -> dict[str, Any]:
    """Report of a request whose prompt was pinned.

    Args:
        pin: of the prompt.
        page_size: tokens per page.
        made_room: pins of other hints that ended for it.
    """
    tokens = pin.granted[Tier.DEVICE] * page_size
    report = {"applied": True, "tokens": tokens, "pin_id": pin.pin_id} if tokens else not_retained(SPENT)
    return {**report, "made_room": made_room} if made_room else report


def not_retained(reason: str) -> dict[str, Any]:
    """Report of a request whose prompt was not pinned."""
    return {"applied": False, "reason": reason}
