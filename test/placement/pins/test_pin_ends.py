"""Why pins ended."""

from __future__ import annotations

from array import array

import pytest

from sgl_importance.placement.pins import pin_room
from sgl_importance.placement.pins.pin import HALF_LIFE_REQUESTS, Pin, PinEnd, PinSource
from sgl_importance.placement.pins.pin_table import PinTable
from sgl_importance.tiers import Tier

PAGE = 4


def test_the_end_of_a_pin_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pin_room, "MAX_HINTED_PINS", 1)
    table = PinTable(PAGE, 0.2, {Tier.DEVICE: 100 * PAGE})
    told = []
    table.on_ended = lambda pin, why: told.append((pin.pin_id, why))

    def add(name: str, start: int = 0, **kwargs) -> None:
        table.add(Pin(name, array("q", range(start, start + 2 * PAGE)), **kwargs))

    for name in ("unpinned", "replaced", "unused"):
        add(name)
    add("expired", expires_at=60.0)
    add("pushed out", source=PinSource.HINTED, expires_at=50.0)
    add("hinted", 50, source=PinSource.HINTED, expires_at=60.0)
    table.remove("unpinned")
    table.change(["replaced"], why=PinEnd.SUPERSEDED)
    table.advance(0, 60.0)
    table.advance(8 * HALF_LIFE_REQUESTS, 60.0)
    assert told == [
        ("pushed out", "made_room"),
        ("unpinned", "unpinned"),
        ("replaced", "superseded"),
        ("expired", "expired"),
        ("hinted", "expired"),
        ("unused", "unused"),
    ]
    assert len(table) == 0
