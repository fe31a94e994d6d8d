"""Furthest next use: the ceiling of every other curve, drawn with knowledge of the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sgl_importance_lab.policies.ranked import RankedPolicy

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NextUses:
    """When each access of a trace is followed by the next one of the same block.

    Attributes:
        positions: index in ``Trace.blocks`` of the block's next access, or the number of accesses if there
            is none; int64 [accesses].
        offsets: as ``Trace.offsets``.
    """

    positions: IntArray
    offsets: IntArray

    @classmethod
    def of(cls, blocks: IntArray, offsets: IntArray) -> NextUses:
        """Reads the future out of a trace: O(n log n), once for all capacities.

        Args:
            blocks: ``Trace.blocks``, int64 [accesses].
            offsets: ``Trace.offsets``, int64 [requests + 1].
        """
        order = np.argsort(blocks, kind="stable")
        blocks = blocks[order]
        positions = np.full(len(order), len(order), dtype=np.int64)
        same = blocks[1:] == blocks[:-1]
        positions[order[:-1][same]] = order[1:][same]
        return cls(positions, offsets)


class BeladyPolicy(RankedPolicy[int]):
    """Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer, 1966 (his rule MIN).

    In a leaf-only prefix tree the victim is the evictable block whose next use is furthest. A prefix is used
    no later than what follows it, so holding prefixes costs nothing: a block that could not go for its
    children's sake would have been kept longer than they anyway. Blocks without a next use leave in the
    order in which they were numbered.

    Args:
        capacity: see ``EvictionPolicy``.
        next_uses: the future of the very trace that is replayed.
    """

    name: ClassVar[str] = "belady"

    def __init__(self, capacity: int, *, next_uses: NextUses) -> None:
        super().__init__(capacity)
        self._positions: list[int] = next_uses.positions.tolist()
        self._offsets: list[int] = next_uses.offsets.tolist()
        self._now = 0

    def begin_request(self, request: int) -> None:
        self._now = self._offsets[request]

    def insert(self, block: int) -> None:
        self.access(block)

    def access(self, block: int) -> None:
        self._rank(block, -self._positions[self._now])  # the furthest next use ranks lowest
        self._now += 1
