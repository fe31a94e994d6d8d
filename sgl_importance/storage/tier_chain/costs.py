"""What fetching a page from a tier costs, as published or measured, and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class FetchCost:
    """Bandwidth and latency of reads.

    Attributes:
        bytes_per_second: inf for what costs nothing.
        latency_seconds: to the first byte of an access.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, size: int, accesses: int = 1) -> float:
        """Seconds to fetch ``size`` bytes in so many accesses."""
        return accesses * self.latency_seconds + size / self.bytes_per_second

    def describe(self) -> str:
        speed = f"{self.bytes_per_second / 1e9:.2f} GB/s" if isfinite(self.bytes_per_second) else "no limit"
        return f"{speed}, {self.latency_seconds * 1e6:.0f} us"


def fetch_seconds(costs: list[FetchCost], page_bytes: int, *, recompute: float) -> list[float]:
    """Seconds to get a page back from each tier, and in the end from nowhere.

    A page is never worth less in a tier than below it: one that turns out slower than its neighbour below
    is taken to cost the same, so that nothing is moved between the two.

    Args:
        costs: of the tiers, fastest first.
        page_bytes: of a page.
        recompute: seconds to compute a page again.

    Returns:
        One number for each tier, and ``recompute`` last; none is below the one before.
    """
    seconds = [cost.seconds(page_bytes) for cost in costs]
    below = recompute
    for level in range(len(seconds) - 1, -1, -1):
        below = seconds[level] = min(seconds[level], below)
    return [*seconds, recompute]
