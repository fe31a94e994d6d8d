"""Tail-optimised LRU: what a conversation can spare without missing its latency target goes first."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.policy.ranked import RankedBlocks


class TlruPolicy(EvictionPolicy):
    """Zhang, Li, Moallemi, Peng: Tail-Optimized Caching for LLM Inference, arXiv:2510.15152, 2025.

    A conversation of L blocks whose next prompt adds Q blocks meets its target if at most X blocks must be
    computed, so it needs only its first L + Q - X blocks: those behind them go first, the least recently used
    of them before the others, and then LRU decides. L is the longest path through a block since it was
    computed and does not shrink as the tail is trimmed, as in sglang's ``tlru``, whose semantics this
    follows: there Q and X are options in tokens that are 0 unless given, which is plain LRU.

    Args:
        capacity: see ``EvictionPolicy``.
        threshold: X, blocks that can be computed within the target time to first token.
        next_prompt: Q, blocks that the next prompt is expected to add.
    """

    name: ClassVar[str] = "tlru"

    def __init__(self, capacity: int, *, threshold: int = 0, next_prompt: int = 0) -> None:
        super().__init__(capacity)
        assert threshold >= 0
        assert next_prompt >= 0
        self._spare = threshold - next_prompt
        self._time = 0
        self._path: list[int] = []  # blocks of the running request so far
        self._depth: dict[int, int] = {}  # blocks before it on its path
        self._history: dict[int, int] = {}  # blocks of the longest path through it
        self._last_access: dict[int, int] = {}
        self._order = RankedBlocks()

    def begin_request(self, request: int) -> None:
        length = len(self._path)
        for block in self._path:
            if self._history.get(block, length) < length:
                self._history[block] = length
                if block in self._order:
                    self._order.add(block, self._rank(block))
        self._path = []

    def insert(self, block: int) -> None:
        self._depth[block] = len(self._path)
        self._history[block] = 0
        self.access(block)

    def access(self, block: int) -> None:
        self._time += 1
        self._path.append(block)
        self._last_access[block] = self._time
        self._history[block] = max(self._history[block], len(self._path))
        if block in self._order:
            self._order.add(block, self._rank(block))

    def evictable(self, block: int) -> None:
        self._order.add(block, self._rank(block))

    def held(self, block: int) -> None:
        self._order.discard(block)

    def victim(self) -> int:
        block = self._order.pop()
        del self._depth[block], self._history[block], self._last_access[block]
        return block

    def _rank(self, block: int) -> tuple[int, int]:
        needed = self._depth[block] < self._history[block] - self._spare
        return (int(needed), self._last_access[block])
