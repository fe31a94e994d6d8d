"""Room in the table of pins: what is refused, and which pins end for one more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from math import inf

from sgl_importance.errors import ImportanceError
from sgl_importance.placement.pins.pin import Pin, PinSource
from sgl_importance.tiers import Tier

MAX_TENANTS = 256
MAX_PINS_PER_TENANT = 1024
MAX_HINTED_PINS = 1024
HINTED_BUDGETS = 2
"""Times the budget of all tiers that hinted pins may be: what is granted, and as much that waits for room."""


class PinRefused(ImportanceError, ValueError):
    """The pin cannot be held; the message says why and what to do."""


def check_room(pin: Pin, held: Iterable[Pin], *, largest_tier: int, max_hinted: int) -> None:
    """Refuses a pin for which none may end.

    Args:
        pin: to be taken in.
        held: every other pin.
        largest_tier: its tokens.
        max_hinted: most tokens of all hinted pins.

    Raises:
        PinRefused: there is no room for it.
    """
    rivals = [other for other in held if other.source is pin.source]
    theirs = [other for other in rivals if other.tenant == pin.tenant]
    if not theirs and len({other.tenant for other in rivals}) >= MAX_TENANTS:
        if pin.source is PinSource.HINTED:
            raise PinRefused(
                f"requests of {MAX_TENANTS} cache salts hold pins already: use one of these, or ask again "
                "when some have ended"
            )
        raise PinRefused(f"{MAX_TENANTS} cache salts hold pins already: unpin those of one")
    if pin.source is PinSource.HINTED:
        if len(pin.tokens) > max_hinted:
            raise PinRefused(
                f"a pin of {len(pin.tokens)} tokens; all pins by hint may be {max_hinted} tokens "
                "(--kv-importance-pin-budget)"
            )
        return
    if len(theirs) >= MAX_PINS_PER_TENANT:
        raise PinRefused(f"this cache salt holds {MAX_PINS_PER_TENANT} pins already: unpin some")
    wanted = len(pin.tokens) + sum(len(other.tokens) for other in theirs)
    if wanted > largest_tier:
        raise PinRefused(
            f"this cache salt's pins would be {wanted} tokens, the largest tier is {largest_tier}: unpin some"
        )


def making_room(pin: Pin, held: Iterable[Pin], *, max_hinted: int) -> list[Pin]:
    """The pins that end for one more: of a hinted one, hinted ones nearest to their end.

    Args:
        pin: to be taken in.
        held: every other pin, oldest first.
        max_hinted: most tokens of all hinted pins.
    """
    if pin.source is not PinSource.HINTED:
        return []
    rivals = [other for other in held if other.source is pin.source]
    return beyond_bounds(rivals, max_hinted - len(pin.tokens), newcomers=1)


def beyond_bounds(hinted: Collection[Pin], max_tokens: int, *, newcomers: int = 0) -> list[Pin]:
    """The hinted pins that end so that the others keep both bounds, nearest to their end first.

    Ends are read from a clock that all ranks share, and of those with one end the oldest goes first, so ranks
    agree.

    Args:
        hinted: every hinted pin that is held, oldest first.
        max_tokens: of those that stay.
        newcomers: pins that come beside them.
    """
    max_pins = MAX_HINTED_PINS - newcomers
    pins, tokens = len(hinted), sum(len(pin.tokens) for pin in hinted)
    ended: list[Pin] = []
    if pins <= max_pins and tokens <= max_tokens:
        return ended
    for pin in sorted(hinted, key=_end):
        if pins <= max_pins and tokens <= max_tokens:
            break
        ended.append(pin)
        pins, tokens = pins - 1, tokens - len(pin.tokens)
    return ended


def _end(pin: Pin) -> float:
    return inf if pin.expires_at is None else pin.expires_at


def divide(tier: Tier, pages: int, pins: Sequence[Pin]) -> int:
    """Sets each pin's ``granted`` pages of a tier; returns how many they are, those in common counted once.

    The budget is divided equally among the tenants (cache salts) that hold requested pins; an unused
    part of a share is not lent to another, so no tenant's pins can cost another tenant a page. Hinted pins
    have no claim on it: their tenants divide the pages that requested ones leave. Within a share the oldest
    pins come first, each from its first page on, so a later pin never weakens an earlier one of its tenant.
    Pages in common are paid for once.

    Args:
        tier: the tier whose pages are divided.
        pages: the budget.
        pins: every pin, oldest first.
    """
    left = pages
    held: dict[str | None, set[bytes]] = {}
    for source in PinSource:
        pins_of: dict[str | None, list[Pin]] = {}
        for pin in pins:
            if pin.source is source:
                pins_of.setdefault(pin.tenant, []).append(pin)
        share = left // len(pins_of) if pins_of else 0
        for tenant, theirs in pins_of.items():
            left -= _spend(tier, share, theirs, held.setdefault(tenant, set()))
    assert left >= 0
    return pages - left


def _spend(tier: Tier, share: int, pins: Iterable[Pin], held: set[bytes]) -> int:
    """Grants the pins of one tenant up to ``share`` pages that are not ``held`` yet; returns their number."""
    spent = 0
    for pin in pins:
        # Chains with a page in common have everything before it in common too.
        common = bisect_left(pin.digests, True, key=lambda digest: digest not in held)
        granted = min(len(pin.digests), common + share - spent)
        held.update(pin.digests[common:granted])
        spent += granted - common
        pin.granted[tier] = granted
    return spent
