"""Random replacement: every evictable block is as likely a victim as any other."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.sampled import SampledPolicy


class RandomPolicy(SampledPolicy):
    """Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer, 1966 (his rule RAND).

    Args:
        capacity, seed: see ``SampledPolicy``.
    """

    name: ClassVar[str] = "random"

    def insert(self, block: int) -> None:
        pass

    def access(self, block: int) -> None:
        pass

    def victim(self) -> int:
        block = self._candidates[int(self._random.random() * len(self._candidates))]
        self.held(block)
        return block
