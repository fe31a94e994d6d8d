"""A tier of a chain, with what was measured of it, and what its failures say of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from sgl_importance.storage.tier_chain.kinds.tier import StorageTier
from sgl_importance.storage.tier_chain.measure import FetchCost

HANG_SECONDS = 5.0
"""After which a read that did not come back says that its tier answers nobody."""


@dataclass(slots=True)
class ChainMember:
    """A tier of a chain.

    Attributes:
        pages: that it has room for.
        cost: of reads, measured at start and frozen.
        failures: of reads, in a row.
        failed_writes: in a row.
        next_probe: seconds of the chain's clock at which one that was left out is tried again.
        next_growth: the same, of one whose medium was full before its capacity.
    """

    name: str
    kind: str
    tier: StorageTier
    pages: int
    cost: FetchCost
    failures: int = field(default=0, init=False)
    failed_writes: int = field(default=0, init=False)
    next_probe: float = field(default=0.0, init=False)
    next_growth: float = field(default=inf, init=False)
    _reads: dict[int, float] = field(default_factory=dict, init=False)
    """When each thread that reads now began."""

    @contextmanager
    def reading(self, now: float) -> Iterator[None]:
        """This thread reads, from ``now`` on by the chain's clock."""
        thread = threading.get_ident()
        self._reads[thread] = now
        try:
            yield
        finally:
            del self._reads[thread]

    def hangs(self, now: float) -> bool:
        """Whether a read has not come back for so long that another one would only take one more thread."""
        return any(now - began > HANG_SECONDS for began in list(self._reads.values()))
