"""Hyperbolic caching: evicts what was used least often for the time that it has been in the cache."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.sampled import SampledPolicy


class HyperbolicPolicy(SampledPolicy):
    """Blankstein, Sen, Freedman: Hyperbolic Caching: Flexible Caching for Web Applications, ATC 2017.

    The priority of a block is its uses divided by the accesses since it was inserted; of a random sample of
    the evictable blocks the one of lowest priority goes, the oldest of equals.

    Args:
        capacity, seed: see ``SampledPolicy``.
        samples: candidates looked at per victim.
    """

    name: ClassVar[str] = "hyperbolic"

    def __init__(self, capacity: int, *, seed: int = 0, samples: int = 64) -> None:
        super().__init__(capacity, seed=seed)
        assert samples > 0
        self._samples = samples
        self._time = 0
        self._inserted: dict[int, int] = {}
        self._uses: dict[int, int] = {}

    def insert(self, block: int) -> None:
        self._time += 1
        self._inserted[block] = self._time
        self._uses[block] = 1

    def access(self, block: int) -> None:
        self._time += 1
        self._uses[block] += 1

    def victim(self) -> int:
        candidates, now = self._candidates, self._time + 1
        sample = candidates
        if len(candidates) > self._samples:
            number, uniform = len(candidates), self._random.random
            sample = [candidates[int(uniform() * number)] for _ in range(self._samples)]
        block = min(
            sample, key=lambda each: (self._uses[each] / (now - self._inserted[each]), self._inserted[each])
        )
        self.held(block)
        del self._inserted[block], self._uses[block]
        return block
