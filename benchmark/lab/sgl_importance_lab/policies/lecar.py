"""LeCaR: LRU and LFU by turns, each chosen the less the sooner its victims are regretted."""

from __future__ import annotations

from collections import OrderedDict
from math import exp
from random import Random
from typing import ClassVar, NamedTuple

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.ranked import RankedBlocks

_LEAST_WEIGHT = 0.01


class _Evicted(NamedTuple):
    """A block in the history of the expert that chose it."""

    uses: int
    time: int


class LeCaRPolicy(EvictionPolicy):
    """Vietri et al.: Driving Cache Replacement with ML-based LeCaR, HotStorage 2018.

    Two experts, LRU and LFU, name a victim each; one is drawn by weight. A miss of a block that an expert
    gave up is its regret: its weight falls by exp(-rate x discount**age), where age is the accesses since
    then. As in the authors' code, a block remembers its uses in the history, and where the experts agree
    nobody is held responsible. In a prefix tree the experts choose among evictable blocks.

    Args:
        capacity: see ``EvictionPolicy``.
        seed: of the draws.
        rate: of learning.
        discount: what is left of a regret after as many accesses as the cache has blocks.
        history: remembered blocks of each expert, as a part of the capacity.
    """

    name: ClassVar[str] = "lecar"

    def __init__(
        self,
        capacity: int,
        *,
        seed: int = 0,
        rate: float = 0.45,
        discount: float = 0.005,
        history: float = 0.5,
    ) -> None:
        super().__init__(capacity)
        assert rate >= 0
        assert 0 < discount <= 1
        assert history >= 0
        self._random = Random(seed)
        self._rate = rate
        self._discount = discount ** (1 / capacity)
        self._history_capacity = int(history * capacity)
        self._uses: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._oldest, self._rarest = RankedBlocks(), RankedBlocks()
        self._histories: tuple[OrderedDict[int, _Evicted], OrderedDict[int, _Evicted]]
        self._histories = OrderedDict(), OrderedDict()
        self._recency_weight = 0.5
        self._time = 0
        self._returning_uses = 0

    def miss(self, block: int) -> None:
        self._returning_uses = 0
        for expert, history in enumerate(self._histories):
            evicted = history.pop(block, None)
            if evicted is not None:
                self._returning_uses = evicted.uses
                self._regret(expert, self._discount ** (self._time - evicted.time))

    def _regret(self, expert: int, regret: float) -> None:
        weights = [self._recency_weight, 1 - self._recency_weight]
        weights[expert] *= exp(-self._rate * regret)
        weight = weights[0] / sum(weights)
        self._recency_weight = min(max(weight, _LEAST_WEIGHT), 1 - _LEAST_WEIGHT)

    def insert(self, block: int) -> None:
        self._use(block, self._returning_uses + 1)
        self._returning_uses = 0

    def access(self, block: int) -> None:
        self._use(block, self._uses[block] + 1)

    def _use(self, block: int, uses: int) -> None:
        self._time += 1
        self._uses[block], self._last_use[block] = uses, self._time
        if block in self._oldest:
            self.evictable(block)

    def evictable(self, block: int) -> None:
        self._oldest.add(block, self._last_use[block])
        self._rarest.add(block, (self._uses[block], self._last_use[block]))

    def held(self, block: int) -> None:
        self._oldest.discard(block)
        self._rarest.discard(block)

    def victim(self) -> int:
        oldest, rarest = self._oldest.first(), self._rarest.first()
        if oldest is None or rarest is None:
            raise IndexError("no evictable block")
        expert = 0 if self._random.random() < self._recency_weight else 1
        block = (oldest, rarest)[expert][1]
        self.held(block)
        del self._last_use[block]
        evicted = _Evicted(self._uses.pop(block), self._time)
        if oldest[1] != rarest[1]:
            history = self._histories[expert]
            history[block] = evicted
            if len(history) > self._history_capacity:
                history.popitem(last=False)
        return block
