"""Skewed choice: few things are asked for often, many rarely."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Zipf:
    """Ranks 0 to ``count - 1``, drawn with probability proportional to 1 / (rank + 1) ** exponent.

    Args:
        count: number of ranks.
        exponent: 0 is uniform; production traces of shared prompts are near 1.
    """

    def __init__(self, count: int, exponent: float) -> None:
        if count < 1 or exponent < 0:
            raise ValueError(f"need at least one rank and an exponent of 0 or more, not {count}, {exponent}")
        self._cumulative = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(self, rng: Random) -> int:
        return min(bisect(self._cumulative, rng.random() * self._cumulative[-1]), len(self._cumulative) - 1)

    def choose(self, items: Sequence[T], rng: Random) -> T:
        """One of ``items``, the first being the most popular."""
        assert len(items) == len(self._cumulative)
        return items[self.draw(rng)]
