"""A cache that was stopped and started again on its ledger holds the pins that it held."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from sgl_importance.placement.pins.pin import Pin

from support.drivers.ledgered_tree import prewarm_from_ledger, serve, start
from support.drivers.tree_driver import PAGE, TreeDriver

pytestmark = pytest.mark.usefixtures("weights")


def start_with_pins(path: Path, **settings) -> TreeDriver:
    return start(path, keeps_pins=True, **settings)


def pins_of(driver: TreeDriver) -> list[str]:
    return [pin.pin_id for pin in driver.component.pins.current()]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "pre-warmed"])
def test_a_pin_is_held_after_a_restart_when_its_text_returns(tmp_path: Path, warm: bool):
    path = tmp_path / "l.sqlite"
    driver = start_with_pins(path)
    text, other = list(range(8 * PAGE)), list(range(100, 100 + 8 * PAGE))
    for name, tokens, expires_at in (("kept", text, None), ("late", other, 1.0), ("ended", other, None)):
        driver.component.pins.pin(Pin(name, array("q", tokens), expires_at=expires_at))
    driver.component.pins.unpin("ended")
    serve(driver, [*text, 1])
    driver.component.ledger.close()

    restarted = start_with_pins(path)
    assert pins_of(restarted) == ["kept"]
    (pin,) = restarted.component.pins.current()
    assert restarted.component.pins.survivors() == {"kept"}
    assert restarted.component.pins.resident_tokens(pin) == 0
    told = [
        (event.kind, event.pin_id, event.reason) for _, event in restarted.component.state.events.since(0, 9)
    ]
    assert told[-1] == ("pin", "kept", "restored")
    if warm:
        prewarm_from_ledger(restarted)
    else:
        serve(restarted, [*text, 2])
    assert restarted.component.pins.resident_tokens(pin) == len(text)
    serve(restarted, other)
    restarted.evict(len(other))
    assert restarted.component.pins.resident_tokens(pin) == len(text)
    restarted.component.check_integrity()
    restarted.component.pins.unpin("kept")
    restarted.component.ledger.close()
    again = start_with_pins(path)
    assert pins_of(again) == []
    again.component.ledger.close()


def test_without_token_ids_no_pin_is_kept_and_earlier_ones_can_still_end(tmp_path: Path):
    path = tmp_path / "l.sqlite"
    driver = start_with_pins(path)
    for name in ("first", "second"):
        driver.component.pins.pin(Pin(name, array("q", range(2 * PAGE))))
    driver.component.ledger.close()
    private = start_with_pins(path, keep_token_ids=False)
    private.component.pins.pin(Pin("unkept", array("q", range(2 * PAGE))))
    private.component.pins.unpin("first")
    assert pins_of(private) == ["second", "unkept"]
    assert private.component.pins.survivors() & {"second", "unkept"} == {"second"}
    private.component.ledger.close()
    again = start_with_pins(path)
    assert pins_of(again) == ["second"]
    again.component.ledger.close()
