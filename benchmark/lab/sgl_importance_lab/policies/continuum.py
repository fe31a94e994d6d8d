"""Continuum: what an answer with a tool call left is kept for as long as waiting for the tool pays."""

from __future__ import annotations

from math import log
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sgl_importance_lab.policies.reranked import RerankedPolicy
from sgl_importance_lab.policies.session_requests import NO_REQUEST, SessionRequests


class ContinuumPolicy(RerankedPolicy):
    """Li, Mang, He, Zhang, Mao, Chen, Zhou, Cheung, Gonzalez, Stoica: Continuum: Efficient and Robust
    Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live, arXiv:2511.02230, 2025.

    What a request that ended with a tool call used is pinned for the time to live that makes
    P(the tool takes no longer) x benefit - time to live largest, over the times that were seen; P is their
    empirical distribution. It is unpinned when that time is over or the session goes on, and then LRU
    decides, as it does where everything is pinned. Until 100 times were seen the tool is believed to take
    Exp(1) seconds, for which the largest is at log(benefit).

    The benefit is the time of computing the request's text. Left out, as no trace says it: times by name of
    the tool, the delay in the queue that an eviction costs, and the order in which requests are scheduled. A
    request is answered at once, so the time that a tool takes contains that of its answer.

    Args:
        capacity: see ``EvictionPolicy``.
        requests: see ``RerankedPolicy``.
        prefill_tokens_per_second: at which a text is computed.
    """

    name: ClassVar[str] = "continuum"
    LEAST_HISTORY: ClassVar[int] = 100

    def __init__(
        self, capacity: int, requests: SessionRequests, *, prefill_tokens_per_second: float = 10_000.0
    ) -> None:
        super().__init__(capacity, requests)
        assert prefill_tokens_per_second > 0
        self._prefill_tokens_per_second = prefill_tokens_per_second
        self._times = np.zeros(len(requests.seconds))  # of tools, the first ``_seen`` ascending
        self._seen = 0
        self._pinned_until = np.full(len(requests.seconds), -np.inf)

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        requests = self._requests
        before = int(requests.before[request])
        if before != NO_REQUEST:
            self._pinned_until[before] = -np.inf
            if requests.called_tool[before]:
                self._observe(self._now - float(requests.seconds[before]))
        if requests.called_tool[request]:
            benefit = float(requests.tokens[request]) / self._prefill_tokens_per_second
            self._pinned_until[request] = self._now + self.time_to_live(benefit)

    def _observe(self, seconds: float) -> None:
        place = int(np.searchsorted(self._times[: self._seen], seconds))
        self._times[place + 1 : self._seen + 1] = self._times[place : self._seen]
        self._times[place] = seconds
        self._seen += 1

    def time_to_live(self, benefit: float) -> float:
        """Seconds for which a text is pinned that takes ``benefit`` seconds to compute."""
        if self._seen <= self.LEAST_HISTORY:
            return log(benefit) if benefit > 1.0 else 0.0
        times: NDArray[np.float64] = self._times[: self._seen]
        rewards = np.arange(1, self._seen + 1) / self._seen * benefit - times
        best = int(np.argmax(rewards))
        return float(times[best]) if rewards[best] > 0.0 else 0.0

    def _category(self, request: int) -> int:
        # A pin ends by itself, so what was pinned together stays apart from all others.
        return request if self._requests.called_tool[request] else NO_REQUEST

    def _rank(self, request: int) -> tuple[int, int]:
        return int(self._pinned_until[request] > self._now), request
