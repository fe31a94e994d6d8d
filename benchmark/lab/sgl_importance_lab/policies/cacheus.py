"""CACHEUS: a scan-resistant LRU and a churn-resistant LFU by turns, with a learning rate that adapts."""

from __future__ import annotations

from collections import OrderedDict
from math import exp, log, sqrt
from random import Random
from typing import ClassVar, NamedTuple

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue
from sgl_importance_lab.policies.ranked import RankedBlocks

_LEAST_WEIGHT = 0.01
_LEAST_RATE, _MOST_RATE = 0.001, 1.0
_PATIENCE = 10  # periods without learning after which the rate begins anew
_DIGITS = 3  # of rates that are compared


class _Evicted(NamedTuple):
    """A block in the history of the expert that chose it."""

    uses: int
    is_new: bool


class _LearningRate:
    """Follows the hit rate of each period up and down, and jumps where it falls without a change of the rate.

    Args:
        period: accesses, in the paper as many as the cache has blocks.
        random: of the jumps.
    """

    def __init__(self, period: int, random: Random) -> None:
        self.value = sqrt(2 * log(2) / period)
        self._start = min(max(self.value, _LEAST_RATE), _MOST_RATE)
        self._period = period
        self._random = random
        self._current, self._previous = self.value, 0.0
        self._hits = 0
        self._hit_rate = 0.0
        self._stale_periods = self._falling_periods = 0

    def hit(self) -> None:
        self._hits += 1

    def end_period(self) -> None:
        hit_rate = round(self._hits / self._period, _DIGITS)
        gained = round(hit_rate - self._hit_rate, _DIGITS)
        changed = round(self._current, _DIGITS) - round(self._previous, _DIGITS)
        if gained * changed:
            step = abs(self.value * changed) * (1 if gained * changed > 0 else -1)
            self.value = min(max(self.value + step, _LEAST_RATE), _MOST_RATE)
            self._stale_periods = self._falling_periods = 0
        elif gained < 0 or hit_rate == 0:
            self._stale_periods += 1
            self._falling_periods += gained < 0
            if self._stale_periods >= _PATIENCE:
                self.value, self._stale_periods = self._start, 0
            elif gained < 0 and self._falling_periods >= _PATIENCE:
                self.value, self._falling_periods = self._start, 0
            elif gained < 0:
                self._jump()
        self._previous, self._current = self._current, self.value
        self._hit_rate, self._hits = hit_rate, 0

    def _jump(self) -> None:
        if self.value >= _MOST_RATE:
            self.value = 0.9
        elif self.value <= _LEAST_RATE:
            self.value = 0.005
        else:
            factor = 1.25 if self._random.random() < 0.5 else 0.75
            self.value = min(max(self.value * factor, _LEAST_RATE), _MOST_RATE)


class CacheusPolicy(EvictionPolicy):
    """Rodriguez et al.: Learning Cache Replacement with CACHEUS, FAST 2021.

    What the paper leaves open is as in the authors' code (github.com/sylab/cacheus).

    Two experts name a victim each, and one is drawn by weight; where they agree nobody is held responsible. A
    miss of a block that an expert gave up lowers its weight.

    - SR-LRU: blocks that were used again are kept apart (``reused``) from new ones and from those that had to
      make room there, the *demoted* (``probation``), where its victim is the oldest. A hit of a demoted block
      makes room for reused ones; a miss of a block that was evicted while new makes room for new ones.
    - CR-LFU: the victim has the fewest uses, and is the latest used of these.

    A block remembers its uses in the history, and is new until it is used again. In a prefix tree the experts
    choose among evictable blocks; where none is on probation, SR-LRU takes the oldest of the reused.

    Args:
        capacity: see ``EvictionPolicy``.
        seed: of the draws.
        probation: initial part of the capacity for blocks on probation.
        history: remembered blocks of each expert, as a part of the capacity.
    """

    name: ClassVar[str] = "cacheus"

    def __init__(
        self, capacity: int, *, seed: int = 0, probation: float = 0.01, history: float = 0.5
    ) -> None:
        super().__init__(capacity)
        assert 0 <= probation <= 1
        assert history >= 0
        self._random = Random(seed)
        self._rate = _LearningRate(capacity, self._random)
        self._candidates: set[int] = set()
        self._probation, self._reused = BlockQueue(self._candidates), BlockQueue(self._candidates)
        self._rarest = RankedBlocks()
        self._probation_limit = max(1, int(probation * capacity + 0.5))
        self._uses: dict[int, int] = {}
        self._last_use: dict[int, int] = {}
        self._new: set[int] = set()
        self._demoted: set[int] = set()
        self._history_capacity = int(history * capacity)
        self._histories: tuple[OrderedDict[int, _Evicted], OrderedDict[int, _Evicted]]
        self._histories = OrderedDict(), OrderedDict()
        self._new_in_history = 0  # of the first expert
        self._recency_weight = 0.5
        self._time = 0
        self._returning: _Evicted | None = None
        self._has_room = False

    @property
    def _reused_limit(self) -> int:
        return self.capacity - self._probation_limit

    # ---- events ----

    def miss(self, block: int) -> None:
        self._tick()
        self._has_room = len(self._uses) < self.capacity
        self._returning = None
        for expert, history in enumerate(self._histories):
            evicted = history.pop(block, None)
            if evicted is not None:
                self._returning = evicted
                if expert == 0 and evicted.is_new:
                    self._new_in_history -= 1
                    self._make_room_for_new()
                self._regret(expert)

    def insert(self, block: int) -> None:
        returning, self._returning = self._returning, None
        has_room, self._has_room = self._has_room, False
        self._uses[block] = returning.uses + 1 if returning is not None else 1
        self._last_use[block] = self._time
        if returning is not None:
            self._reused.append(block)
            self._demote(self._reused_limit - 1)
        elif has_room and not len(self._probation) and len(self._reused) < self._reused_limit:
            self._reused.append(block)
        elif has_room and len(self._probation) < self._probation_limit:
            self._probation.append(block)
        else:
            self._new.add(block)
            self._probation.append(block)
            self._demote(self._reused_limit - 1)

    def access(self, block: int) -> None:
        self._tick()
        self._rate.hit()
        self._uses[block] += 1
        self._last_use[block] = self._time
        self._new.discard(block)
        if block in self._probation:
            if block in self._demoted:
                self._make_room_for_reused()
                self._demoted.remove(block)
            self._probation.remove(block)
            self._demote(self._reused_limit - 1)
        self._reused.append(block)
        if block in self._rarest:
            self.evictable(block)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        (self._probation if block in self._probation else self._reused).offer(block)
        self._rarest.add(block, (self._uses[block], -self._last_use[block]))

    def held(self, block: int) -> None:
        self._candidates.discard(block)
        self._rarest.discard(block)

    def victim(self) -> int:
        oldest = self._probation.oldest_candidate()
        if oldest is None:
            oldest = self._reused.oldest_candidate()
        rarest = self._rarest.first()
        if oldest is None or rarest is None:
            raise IndexError("no evictable block")
        expert = 0 if self._random.random() < self._recency_weight else 1
        block = (oldest, rarest[1])[expert]
        self.held(block)
        (self._probation if block in self._probation else self._reused).remove(block)
        evicted = _Evicted(self._uses.pop(block), block in self._new)
        del self._last_use[block]
        self._new.discard(block)
        self._demoted.discard(block)
        if oldest != rarest[1]:
            self._remember(expert, block, evicted)
        return block

    # ---- learning ----

    def _tick(self) -> None:
        self._time += 1
        if self._time % self.capacity == 0:
            self._rate.end_period()

    def _regret(self, expert: int) -> None:
        weights = [self._recency_weight, 1 - self._recency_weight]
        weights[expert] *= exp(-self._rate.value)
        weight = weights[0] / sum(weights)
        self._recency_weight = min(max(weight, _LEAST_WEIGHT), 1 - _LEAST_WEIGHT)

    def _remember(self, expert: int, block: int, evicted: _Evicted) -> None:
        history = self._histories[expert]
        history[block] = evicted
        if expert == 0:
            self._new_in_history += evicted.is_new
        if len(history) > self._history_capacity:
            _, forgotten = history.popitem(last=False)
            if expert == 0:
                self._new_in_history -= forgotten.is_new

    def _make_room_for_reused(self) -> None:
        step = max(1, int(self._new_in_history / max(1, len(self._demoted)) + 0.5))
        self._probation_limit = max(1, self._probation_limit - step)

    def _make_room_for_new(self) -> None:
        step = max(1, int(len(self._demoted) / max(1, self._new_in_history) + 0.5))
        self._probation_limit = max(1, min(self.capacity - 1, self._probation_limit + step))

    def _demote(self, limit: int) -> None:
        """Moves the oldest reused blocks to probation until no more than ``limit`` are left."""
        while len(self._reused) > max(limit, 0):
            block = self._reused.oldest()
            assert block is not None
            self._reused.remove(block)
            self._demoted.add(block)
            self._probation.append(block)
