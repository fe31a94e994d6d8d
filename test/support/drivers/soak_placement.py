"""What operators and clients ask of placement in the middle of a soak: pins, hints, time."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sgl_importance.placement.hints.hints import Hints
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.placement.pins.pin_room import PinRefused

from support.drivers.hosted_driver import PAGE, HostedDriver, Request

MAX_PINS = 12
MAX_SECONDS = 60
HINTED_SHARE = 0.2


class Placement:
    """Asks at random.

    Args:
        driver: whose cache is asked; as on a server, expendable nodes are copied nowhere.
        rng: decides everything.
        happened: where is counted what took place.
    """

    def __init__(self, driver: HostedDriver, rng: random.Random, happened: Counter[str]) -> None:
        self._driver, self._rng, self._happened = driver, rng, happened
        self._made = 0
        self.now = 0.0
        component = driver.component
        component.pins.now = lambda: self.now
        if component.state.options.policy == "importance":
            driver.filter_backups()

    def hint(self, request: Request) -> None:
        """Some requests say something about their KV."""
        if self._rng.random() >= HINTED_SHARE:
            return
        hints: dict[str, Any] = {"report": self._rng.random() < 0.5}
        wish = self._rng.choice(("drop_after_use", "retain", "block_types", "transition"))
        match wish:
            case "drop_after_use":
                hints[wish] = True
            case "retain":
                hints[wish] = {"ttl_seconds": self._seconds()}
            case "block_types":
                start = self._rng.randrange(len(request.origin_input_ids))
                hints[wish] = [{"type": "tool_output", "tokens": [start, None]}]
            case "transition":
                hints[wish] = "tool_call"
        request.kv_hints = decode_kv_hints_envelope(Hints.parse(hints).envelope())
        self._happened[f"hint {wish}"] += 1

    def pin(self, requests: Sequence[Request]) -> bool:
        """Pins the start of what some request asks; whether anything."""
        pins = self._driver.component.pins
        if not requests or len(pins.table) >= MAX_PINS:
            return False
        request = self._rng.choice(requests)
        length = self._rng.randrange(len(request.origin_input_ids)) + 1
        self._made += 1
        pin = Pin(
            f"{self._made}",
            array("q", request.origin_input_ids[:length]),
            cache_salt=request.cache_salt,
            expires_at=self.now + self._seconds() if self._rng.random() < 0.5 else None,
        )
        try:
            pins.pin(pin)
        except PinRefused:
            assert length < PAGE, "refused, and not for want of a whole page"
            return False
        return True

    def unpin(self) -> bool:
        pins = self._driver.component.pins
        held = pins.current()
        if not held:
            return False
        pins.unpin(self._rng.choice(held).pin_id)
        return True

    def let_time_pass(self) -> None:
        self.now += self._seconds()
        before = len(self._driver.component.pins.table)
        self._happened["expired pin"] += before - len(self._driver.component.pins.current())

    def check(self) -> None:
        """Asserts that pins keep to their budget."""
        component = self._driver.component
        known = [component.state.tree.metadata(node) for node in component.state.tree.nodes()]
        for tier, (granted, budget) in component.pins.budgets().items():
            pinned = sum(data.tokens for data in known if data.pin_octaves.get(tier))
            assert pinned <= granted <= budget, (tier, pinned, granted, budget)

    def _seconds(self) -> float:
        return 1.0 + self._rng.random() * MAX_SECONDS
