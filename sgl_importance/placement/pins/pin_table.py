"""Soft pins: prefixes that are evicted last, within a budget, for as long as they are wanted.

A pin multiplies what a node is worth by up to 2 ** PIN_OCTAVES. It locks nothing: a pool full of pins still
evicts, pinned nodes last and among themselves by what their loss costs. Locks can starve allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.placement.pins.pin import (
    HALF_LIFE_REQUESTS,
    PIN_OCTAVES,
    Pin,
    PinEnd,
    PinSource,
    decayed_octaves,
)
from sgl_importance.placement.pins.pin_room import (
    HINTED_BUDGETS,
    PinRefused,
    beyond_bounds,
    check_room,
    divide,
    making_room,
)
from sgl_importance.tiers import Tier


@dataclass(slots=True)
class _Page:
    index: int
    pins: list[Pin]


class PinTable:
    """The pins of every page and tier, and their strength; independent of the tree.

    Every change returns the pins whose pages may have another bias than before, among them those that ended.

    Args:
        page_size: tokens per page.
        share: part of each tier's tokens that pins may hold, 0 to 1.
        capacity_tokens: tokens of each tier.
    """

    def __init__(self, page_size: int, share: float, capacity_tokens: Mapping[Tier, int]) -> None:
        assert 0 <= share <= 1, share
        self.page_size = page_size
        self.share = share
        self._capacity_pages = {tier: tokens // page_size for tier, tokens in capacity_tokens.items()}
        self._pins: dict[str, Pin] = {}
        self._pages: dict[bytes, _Page] = {}
        self._clock = 0
        self.now = 0.0
        """Unix time, as told last."""
        self._next_decay: float = inf
        self._next_expiry: float = inf
        self.on_ended: Callable[[Pin, PinEnd], None] = lambda pin, why: None
        """Called with every pin that ends."""
        self._granted_pages: dict[Tier, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, digest: bytes) -> bool:
        """Whether some pin wants the page, within the budget or not."""
        return digest in self._pages

    def pins(self) -> list[Pin]:
        """Every pin, oldest first."""
        return list(self._pins.values())

    def get(self, pin_id: str) -> Pin | None:
        return self._pins.get(pin_id)

    @property
    def tiers(self) -> list[Tier]:
        return list(self._capacity_pages)

    def budget_tokens(self, tier: Tier) -> int:
        """Tokens of the tier that all pins together may hold."""
        return self._budget_pages(tier) * self.page_size

    def granted_tokens(self, tier: Tier) -> int:
        """Tokens within the budget, pages in common counted once; O(1)."""
        return self._granted_pages.get(tier, 0) * self.page_size

    @property
    def grantable_tokens(self) -> int:
        """Most tokens that one pin can be granted on any tier."""
        return max(map(self.budget_tokens, self.tiers), default=0)

    @property
    def max_hinted_tokens(self) -> int:
        """Most tokens of all hinted pins, granted or not."""
        return HINTED_BUDGETS * sum(map(self.budget_tokens, self.tiers))

    def octaves(self, digest: bytes, tier: Tier) -> float:
        """log2 of the bias on a node whose last page this is; 0 where it is not pinned on the tier."""
        page = self._pages.get(digest)
        if page is None:
            return 0.0
        return max((pin.octaves for pin in page.pins if page.index < pin.granted.get(tier, 0)), default=0.0)

    def holders(self, digest: bytes) -> list[Pin]:
        """The pins that want the page."""
        page = self._pages.get(digest)
        return list(page.pins) if page is not None else []

    # ---- changes ----

    def add(self, pin: Pin) -> list[Pin]:
        """Takes a pin in.

        Raises:
            PinRefused: the prefix fills no page, the table is full, or there is a pin of this name.
        """
        return self.change(added=pin)

    def remove(self, pin_id: str) -> list[Pin]:
        """Ends a pin; KeyError where there is none of that name."""
        return self.change([pin_id])

    def change(
        self, removed: Collection[str] = (), added: Pin | None = None, why: PinEnd = PinEnd.UNPINNED
    ) -> list[Pin]:
        """Ends pins and takes one in, and divides the budgets once.

        Args:
            removed: names of the pins to end.
            added: pin to take in; may have the name of one that ends.
            why: the others end.

        Raises:
            KeyError: there is none of a name; nothing has changed.
            PinRefused: as of ``add``; nothing has changed.
        """
        leaving = {self._pins[name] for name in removed}
        if added is not None:
            self._check(added, [pin for pin in self._pins.values() if pin not in leaving])
        changed = [self._drop(name, why) for name in removed]
        if added is not None:
            changed += self._take_in(added)
        return changed + self._settle()

    def _check(self, pin: Pin, others: Collection[Pin]) -> None:
        """Leaves the tokens behind the last whole page out, and raises what ``add`` does."""
        pin.tokens = pin.tokens[: len(pin.tokens) // self.page_size * self.page_size]
        if not pin.tokens:
            raise PinRefused(f"shorter than one page of {self.page_size} tokens: there is nothing to pin")
        largest_tier = max(self._capacity_pages.values()) * self.page_size
        check_room(pin, others, largest_tier=largest_tier, max_hinted=self.max_hinted_tokens)
        if any(other.pin_id == pin.pin_id for other in others):
            raise PinRefused(f"there is a pin {pin.pin_id}: unpin it first, or give another pin_id")

    def _take_in(self, pin: Pin) -> list[Pin]:
        """Takes in a pin that was checked; the pins that end for it."""
        if not pin.digests:
            pin.digests = chain_digests(
                root_digest(pin.extra_key, pin.cache_salt), pin.tokens, self.page_size
            )
        assert len(pin.digests) * self.page_size == len(pin.tokens)
        pin.last_used = self._clock
        pin.octaves = PIN_OCTAVES
        ending = making_room(pin, self._pins.values(), max_hinted=self.max_hinted_tokens)
        changed = [self._drop(other.pin_id, PinEnd.MADE_ROOM) for other in ending]
        self._pins[pin.pin_id] = pin
        for index, digest in enumerate(pin.digests):
            self._pages.setdefault(digest, _Page(index, [])).pins.append(pin)
        return changed

    def used(self, digest: bytes, clock: int) -> list[Pin]:
        """An admitted request found the page in the cache: the decay of its pins starts anew."""
        changed = []
        for pin in self.holders(digest):
            pin.last_used = max(pin.last_used, clock)
            if pin.octaves < PIN_OCTAVES:
                pin.octaves = PIN_OCTAVES
                changed.append(pin)
        return changed

    def advance(self, clock: int, now: float) -> list[Pin]:
        """Lets time pass; cheap where nothing is due.

        Args:
            clock: admitted requests.
            now: Unix time. All ranks must be told the same one.
        """
        self._clock = clock
        self.now = now
        if self._clock < self._next_decay and self.now < self._next_expiry:
            return []
        ended = [
            pin.pin_id
            for pin in self._pins.values()
            if pin.expires_at is not None and pin.expires_at <= self.now
        ]
        changed = [self._drop(name, PinEnd.EXPIRED) for name in ended]
        for pin in list(self._pins.values()):
            if pin.expires_at is not None:
                continue  # a pin with a lifetime does not decay
            octaves = decayed_octaves(self._clock - pin.last_used)
            if octaves != pin.octaves:
                pin.octaves = octaves
                changed.append(pin)
                if not octaves:
                    self._drop(pin.pin_id, PinEnd.UNUSED)
        return changed + self._settle()

    def resize(self, capacity_tokens: Mapping[Tier, int]) -> list[Pin]:
        """The tiers have other sizes than before."""
        pages = {tier: tokens // self.page_size for tier, tokens in capacity_tokens.items()}
        if pages == self._capacity_pages:
            return []
        self._capacity_pages = pages
        ending = beyond_bounds(self._hinted(), self.max_hinted_tokens)
        return [self._drop(pin.pin_id, PinEnd.MADE_ROOM) for pin in ending] + self._settle()

    # ---- across a restart ----

    def requested(self) -> list[Pin]:
        """The pins that outlive a server, oldest first; hinted ones come anew."""
        return [pin for pin in self._pins.values() if pin.source is PinSource.REQUESTED]

    def restore(self, pins: Iterable[Pin]) -> list[Pin]:
        """Takes in the pins that ``requested`` gave before a restart, as just used; call ``advance`` first.

        Left out are pins that have ended, are held already, or have no room any more.
        """
        changed: list[Pin] = []
        for pin in pins:
            has_ended = pin.expires_at is not None and pin.expires_at <= self.now
            if pin.pin_id not in self._pins and not has_ended:
                with suppress(PinRefused):
                    self._check(pin, self._pins.values())
                    changed += self._take_in(pin)
        return changed + self._settle()

    # ---- division of the budgets ----

    def _budget_pages(self, tier: Tier) -> int:
        return int(self._capacity_pages[tier] * self.share)

    def _settle(self) -> list[Pin]:
        """Divides the budgets anew; returns the pins that got more or less than before."""
        before = {pin.pin_id: pin.granted for pin in self._pins.values()}
        for pin in self._pins.values():
            pin.granted = dict.fromkeys(self._capacity_pages, 0)
        for tier in self._capacity_pages:
            self._granted_pages[tier] = divide(tier, self._budget_pages(tier), list(self._pins.values()))
        decaying = (pin for pin in self._pins.values() if pin.expires_at is None)
        self._next_decay = min((self._decays_at(pin) for pin in decaying), default=inf)
        expiries = (pin.expires_at for pin in self._pins.values() if pin.expires_at is not None)
        self._next_expiry = min(expiries, default=inf)
        return [pin for pin in self._pins.values() if pin.granted != before[pin.pin_id]]

    def _decays_at(self, pin: Pin) -> int:
        # A use meanwhile makes the true clock a later one: then ``advance`` changes nothing and asks again.
        steps = (self._clock - pin.last_used) // HALF_LIFE_REQUESTS + 1
        return pin.last_used + steps * HALF_LIFE_REQUESTS

    def _hinted(self) -> list[Pin]:
        return [pin for pin in self._pins.values() if pin.source is PinSource.HINTED]

    def _drop(self, pin_id: str, why: PinEnd) -> Pin:
        pin = self._pins.pop(pin_id)
        for digest in pin.digests:
            page = self._pages[digest]
            page.pins.remove(pin)
            if not page.pins:
                del self._pages[digest]
        pin.granted = dict.fromkeys(self._capacity_pages, 0)
        self.on_ended(pin, why)
        return pin

    def check_integrity(self) -> None:
        """Asserts that pages name exactly the pins that want them, and that no bound is exceeded."""
        wanted = {(digest, pin.pin_id) for pin in self._pins.values() for digest in pin.digests}
        assert wanted == {(d, pin.pin_id) for d, page in self._pages.items() for pin in page.pins}
        for tier in self._capacity_pages:
            granted = {digest for pin in self._pins.values() for digest in pin.digests[: pin.granted[tier]]}
            assert len(granted) * self.page_size == self.granted_tokens(tier) <= self.budget_tokens(tier)
        assert not beyond_bounds(self._hinted(), self.max_hinted_tokens)
