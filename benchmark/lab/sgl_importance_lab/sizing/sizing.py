"""Finds the cheapest sizes of device, host and storage for recorded traffic.

Tiers are inclusive, as HiCache's are under its write-through policies: the host also holds all that the
device holds. So a cache of the size of a tier has the hits of that tier and the faster ones together, and
one curve of hit rate by capacity prices all combinations. A tier that is not worth its price gets size 0.

A prompt token is free on the device, is copied from host or storage, or is computed again; a copy that is
slower than computing would not be awaited. Memory is priced per GB and month, time per hour of prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from sgl_importance.errors import ImportanceError
from sgl_importance.observe.shadow.comparison import knee
from sgl_importance.tiers import Tier

HOURS_PER_MONTH = 730.0
GB = 1e9

FloatArray = npt.NDArray[np.float64]


class SizingError(ImportanceError, ValueError):
    """No sizes reach the target; the message names the cure."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Facts of a recording that sizes are found for.

    Attributes:
        prompt_tokens: of all requests.
        hours: time that they took.
        longest_request: tokens of prompt and answer; the device must hold at least one request.
    """

    prompt_tokens: int
    hours: float
    longest_request: int


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of memory and time, in one currency.

    Attributes:
        gb_month: of each tier.
        prefill_hour: an hour of the hardware that computes prompts.
    """

    gb_month: dict[Tier, float]
    prefill_hour: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds at which missing KV comes back.

    Attributes:
        bytes_per_token: KV bytes of one token over all layers.
        prefill_tokens_per_second: rate at which prompts are computed.
        bytes_per_second: of the host towards the device, and of the storage towards the host.
    """

    bytes_per_token: int
    prefill_tokens_per_second: float
    bytes_per_second: dict[Tier, float]

    def seconds_per_token(self, source: Tier | None) -> float:
        """Time to have one token on the device; None means computing it."""
        compute = 1.0 / self.prefill_tokens_per_second
        if source is None:
            return compute
        seconds = 0.0
        if source is not Tier.DEVICE:
            seconds += self.bytes_per_token / self.bytes_per_second[Tier.HOST]
        if source is Tier.STORAGE:
            seconds += self.bytes_per_token / self.bytes_per_second[Tier.STORAGE]
        return min(seconds, compute)


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Share of prompt tokens found in the cache, by its size.

    Attributes:
        tokens: capacities, rising; float64 [points].
        rates: token hit rates, never falling; float64 [points].
    """

    tokens: FloatArray
    rates: FloatArray

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> HitCurve:
        """From (tokens, rate) pairs in any order; where a larger cache hit less, the smaller one's rate
        stands for both."""
        assert points
        ordered = np.array(sorted(points), dtype=np.float64)
        assert (ordered[:, 0] > 0).all()
        return cls(ordered[:, 0], np.maximum.accumulate(ordered[:, 1]))

    def rate(self, tokens: float) -> float:
        """Hit rate of the largest measured cache that fits; 0 where none does."""
        place = int(np.searchsorted(self.tokens, tokens, side="right")) - 1
        return float(self.rates[place]) if place >= 0 else 0.0

    def needed(self, rate: float) -> float | None:
        """Smallest measured capacity with at least this rate; None where no capacity is enough."""
        place = int(np.searchsorted(self.rates, rate - 1e-12))
        return float(self.tokens[place]) if place < len(self.tokens) else None

    def knee(self) -> float:
        """Capacity behind which more memory brings less than on average, as ``observe`` finds it."""
        return float(self.tokens[knee(self.tokens.tolist(), self.rates.tolist())])

    def seconds_saved_per_gb(self, traffic: Traffic, hardware: Hardware) -> FloatArray:
        """Prefill seconds that each further GB saves on this traffic, between a capacity and the one before
        it; float64 [points]."""
        seconds = self.rates * traffic.prompt_tokens * hardware.seconds_per_token(None)
        gigabytes = self.tokens * hardware.bytes_per_token / GB
        return np.diff(seconds, prepend=0.0) / np.diff(gigabytes, prepend=0.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A combination of tiers, and its hits and costs on the traffic.

    Attributes:
        tokens: size of each tier; 0 leaves it out.
        shares: of the prompt tokens that each tier provides; the rest is computed.
        restore_hours: hours of copying and computing per month.
        memory_price: of all tiers per month.
        total_price: with the price of ``restore_hours``, per month.
    """

    tokens: dict[Tier, float]
    shares: dict[Tier, float]
    restore_hours: float
    memory_price: float
    total_price: float

    @property
    def hit_rate(self) -> float:
        return sum(self.shares.values())


def evaluate(
    curve: HitCurve, tokens: dict[Tier, float], traffic: Traffic, hardware: Hardware, prices: Prices
) -> Sizes:
    """The cost of one combination of sizes, and its hits."""
    shares: dict[Tier, float] = {}
    reached = 0.0
    largest = 0.0
    for tier in Tier:  # from the fastest on
        largest = max(largest, tokens[tier])
        together = curve.rate(largest)
        shares[tier] = together - reached
        reached = together
    seconds = (1.0 - reached) * hardware.seconds_per_token(None)
    seconds += sum(share * hardware.seconds_per_token(tier) for tier, share in shares.items())
    months = traffic.hours / HOURS_PER_MONTH
    restore_hours = seconds * traffic.prompt_tokens / 3600.0 / months
    memory = sum(
        prices.gb_month[tier] * size * hardware.bytes_per_token / GB for tier, size in tokens.items()
    )
    return Sizes(tokens, shares, restore_hours, memory, memory + restore_hours * prices.prefill_hour)


def recommend(
    curve: HitCurve,
    traffic: Traffic,
    hardware: Hardware,
    prices: Prices,
    *,
    target_hit_rate: float | None = None,
) -> Sizes:
    """The cheapest combination among the measured capacities.

    Args:
        curve: of the policy that will run.
        target_hit_rate: token hit rate of all tiers together that must be reached; None asks for none.

    Raises:
        SizingError: no capacity reaches the target, or holds one request.
    """
    device = [size for size in curve.tokens.tolist() if size >= traffic.longest_request]
    if not device:
        raise SizingError(
            f"the longest request, with its answer, has {traffic.longest_request:,} tokens, all prompts "
            f"together {curve.tokens[-1]:,.0f}: record more traffic"
        )
    if target_hit_rate is not None and curve.rates[-1] < target_hit_rate:
        raise SizingError(
            f"no capacity reaches a hit rate of {target_hit_rate:.3f}; the whole traffic has "
            f"{curve.rates[-1]:.3f}: lower --target-hit-rate"
        )
    best: Sizes | None = None
    for first, second, third in combinations_with_replacement(curve.tokens.tolist(), 3):
        if first < device[0]:
            continue
        # Equal sizes mean that the slower tier would hold nothing new: it is left out.
        tokens = {
            Tier.DEVICE: first,
            Tier.HOST: second if second > first else 0.0,
            Tier.STORAGE: third if third > second else 0.0,
        }
        found = evaluate(curve, tokens, traffic, hardware, prices)
        if target_hit_rate is not None and found.hit_rate < target_hit_rate - 1e-12:
            continue
        if best is None or found.total_price < best.total_price:
            best = found
    assert best is not None
    return best
