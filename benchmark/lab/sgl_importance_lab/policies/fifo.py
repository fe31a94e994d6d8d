"""First in, first out: the block that was computed longest ago goes first, however often it was used."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.ranked import RankedPolicy


class FifoPolicy(RankedPolicy[int]):
    """Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer, 1966 (his class-1 rules).

    A held block keeps its place in the queue; a prefix is older than what follows it, and yet leaves after
    it, because it is held until its last child has gone.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0

    def insert(self, block: int) -> None:
        self._time += 1
        self._rank(block, self._time)

    def access(self, block: int) -> None:
        pass
