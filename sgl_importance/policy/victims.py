"""The eviction order: which node loses least, found without looking at every node.

Loss is P(reuse | class, age) x value, and a node's value and class change only when something happens to
it. Nodes are therefore grouped by (class, quantised log value), and kept by last access within a group.
P never increases with age, so the oldest node of a group is its cheapest, and the victim is the cheapest
of the groups' heads: O(groups) to pick, O(log n) per event, whatever the number of nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

LEVELS_PER_OCTAVE = 4  # nodes within 19 % of each other's value count as equal, and recency decides
_COMPACT_SLACK = 64

Probability = Callable[[int, int], float]
_Group = tuple[int, int]


def value_level(value: float) -> int:
    """Quantised log2 of a positive value."""
    return round(LEVELS_PER_OCTAVE * math.log2(value))


class VictimOrder:
    """Evictable nodes, cheapest first.

    Args:
        probability: P(reuse) of a (class, age in admitted requests); never increasing in age.
    """

    def __init__(self, probability: Probability) -> None:
        self._probability = probability
        self._heaps: dict[_Group, list[tuple[int, int]]] = {}
        self._live: dict[_Group, int] = {}
        self._entries: dict[int, tuple[_Group, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._entries

    def add(self, node_id: int, reuse_class: int, value: float, last_access: int) -> None:
        """Enters a node, or moves it when its class, value or last access changed."""
        group = (reuse_class, value_level(value))
        entry = (group, last_access)
        previous = self._entries.get(node_id)
        if previous == entry:
            return
        if previous is not None:
            self._forget(previous[0])
        self._entries[node_id] = entry
        heap = self._heaps.setdefault(group, [])
        heappush(heap, (last_access, node_id))
        live = self._live.get(group, 0) + 1
        self._live[group] = live
        if len(heap) > 2 * live + _COMPACT_SLACK:
            # Locking and unlocking a hot node leaves one stale entry each time.
            heap[:] = {item for item in heap if self._is_live(group, item)}
            heapify(heap)

    def discard(self, node_id: int) -> None:
        entry = self._entries.pop(node_id, None)
        if entry is not None:
            self._forget(entry[0])

    def pop(self, clock: int) -> int | None:
        """Removes and returns the node that loses least at ``clock``; None if there is none."""
        best: tuple[float, int, int] | None = None
        probability = self._probability
        for group in list(self._heaps):
            heap = self._heaps[group]
            while heap and not self._is_live(group, heap[0]):
                heappop(heap)
            if not heap:
                del self._heaps[group]
                self._live.pop(group, None)
                continue
            last_access, node_id = heap[0]
            reuse_class, level = group
            loss = probability(reuse_class, clock - last_access) * 2.0 ** (level / LEVELS_PER_OCTAVE)
            candidate = (loss, last_access, node_id)
            if best is None or candidate < best:
                best = candidate
        if best is None:
            return None
        self.discard(best[2])
        return best[2]

    def check_integrity(self) -> None:
        """Asserts that every node is in its group's heap exactly as entered, and that counts agree."""
        live: dict[_Group, int] = {}
        for node_id, (group, last_access) in self._entries.items():
            assert (last_access, node_id) in self._heaps[group], (node_id, group)
            live[group] = live.get(group, 0) + 1
        assert live == {group: count for group, count in self._live.items() if count}, (live, self._live)

    def _is_live(self, group: _Group, item: tuple[int, int]) -> bool:
        return self._entries.get(item[1]) == (group, item[0])

    def _forget(self, group: _Group) -> None:
        self._live[group] -= 1
