"""Turn count: how likely a session is to go on, by nothing but how far it has come."""

from __future__ import annotations

from math import exp
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sgl_importance_lab.policies.reranked import RerankedPolicy
from sgl_importance_lab.policies.session_requests import NO_REQUEST, SessionRequests


class TurnCountPolicy(RerankedPolicy):
    """Yang, Li, Li, Lloyd: Learned Prefix Caching for Efficient LLM Inference, NeurIPS 2025, but its model.

    The victim has the lowest P(its session goes on), decayed by the time since the session's last request;
    what sessions share counts as that of the last one. The paper's model reads an embedding of the last
    prompts and the turn count; traces have no text, so here it is the share of the requests with the same
    turn count, (gone on + 1) / (answered + 2), which were gone on from so far. The decay is exponential over
    the mean gap between two turns; which one the paper's has, we do not know.

    Args:
        capacity: see ``EvictionPolicy``.
        requests: see ``RerankedPolicy``.
    """

    name: ClassVar[str] = "turncount"

    def __init__(self, capacity: int, requests: SessionRequests) -> None:
        super().__init__(capacity, requests)
        most = int(requests.turns.max(initial=0)) + 1
        self._answered: NDArray[np.int64] = np.zeros(most, dtype=np.int64)
        self._gone_on: NDArray[np.int64] = np.zeros(most, dtype=np.int64)
        self._gaps = 0
        self._waited = 0.0

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        requests = self._requests
        before = int(requests.before[request])
        if before != NO_REQUEST:
            self._gone_on[requests.turns[before]] += 1
            self._gaps += 1
            self._waited += self._now - float(requests.seconds[before])
        self._answered[requests.turns[request]] += 1

    def chance(self, request: int) -> float:
        """P(the session of this request goes on from it), decayed."""
        turn = int(self._requests.turns[request])
        goes_on = (self._gone_on[turn] + 1) / (self._answered[turn] + 2)
        age = self._now - float(self._requests.seconds[request])
        return float(goes_on) * exp(-age * self._gaps / self._waited) if self._waited else float(goes_on)

    def _category(self, request: int) -> int:
        return int(self._requests.turns[request])

    def _rank(self, request: int) -> float:
        return self.chance(request)
