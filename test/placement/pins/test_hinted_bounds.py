"""Pins of hints are bounded as a source, whoever sends them; and each turn divides the budgets once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from sgl_importance.placement.pins import pin_room, pin_table
from sgl_importance.placement.pins.pin import Pin, PinEnd, PinSource
from sgl_importance.placement.pins.pin_room import PinRefused, divide
from sgl_importance.placement.pins.pin_table import PinTable
from sgl_importance.tiers import Tier

PAGE = 4
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def make_table(device_pages: int = 100, host_pages: int = 200, share: float = 0.2) -> PinTable:
    return PinTable(PAGE, share, {DEVICE: device_pages * PAGE, HOST: host_pages * PAGE})


def hinted(name: str, pages: int = 1, *, salt: str = "a", ends: float = 1e9) -> Pin:
    """A pin of a prompt of its own."""
    tokens = array("q", [int.from_bytes(name.encode()[-7:]), *range(pages * PAGE - 1)])
    return Pin(name, tokens, cache_salt=salt, expires_at=ends, source=PinSource.HINTED)


def held(table: PinTable) -> int:
    return sum(len(pin.tokens) for pin in table.pins() if pin.source is PinSource.HINTED)


@pytest.mark.parametrize("pages", [1, 7])
def test_tokens_count_and_work_are_bounded_however_many_come(monkeypatch: pytest.MonkeyPatch, pages: int):
    """Ten times as many cost no more for each: neither memory nor pins that a division visits."""
    monkeypatch.setattr(pin_room, "MAX_HINTED_PINS", 50)
    visits: list[int] = []

    def counted(tier: Tier, budget: int, pins: Sequence[Pin]) -> int:
        visits.append(len(pins))
        return divide(tier, budget, pins)

    monkeypatch.setattr(pin_table, "divide", counted)
    table = make_table()
    limit = 2 * (20 + 40) * PAGE
    assert table.max_hinted_tokens == limit
    of_a_turn = {}
    for serial in range(1000):
        visits.clear()
        table.add(hinted(str(serial), pages, salt=f"s{serial % 20}", ends=1e9 + serial))
        assert held(table) <= limit
        assert len(visits) == 2, "one division for each tier"
        of_a_turn[serial + 1] = sum(visits)
    assert len(table) == min(50, limit // (pages * PAGE))
    assert of_a_turn[1000] == of_a_turn[100] == 2 * len(table)
    table.check_integrity()


def test_the_pin_nearest_to_its_end_makes_room():
    table = make_table()
    told: list[tuple[str, PinEnd]] = []
    table.on_ended = lambda pin, why: told.append((pin.pin_id, why))
    for name, ends in (("late", 30.0), ("soon", 10.0), ("later", 40.0), ("next", 20.0)):
        table.add(hinted(name, 30, ends=ends))
    assert held(table) == table.max_hinted_tokens
    changed = table.add(hinted("one more", 31, ends=5.0))
    assert told == [("soon", PinEnd.MADE_ROOM), ("next", PinEnd.MADE_ROOM)]
    assert {"soon", "next"} <= {pin.pin_id for pin in changed}
    assert [pin.pin_id for pin in table.pins()] == ["late", "later", "one more"]
    table.check_integrity()


def test_pins_of_one_end_make_room_oldest_first():
    """What ranks do alike: ties are broken by the order in which the pins came."""
    table = make_table()
    for name in "dbca":
        table.add(hinted(name, 30, ends=10.0))
    table.add(hinted("e", 30, ends=10.0))
    assert [pin.pin_id for pin in table.pins()] == list("bcae")


def test_a_pin_that_no_room_suffices_for_is_refused_and_ends_none():
    table = make_table()
    table.add(hinted("kept", 30))
    with pytest.raises(PinRefused, match="480 tokens"):
        table.add(hinted("huge", 121))
    with pytest.raises(PinRefused, match="480 tokens"):
        table.change(["kept"], hinted("huge", 121))
    assert [pin.pin_id for pin in table.pins()] == ["kept"]
    table.check_integrity()


def test_the_operator_s_pins_neither_make_room_nor_count():
    table = make_table()
    for serial in range(5):
        table.add(Pin(f"asked {serial}", array("q", [serial, *range(40 * PAGE - 1)])))
    for serial in range(8):
        table.add(hinted(str(serial), 30, ends=serial))
    assert [pin.pin_id for pin in table.requested()] == [f"asked {serial}" for serial in range(5)]
    assert held(table) == table.max_hinted_tokens


def test_tiers_that_become_smaller_hold_fewer():
    table = make_table()
    for serial in range(4):
        table.add(hinted(str(serial), 30, ends=10.0 - serial))
    changed = table.resize({DEVICE: 100 * PAGE, HOST: 50 * PAGE})  # of which pins may hold 20 and 10 pages
    assert [pin.pin_id for pin in table.pins()] == ["0", "1"]
    assert {"2", "3"} <= {pin.pin_id for pin in changed}
    table.check_integrity()


def test_a_turn_that_replaces_another_divides_once(monkeypatch: pytest.MonkeyPatch):
    table = make_table()
    table.add(hinted("others", 3, salt="b"))
    table.add(hinted("turn 1", 3))
    divided: list[Tier] = []

    def counted(tier: Tier, budget: int, pins: Sequence[Pin]) -> int:
        divided.append(tier)
        return divide(tier, budget, pins)

    monkeypatch.setattr(pin_table, "divide", counted)
    changed = table.change(["turn 1"], hinted("turn 2", 5), PinEnd.SUPERSEDED)
    assert divided == [DEVICE, HOST]
    assert {pin.pin_id for pin in changed} == {"turn 1", "turn 2"}
    assert [pin.pin_id for pin in table.pins()] == ["others", "turn 2"]


def test_one_name_may_end_and_begin_in_one_change():
    """Asking again on the same text prolongs its pin."""
    table = make_table()
    table.add(hinted("p", 3, ends=10.0))
    table.change(["p"], hinted("p", 3, ends=20.0))
    (pin,) = table.pins()
    assert pin.expires_at == 20.0
    with pytest.raises(PinRefused, match="there is a pin p"):
        table.change([], hinted("p", 3))
    with pytest.raises(KeyError):
        table.change(["p", "unknown"])
    assert table.pins() == [pin]
    table.check_integrity()
