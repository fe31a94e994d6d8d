"""The eviction order: the node of least loss, found without looking at every node.

Loss is index(class, age bucket) x value, and a node's class and value change only when something happens to
it. Nodes are therefore kept in cells of (class, quantised log value, age bucket), oldest first: nodes of a
cell lose the same, and the victim is the oldest of the cheapest cell. A node moves to the next bucket a few
dozen times in its life, when its age gets there; all cells are ranked only when the index has changed.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from sgl_importance.reuse.life_table import BUCKET_STARTS, NUM_AGE_BUCKETS, age_bucket
from sgl_importance.reuse.reuse_index import ReuseIndex

LEVELS_PER_OCTAVE = 4  # nodes within 19 % of each other's value count as equal, and recency decides
_COMPACT_SLACK = 64
_BUCKET_ENDS: list[float] = [*BUCKET_STARTS[1:].tolist(), math.inf]

_CellKey = tuple[int, int, int]


def value_level(value: float) -> int:
    """Quantised log2 of a positive value."""
    return round(LEVELS_PER_OCTAVE * math.log2(value))


def level_value(level: int) -> float:
    """The value that stands for a level."""
    return float(2.0 ** (level / LEVELS_PER_OCTAVE))


class _Cell:
    """Nodes that lose the same; the heap may hold stale items, ``live`` does not count them."""

    __slots__ = ("bucket", "heap", "key", "live", "next_crossing", "reuse_class", "value", "value_level")

    def __init__(self, reuse_class: int, level: int, bucket: int) -> None:
        self.key = (reuse_class, level, bucket)
        self.reuse_class = reuse_class
        self.value_level = level
        self.value = level_value(level)
        self.bucket = bucket
        self.heap: list[tuple[int, int]] = []  # (last access, node id)
        self.live = 0
        self.next_crossing = math.inf  # clock at which its oldest node leaves the bucket, or earlier


class VictimOrder:
    """Evictable nodes, cheapest first. Equal losses are decided by age, then by node id: the same on every
    rank.

    Args:
        reuse: its clock and index rank the nodes.
    """

    def __init__(self, reuse: ReuseIndex) -> None:
        self._reuse = reuse
        self._cells: dict[_CellKey, _Cell] = {}
        self._entries: dict[int, tuple[_Cell, int]] = {}
        # (loss, last access, node id, cell) of at least the oldest node of every cell.
        self._agenda: list[tuple[float, int, int, _CellKey]] = []
        self._agenda_version: int | None = None  # of the index that it was made by
        # (clock, cell) of at least every cell's next crossing.
        self._crossings: list[tuple[float, _CellKey]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._entries

    def add(self, node_id: int, reuse_class: int, value: float, last_access: int) -> None:
        """Enters a node, or moves it when its class, value or last access changed."""
        bucket = age_bucket(self._reuse.clock - last_access)
        cell = self._cell(reuse_class, value_level(value), bucket)
        previous = self._entries.get(node_id)
        if previous == (cell, last_access):
            return
        if previous is not None:
            previous[0].live -= 1
        self._enter(cell, last_access, node_id)
        self._schedule(cell, last_access, node_id)
        if len(cell.heap) > 2 * cell.live + _COMPACT_SLACK:
            # Locking and unlocking a hot node leaves one stale item each time.
            cell.heap[:] = {item for item in cell.heap if self._entries.get(item[1]) == (cell, item[0])}
            heapify(cell.heap)
        self._limit_agenda()

    def discard(self, node_id: int) -> None:
        entry = self._entries.pop(node_id, None)
        if entry is not None:
            entry[0].live -= 1

    def peek(self) -> int | None:
        """The node that loses least now; None if there is none."""
        if not self._entries:
            return None
        self._move_aged()
        while True:
            # Looked at each time: another thread may drive the index, as below a chain of storage tiers.
            if self._agenda_version != self._reuse.version:
                self._make_agenda()
            _, last_access, node_id, key = self._agenda[0]
            cell = self._cells[key]
            if self._entries.get(node_id) == (cell, last_access):
                return node_id
            heappop(self._agenda)
            self._schedule_oldest(cell)

    def pop(self) -> int | None:
        """Removes and returns the node that loses least now; None if there is none."""
        node_id = self.peek()
        if node_id is not None:
            cell = self._cells[heappop(self._agenda)[3]]
            self.discard(node_id)
            self._schedule_oldest(cell)
        return node_id

    def _cell(self, reuse_class: int, level: int, bucket: int) -> _Cell:
        key = (reuse_class, level, bucket)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(*key)
        return cell

    def _enter(self, cell: _Cell, last_access: int, node_id: int) -> None:
        self._entries[node_id] = (cell, last_access)
        heappush(cell.heap, (last_access, node_id))
        cell.live += 1
        self._await_crossing(cell, last_access)

    def _await_crossing(self, cell: _Cell, last_access: int) -> None:
        crossing = last_access + _BUCKET_ENDS[cell.bucket]
        if crossing < cell.next_crossing:
            cell.next_crossing = crossing
            heappush(self._crossings, (crossing, cell.key))

    def _oldest(self, cell: _Cell) -> tuple[int, int] | None:
        """The cell's oldest node; drops stale items ahead of it."""
        heap = cell.heap
        while heap:
            last_access, node_id = heap[0]
            if self._entries.get(node_id) == (cell, last_access):
                return heap[0]
            heappop(heap)
        return None

    def _schedule(self, cell: _Cell, last_access: int, node_id: int) -> None:
        """Enters the node into the agenda, where that will not be made anew anyway."""
        if self._agenda_version != self._reuse.version:
            return
        heappush(self._agenda, (self._loss(cell), last_access, node_id, cell.key))

    def _loss(self, cell: _Cell) -> float:
        return self._reuse.bucket_index(cell.reuse_class)[cell.bucket] * cell.value

    def _limit_agenda(self) -> None:
        """Has an agenda made anew that is full of stale items."""
        if len(self._agenda) > 2 * len(self._entries) + _COMPACT_SLACK:
            self._agenda_version = None

    def _schedule_oldest(self, cell: _Cell) -> None:
        oldest = self._oldest(cell)
        if oldest is not None:
            self._schedule(cell, *oldest)

    def _move_aged(self) -> None:
        """Moves nodes to the bucket of their age."""
        clock = self._reuse.clock
        while self._crossings and self._crossings[0][0] <= clock:
            crossing, key = heappop(self._crossings)
            cell = self._cells.get(key)
            if cell is None or cell.next_crossing != crossing:
                continue
            cell.next_crossing = math.inf
            while (oldest := self._oldest(cell)) and clock - oldest[0] >= _BUCKET_ENDS[cell.bucket]:
                heappop(cell.heap)
                cell.live -= 1
                older = self._cell(cell.reuse_class, cell.value_level, age_bucket(clock - oldest[0]))
                self._enter(older, *oldest)
                self._schedule(older, *oldest)
            if oldest is not None:
                self._await_crossing(cell, oldest[0])
                self._schedule(cell, *oldest)
        self._limit_agenda()

    def _make_agenda(self) -> None:
        """Ranks all cells, and forgets those that are empty."""
        version = self._reuse.version
        self._agenda, self._crossings = [], []
        for key, cell in list(self._cells.items()):
            oldest = self._oldest(cell)
            if oldest is None:
                del self._cells[key]
                continue
            self._agenda.append((self._loss(cell), *oldest, key))
            if cell.next_crossing < math.inf:
                self._crossings.append((cell.next_crossing, key))
        heapify(self._agenda)
        heapify(self._crossings)
        self._agenda_version = version

    def check_integrity(self) -> None:
        """Asserts that every node is in its cell's heap exactly as entered, and that counts agree."""
        live = dict.fromkeys(self._cells.values(), 0)
        for node_id, (cell, last_access) in self._entries.items():
            assert (last_access, node_id) in cell.heap, (node_id, last_access)
            assert 0 <= cell.bucket < NUM_AGE_BUCKETS
            live[cell] += 1
        assert all(cell.live == count for cell, count in live.items())
