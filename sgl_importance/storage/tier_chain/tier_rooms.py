"""How many pages each tier of a chain holds and may hold, and which tiers take pages at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf


class TierRooms:
    """Room in the tiers of a chain, by level, fastest first.

    Of several tiers, each keeps room for one more page, so that two pages can change places without either
    being in none in between.

    Args:
        capacities: pages of each tier; at least 2 each where there are several tiers.

    Attributes:
        used: pages that each tier holds.
        usable: levels of the tiers that work, in order.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._spare = int(len(capacities) > 1)
        assert all(capacity > self._spare for capacity in capacities), "a tier holds too few pages"
        self.capacities = tuple(capacities)
        self.used = [0] * len(capacities)
        self.usable = list(range(len(capacities)))
        self._limits = [capacity - self._spare for capacity in capacities]
        self._stopped: set[int] = set()

    def has_room(self, level: int) -> bool:
        return self.used[level] < self._limits[level]

    def is_open(self, level: int) -> bool:
        return level in self.usable

    def is_stopped(self, level: int) -> bool:
        return level in self._stopped

    def takes(self, level: int) -> bool:
        """Whether the tier has room for any page at all."""
        return level not in self._stopped and (self._limits[level] > 0 or self.used[level] > 0)

    def takers(self) -> list[int]:
        """Tiers that may get pages at all."""
        return [level for level in self.usable if self.takes(level)]

    def below(self, level: int) -> int | None:
        """The next slower tier that may get pages."""
        return next((each for each in self.takers() if each > level), None)

    def over_limits(self) -> list[int]:
        """Tiers that hold more than they should."""
        return [level for level in self.usable if self.used[level] > self._limits[level]]

    def close(self, level: int) -> None:
        """The tier failed."""
        if level in self.usable:
            self.usable.remove(level)

    def open(self, level: int) -> None:
        """The tier works again."""
        if level not in self.usable:
            self.usable = sorted((*self.usable, level))

    def narrow(self, level: int) -> None:
        """The tier could not take one page more: it is to hold one less, so that pages can change places."""
        self._limits[level] = max(0, self.used[level] - 1)

    def stop(self, level: int) -> None:
        """The tier keeps what it has and takes no page more: to give one up would make no room."""
        self._stopped.add(level)

    def widen(self, level: int) -> None:
        """The tier may have room for its capacity again."""
        self._stopped.discard(level)
        self._limits[level] = self.capacities[level] - self._spare


BURST_SECONDS = 1.0
"""What a tier may take at once after a rest."""


class MoveBudget:
    """A token bucket for each tier; time is the caller's, in seconds, and never runs backwards.

    Args:
        tiers: their number.
        bytes_per_second: into each of them; inf for no bound.
        page_bytes: which a tier may take at once however low the bound is, or nothing would ever move.
    """

    def __init__(self, tiers: int, bytes_per_second: float = inf, *, page_bytes: int = 1) -> None:
        self._speed = bytes_per_second
        self._burst = max(bytes_per_second * BURST_SECONDS, float(page_bytes))
        self._left = [self._burst] * tiers
        self._now = [0.0] * tiers

    def affords(self, amounts: Mapping[int, int], now: float) -> bool:
        """Whether so many bytes may be written into each of these tiers now."""
        if self._speed == inf:
            return True
        for level in amounts:
            passed = max(now - self._now[level], 0.0)
            self._left[level] = min(self._left[level] + passed * self._speed, self._burst)
            self._now[level] = max(now, self._now[level])
        return all(self._left[level] >= size for level, size in amounts.items())

    def spend(self, level: int, size: int) -> None:
        """So many bytes are written into the tier."""
        if self._speed != inf:
            self._left[level] -= size
