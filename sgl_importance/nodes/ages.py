"""How old KV is when it is asked for again, when it is evicted, and while it lies there, by tier.

Everything counts tokens, since a node may hold a word or a book.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from sgl_importance.tiers import Tier


class Histogram:
    """Attributes:
    bounds: upper bounds of all buckets but the last, ascending; a value at a bound belongs below it.
    weights: of each bucket.
    total: sum of the values, each times its weight.
    """

    __slots__ = ("bounds", "total", "weights")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.weights = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, weight: int) -> None:
        self.weights[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    @property
    def weight(self) -> int:
        return sum(self.weights)

    def cumulative(self) -> list[int]:
        """Weight of the values up to each bound, and of all."""
        return list(accumulate(self.weights))

    def quantile(self, share: float) -> float | None:
        """The value below which this share of the weight lies; None without any.

        Linear within a bucket, and the last bound where it lies beyond, as Prometheus has it.
        """
        rank = share * self.weight
        if not rank:
            return None
        low, below = 0.0, 0
        for bound, weight in zip(self.bounds, self.weights, strict=False):
            if below + weight >= rank:
                return low + (bound - low) * (rank - below) / weight
            low, below = bound, below + weight
        return low

    @classmethod
    def merged(cls, histograms: Iterable[Histogram]) -> Histogram:
        """The sum of some with the same bounds, one at least."""
        first, *others = histograms
        merged = cls(first.bounds)
        for each in (first, *others):
            merged.weights = [a + b for a, b in zip(merged.weights, each.weights, strict=True)]
            merged.total += each.total
        return merged


MAX_TIMES = 4096


class ClockTimes:
    """Times of the clock's ticks. Of old ones every second is forgotten when there are too many.

    Args:
        now: seconds, of a clock that does not go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clocks: list[int] = []
        self._seconds: list[float] = []

    def tick(self, clock: int) -> None:
        """The clock, in admitted requests, has come to this value."""
        self._clocks.append(clock)
        self._seconds.append(self._now())
        if len(self._clocks) > MAX_TIMES:
            old = MAX_TIMES // 2  # of the newest all are kept: an error counts beside a short age
            self._clocks[:old] = self._clocks[:old:2]
            self._seconds[:old] = self._seconds[:old:2]

    def age(self, clock: int) -> float | None:
        """Seconds since the clock had this value; None of before the first tick."""
        place = bisect_right(self._clocks, clock)
        return self._now() - self._seconds[place - 1] if place else None


_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
AGE_BOUNDS = (
    *(1, 2, 5, 10, 20, 30),
    *(each * _MINUTE for each in (1, 2, 5, 10, 20, 30)),
    *(each * _HOUR for each in (1, 2, 4, 8)),
    *(each * _DAY for each in (1, 3, 7)),
)
"""Upper bounds in seconds."""
UPPER_AGES = (*(str(float(bound)) for bound in AGE_BOUNDS), "+Inf")
"""The same, and the bound of all, as Prometheus writes them."""
REUSE_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
NOWHERE = "none"
"""The place of tokens that had been evicted everywhere when they were asked for again."""
PLACES = (*(tier.value for tier in Tier), NOWHERE)
EVICTING = (Tier.DEVICE, Tier.HOST)


class Ages:
    """Ages so far, since the cache was built.

    Args:
        now: seconds, of a clock that does not go back.

    Attributes:
        returned: seconds from one request for some tokens to the next, by where these were then.
        evicted: seconds since their last request of what a tier gave up.
        reuses: how often requests had found it before.
        resident: seconds since their last request of tokens that a tier holds, when they were looked at last.
        resident_tokens: the same as tokens up to each bound, by tier and bound.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.returned = {place: Histogram(AGE_BOUNDS) for place in PLACES}
        self.evicted = {tier: Histogram(AGE_BOUNDS) for tier in EVICTING}
        self.reuses = {tier: Histogram(REUSE_BOUNDS) for tier in EVICTING}
        self.looked_at({tier: Histogram(AGE_BOUNDS) for tier in Tier})
        self._times = ClockTimes(now)

    def admitted(self, clock: int) -> None:
        """A request was admitted: the clock that dates nodes has come to this value."""
        self._times.tick(clock)

    def asked_again(self, place: str, tokens: int, last_access: int) -> None:
        """Tokens were asked for again, at one of PLACES; ``last_access``: the clock of the request before."""
        _add(self.returned[place], self._times.age(last_access), tokens)

    def gave_up(self, tier: Tier, tokens: int, last_access: int, accesses: int) -> None:
        """A tier evicted tokens that so many requests had found."""
        _add(self.evicted[tier], self._times.age(last_access), tokens)
        self.reuses[tier].add(accesses, tokens)

    def lies(self, resident: Histogram, tokens: int, last_access: int) -> None:
        """A tier holds tokens; ``resident`` takes their age."""
        _add(resident, self._times.age(last_access), tokens)

    def looked_at(self, resident: dict[Tier, Histogram]) -> None:
        """All that tiers hold has been looked at."""
        self.resident = resident
        self.resident_tokens = {
            (tier.value, bound): tokens
            for tier, histogram in resident.items()
            for bound, tokens in zip(UPPER_AGES, histogram.cumulative(), strict=True)
        }

    def describe(self) -> dict[str, Any]:
        """As JSON: medians in seconds, None of what has not happened, and the sentence that they make."""
        holds = self.evicted[Tier.DEVICE].quantile(0.5)
        returns = Histogram.merged(self.returned.values()).quantile(0.5)
        return {
            "device_holds_seconds": holds,
            "half_return_within_seconds": returns,
            "median_seconds": {
                "returned": {place: each.quantile(0.5) for place, each in self.returned.items()},
                "evicted": {tier.value: each.quantile(0.5) for tier, each in self.evicted.items()},
                "resident": {tier.value: each.quantile(0.5) for tier, each in self.resident.items()},
            },
            "sentence": sentence(holds, returns),
        }


def _add(histogram: Histogram, age: float | None, tokens: int) -> None:
    if age is not None:
        histogram.add(age, tokens)


def sentence(holds: float | None, returns: float | None) -> str:
    """
    Args:
        holds: seconds for which half of what the device evicts had not been asked for.
        returns: within which half of what is asked for again is asked for.
    """
    held = "has evicted nothing yet" if holds is None else f"holds about {in_words(holds)} of traffic"
    back = (
        "nothing has come back yet"
        if returns is None
        else f"half of the returns come within {in_words(returns)}"
    )
    return f"The device {held}, {back}."


def in_words(seconds: float) -> str:
    """A time in the unit that people would give it in."""
    for size, unit in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if seconds >= size:
            count = round(seconds / size, 1 if seconds < 3 * size else 0)
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return "a second" if seconds <= 1 else f"{seconds:.0f} seconds"
