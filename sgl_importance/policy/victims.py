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


def value_level(value: float) -> int:
    """Quantised log2 of a positive value."""
    return round(LEVELS_PER_OCTAVE * math.log2(value))


class _Group:
    """Nodes of one class and level; the heap may hold stale items, ``live`` does not count them."""

    __slots__ = ("factor", "heap", "live", "reuse_class")

    def __init__(self, reuse_class: int, level: int) -> None:
        self.reuse_class = reuse_class
        self.factor = 2.0 ** (level / LEVELS_PER_OCTAVE)
        self.heap: list[tuple[int, int]] = []  # (last access, node id)
        self.live = 0


class VictimOrder:
    """Evictable nodes, cheapest first.

    Args:
        probability: P(reuse) of a (class, age in admitted requests); never increasing in age.
    """

    def __init__(self, probability: Probability) -> None:
        self._probability = probability
        self._groups: dict[tuple[int, int], _Group] = {}
        self._entries: dict[int, tuple[_Group, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._entries

    def add(self, node_id: int, reuse_class: int, value: float, last_access: int) -> None:
        """Enters a node, or moves it when its class, value or last access changed."""
        key = (reuse_class, value_level(value))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(*key)
        previous = self._entries.get(node_id)
        if previous == (group, last_access):
            return
        if previous is not None:
            previous[0].live -= 1
        self._entries[node_id] = (group, last_access)
        heappush(group.heap, (last_access, node_id))
        group.live += 1
        if len(group.heap) > 2 * group.live + _COMPACT_SLACK:
            # Locking and unlocking a hot node leaves one stale item each time.
            group.heap[:] = {item for item in group.heap if self._entries.get(item[1]) == (group, item[0])}
            heapify(group.heap)

    def discard(self, node_id: int) -> None:
        entry = self._entries.pop(node_id, None)
        if entry is not None:
            entry[0].live -= 1

    def pop(self, clock: int) -> int | None:
        """Removes and returns the node that loses least at ``clock``; None if there is none."""
        best: tuple[float, int, int] | None = None
        empty = []
        probability, entries = self._probability, self._entries
        for key, group in self._groups.items():
            heap = group.heap
            while heap:
                last_access, node_id = heap[0]
                entry = entries.get(node_id)
                if entry is not None and entry[0] is group and entry[1] == last_access:
                    break
                heappop(heap)
            else:
                empty.append(key)
                continue
            loss = probability(group.reuse_class, clock - last_access) * group.factor
            # Equal losses are decided by age, then by node id: the same on every rank.
            if best is None or (loss, last_access, node_id) < best:
                best = (loss, last_access, node_id)
        for key in empty:
            del self._groups[key]
        if best is None:
            return None
        self.discard(best[2])
        return best[2]

    def check_integrity(self) -> None:
        """Asserts that every node is in its group's heap exactly as entered, and that counts agree."""
        live = dict.fromkeys(self._groups.values(), 0)
        for node_id, (group, last_access) in self._entries.items():
            assert (last_access, node_id) in group.heap, (node_id, last_access)
            live[group] += 1
        assert all(group.live == count for group, count in live.items())
