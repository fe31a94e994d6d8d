"""Division of a tier's pin budget among the tenants that hold pins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from sgl_importance.placement.pins.pin import Pin, PinSource
from sgl_importance.tiers import Tier


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
