"""Bandwidth and latency of a tier, measured once at start; and tiers that are slowed down on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

import numpy as np

from sgl_importance.storage.tier_chain.kinds.tier import NO_ROOM, StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    Bytes,
    PageName,
    make_record,
    record_bytes,
)


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


MEASURED_BYTES = 32 << 20
MOST_RECORDS = 64
_PROBE_IDENTITY = b"\xff" * 32


def probe_record(number: int, page_bytes: int) -> tuple[PageName, Bytes]:
    """A record that is no page's, and its name; of one number always the same, as some media never delete."""
    name = PageName(_PROBE_IDENTITY, number.to_bytes(32, "big"))
    page = np.random.default_rng(number).integers(0, 256, min(page_bytes, 1 << 16), dtype=np.uint8)
    return name, make_record(name, np.resize(page, page_bytes), parent=NO_PAGE, depth=0, moment=0)


def measure_reads(
    tier: StorageTier,
    page_bytes: int,
    *,
    room: int,
    present: Sequence[PageName] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> FetchCost:
    """Reads records of the size that will be read; the latency is part of the time of each.

    Args:
        tier: left as it was.
        page_bytes: of a page.
        room: most records to store for it; 0 for a tier that is full.
        present: records that are in it, one at least where it is full: then they are read.
        clock: seconds.

    Raises:
        OSError: the tier does not work.
    """
    count = min(MOST_RECORDS, max(1, MEASURED_BYTES // max(page_bytes, 1)))
    stored: list[PageName] = []
    into, took = np.empty(record_bytes(page_bytes), np.uint8), []
    try:
        try:
            for number in range(min(count, room)):
                name, record = probe_record(number, page_bytes)
                tier.put(name, record)
                stored.append(name)
        except OSError as error:
            if error.errno not in NO_ROOM or not (stored or present):
                raise
        for name in stored or present[:count]:
            begin = clock()
            try:
                tier.get(name, into)
            except FileNotFoundError:
                raise OSError("what it was given is gone: it keeps less than its capacity") from None
            took.append(clock() - begin)
        if stored and not (into == probe_record(len(stored) - 1, page_bytes)[1]).all():
            raise OSError("what is read is not what was written")
    finally:
        for name in stored:
            tier.delete(name)
    return FetchCost(bytes_per_second=into.nbytes / max(median(took), 1e-9))


def inject_delay(
    tier: StorageTier,
    *,
    seconds: float,
    bytes_per_second: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Makes a tier answer later, to stand for what the machine lacks, and say so.

    Args:
        seconds: added to each access.
        bytes_per_second: most that it moves; inf for no limit.
    """
    cost = FetchCost(bytes_per_second, seconds)

    def delayed(access: Callable[..., None]) -> Callable[..., None]:
        def later(name: PageName, record: Bytes) -> None:
            sleep(cost.seconds(record.nbytes))
            access(name, record)

        return later

    # mypy has no way to say that one object gets another method.
    tier.put = delayed(tier.put)  # type: ignore[method-assign]
    tier.get = delayed(tier.get)  # type: ignore[method-assign]
    added = f"+{cost.describe()} injected"
    tier.note = f"{tier.note}; {added}" if tier.note else added
