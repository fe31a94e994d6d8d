"""Workload-aware eviction: the block that is least likely to be used soon, by the category of its request."""

from __future__ import annotations

from math import exp
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sgl_importance_lab.policies.reranked import RerankedPolicy
from sgl_importance_lab.policies.session_requests import NO_REQUEST, SessionRequests


class WorkloadAwarePolicy(RerankedPolicy):
    """Wang, Han, Wei, Shen, Zhang, Fang, Chen, Yu, Chen: KVCache Cache in the Wild: Characterizing and
    Optimizing KVCache Cache at a Large Cloud Provider, USENIX ATC 2025, arXiv:2506.02634.

    The victim is the block with the lowest probability of being used within the next lifespan, among equals
    the one further from the start of its prompt. Blocks of one category of requests are used again in the
    same share of cases, after times that are exponentially distributed. A category is a request's type and
    turn; traces name no types, so here it is the turn.

    The paper fits the distributions to an earlier hour; here they are what was seen since the start of the
    trace, of the blocks of all categories while one has fewer than ``LEAST_USES``. The lifespan, of which we
    know no definition, is the mean time between the last use and the eviction of the blocks evicted so far.

    Args:
        capacity: see ``EvictionPolicy``.
        requests: see ``RerankedPolicy``.
    """

    name: ClassVar[str] = "workload"
    LEAST_USES: ClassVar[int] = 100

    def __init__(self, capacity: int, requests: SessionRequests) -> None:
        super().__init__(capacity, requests)
        categories = int(requests.turns.max(initial=0)) + 1  # the first is of all blocks
        self._uses: NDArray[np.float64] = np.zeros(categories)
        self._used_again: NDArray[np.float64] = np.zeros(categories)
        self._waited: NDArray[np.float64] = np.zeros(categories)  # seconds, of those that were used again
        blocks = int(requests.blocks.max(initial=-1)) + 1
        self._last_use = np.full(blocks, NO_REQUEST, dtype=np.int64)  # of evicted blocks, too
        self._evicted = 0
        self._lived = 0.0  # seconds from last use to eviction, of all evicted blocks
        self._lifespan = 0.0

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        requests = self._requests
        blocks = requests.blocks[requests.offsets[request] : requests.offsets[request + 1]]
        last = self._last_use[blocks]
        last = last[last != NO_REQUEST]
        for categories in (np.zeros_like(last), requests.turns[last]):
            np.add.at(self._used_again, categories, 1.0)
            np.add.at(self._waited, categories, self._now - requests.seconds[last])
        self._last_use[blocks] = request
        self._uses[[0, requests.turns[request]]] += len(blocks)
        self._lifespan = self._lived / self._evicted if self._evicted else self._now

    def chance(self, request: int) -> float:
        """P(used within the next lifespan, and not before now) of what this request was the last to use."""
        category = int(self._requests.turns[request])
        if self._uses[category] < self.LEAST_USES:
            category = 0
        if not self._used_again[category]:
            return 0.0
        mean = max(self._waited[category] / self._used_again[category], 1e-9)
        ever = min(self._used_again[category] / self._uses[category], 1.0)
        late = ever * exp(-(self._now - float(self._requests.seconds[request])) / mean)
        never = 1.0 - ever
        return float(late * (1.0 - exp(-self._lifespan / mean)) / (never + late)) if late else 0.0

    def _category(self, request: int) -> int:
        return int(self._requests.turns[request])

    def _rank(self, request: int) -> float:
        return self.chance(request)

    def _forget(self, request: int) -> None:
        self._evicted += 1
        self._lived += self._now - float(self._requests.seconds[request])
