"""Greedy-dual size frequency: frequency that ages as the cache turns over."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.ranked import RankedPolicy


class GdsfPolicy(RankedPolicy[tuple[int, int]]):
    """Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, 1998.

    Priority is inflation + uses x cost / size, and inflation is the priority of the last victim. Blocks are
    equal in size and cost 1, so this is LFU with dynamic ageing. A prefix is used whenever what follows it
    is, so its priority is no lower, and no held block falls below the inflation.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0
        self._inflation = 0
        self._uses: dict[int, int] = {}

    def insert(self, block: int) -> None:
        self._use(block, 1)

    def access(self, block: int) -> None:
        self._use(block, self._uses[block] + 1)

    def _use(self, block: int, uses: int) -> None:
        self._time += 1
        self._uses[block] = uses
        self._rank(block, (self._inflation + uses, self._time))

    def _forget(self, block: int, rank: tuple[int, int]) -> None:
        del self._uses[block]
        self._inflation = rank[0]
