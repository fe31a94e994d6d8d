"""Tail-optimised LRU: what a conversation can spare without missing its latency target goes first."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.ranked import RankedBlocks


class TlruPolicy(EvictionPolicy):
    """Zhang, Li, Moallemi, Peng: Tail-Optimized Caching for LLM Inference, arXiv:2510.15152, 2025.

    A conversation of L blocks whose next prompt adds Q blocks meets its target if at most X blocks must be
    computed, so it needs only its first L + Q - X blocks: those behind them go first, the least recently used
    of them before the others, and then LRU decides. L is the longest path through a block since it was
    computed and does not shrink as the tail is trimmed, as in sglang's ``tlru``, whose semantics this
    follows. There X and Q are options in tokens, and X must exceed Q, or nothing could be spared and the
    policy were LRU. Both depend on the model and its target; the default is the least that has an effect.

    Args:
        capacity: see ``EvictionPolicy``.
        threshold: X, blocks that can be computed within the target time to first token.
        next_prompt: Q, blocks that the next prompt is expected to add.
    """

    name: ClassVar[str] = "tlru"

    def __init__(self, capacity: int, *, threshold: int = 1, next_prompt: int = 0) -> None:
        super().__init__(capacity)
        assert threshold >= 0
        assert next_prompt >= 0
        self._spare = threshold - next_prompt
        self._time = 0
        self._path: list[int] = []  # blocks of the running request so far
        self._length = [0]  # of that path; its blocks share the list, and so see the path grow
        self._depth: dict[int, int] = {}  # blocks before a block on its path
        self._earlier: dict[int, int] = {}  # length of the longest path through it before the last one
        self._last_path: dict[int, list[int]] = {}  # length of the last path through it
        self._last_access: dict[int, int] = {}
        self._order = RankedBlocks()

    def begin_request(self, request: int) -> None:
        for block in self._path[-max(self._spare, 1) :]:
            if block in self._order:
                self._order.add(block, self._rank(block))
        self._path = []
        self._length = [0]

    def miss(self, block: int) -> None:
        self._keep_running_path()

    def insert(self, block: int) -> None:
        self._earlier[block] = 0
        self._use(block)

    def access(self, block: int) -> None:
        self._keep_running_path()
        self._earlier[block] = max(self._earlier[block], self._last_path[block][0])
        self._use(block)
        if block in self._order:
            self._order.add(block, self._rank(block))

    def _use(self, block: int) -> None:
        self._time += 1
        self._depth[block] = len(self._path)
        self._path.append(block)
        self._length[0] += 1
        self._last_path[block] = self._length
        self._last_access[block] = self._time

    def _keep_running_path(self) -> None:
        """In object-level replay nothing is held: a path that goes on must not be taken for a tail."""
        if self._path and self._path[-1] in self._order:
            self._order.add(self._path[-1], (1, self._last_access[self._path[-1]]))

    def evictable(self, block: int) -> None:
        self._order.add(block, self._rank(block))

    def held(self, block: int) -> None:
        self._order.discard(block)

    def victim(self) -> int:
        block = self._order.pop()
        del self._depth[block], self._earlier[block], self._last_path[block], self._last_access[block]
        return block

    def _rank(self, block: int) -> tuple[int, int]:
        longest = max(self._earlier[block], self._last_path[block][0])
        return (int(self._depth[block] < longest - self._spare), self._last_access[block])
