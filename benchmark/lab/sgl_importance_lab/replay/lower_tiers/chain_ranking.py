"""Rankings of a chain's pages that follow a trace, each from nothing but its past."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from sgl_importance.reuse.turns import turn_bucket
from sgl_importance.storage.tier_chain.ranking import LruRanking, Ranking, ReuseRanking
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_nodes import TraceNodes
from sgl_importance_lab.replay.trace_turns import GONE_ON, TraceTurns, ranks_by_turns

LRU = "lru"
CHAIN_POLICIES = (LRU, IMPORTANCE)


class TraceRanking(Ranking, Protocol):
    """A ranking that is told of each request before pages are placed for it."""

    def request(self, index: int) -> None:
        """The request asks for its blocks, and its pages are held until all of them are placed."""
        ...


def trace_ranking(policy: str, trace: Trace, levels: int) -> TraceRanking:
    """The ranking of one of ``CHAIN_POLICIES``; ``importance`` is by turns where these rank."""
    if policy == LRU:
        return LruOfTrace(trace, levels)
    assert policy == IMPORTANCE
    facts = block_facts(trace)
    return (
        TurnsOfTrace(trace, facts, levels) if ranks_by_turns(trace) else ClassesOfTrace(trace, facts, levels)
    )


class LruOfTrace(LruRanking):
    """Least recently used."""

    def __init__(self, trace: Trace, levels: int) -> None:
        super().__init__(levels)
        self._trace = trace

    def request(self, index: int) -> None:
        for block in reversed(self._trace.request(index).tolist()):
            self.use(block)


class ClassesOfTrace(ReuseRanking):
    """The server's prediction by class and age."""

    def __init__(self, trace: Trace, facts: BlockFacts, levels: int) -> None:
        self._trace = trace
        self._nodes = TraceNodes(trace, UNIFORM_COST, facts=facts)
        super().__init__(levels, self._nodes.policy.reuse, unseen_class=0)

    def request(self, index: int) -> None:
        self._nodes.begin_request()
        start = int(self._trace.offsets[index])
        for position, block in enumerate(self._trace.request(index).tolist()):
            self._nodes.visit(block, start + position, position)
            node = self._nodes[block]
            self.visited(block, node.reuse_class, node.last_access)


class TurnsOfTrace:
    """By the turn that was the last to visit a block (``turn_replay``); all rates stay during a request."""

    def __init__(self, trace: Trace, facts: BlockFacts, levels: int) -> None:
        self._trace = trace
        self._nodes = TraceNodes(trace, UNIFORM_COST, facts=facts)
        self._turns = TraceTurns(trace, facts)
        self._visited_by: dict[int, int] = {}
        self._shared: set[int] = set()
        self._request = 0
        self._candidates: list[set[int]] = [set() for _ in range(levels)]
        # Made when a tier first asks in a request: (rate, last visit, block); blocks that left stay in it.
        self._heaps: list[list[tuple[float, int, int]] | None] = [None] * levels

    def request(self, index: int) -> None:
        self._nodes.begin_request()
        self._turns.begin_request(index)
        self._request = index
        self._heaps = [None] * len(self._heaps)
        start = int(self._trace.offsets[index])
        for position, block in enumerate(self._trace.request(index).tolist()):
            self._nodes.visit(block, start + position, position)
            self._visited_by[block] = index
            (self._shared.add if self._turns.is_shared[start + position] else self._shared.discard)(block)

    def use(self, page: int) -> None:
        """``request`` tells of all uses."""

    def rate(self, page: int) -> float:
        turn = self._visited_by[page]
        if page in self._shared or not self._turns.ranks[turn]:
            node, reuse = self._nodes[page], self._nodes.policy.reuse
            return reuse.index(node.reuse_class, reuse.clock - node.last_access)
        turn_class = int(self._turns.classes[turn])
        if turn_class == GONE_ON:
            return 0.0
        estimator = self._turns.estimator
        age = float(self._trace.seconds[self._request]) - float(self._turns.since[turn])
        return float(estimator.index[turn_class, turn_bucket(age)]) * estimator.seconds_per_request

    def enter(self, level: int, page: int) -> None:
        self._candidates[level].add(page)
        heap = self._heaps[level]
        if heap is not None:
            heappush(heap, self._item(page))

    def leave(self, level: int, page: int) -> None:
        self._candidates[level].discard(page)

    def cheapest(self, level: int) -> int | None:
        heap = self._heaps[level]
        if heap is None:
            heap = self._heaps[level] = [self._item(page) for page in self._candidates[level]]
            heapify(heap)
        while heap and heap[0][2] not in self._candidates[level]:
            heappop(heap)
        return heap[0][2] if heap else None

    def _item(self, page: int) -> tuple[float, int, int]:
        return self.rate(page), self._visited_by[page], page

    def forget(self, page: int) -> None:
        """A trace is short: its facts may stay."""
