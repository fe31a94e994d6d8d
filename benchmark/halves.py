"""Windows of half a trace, as ``benchmark/policy.py`` cuts them, and how much of it they have in common."""

from __future__ import annotations

import random
from itertools import combinations

SUB_TRACES = 10
MOONCAKE_REQUESTS = 12_031


def starts(requests: int) -> list[int]:
    """First requests of the windows; each has ``requests // 2`` of them, one behind the other."""
    return random.Random(0).sample(range(requests // 2), SUB_TRACES)


def shared_by_pairs(requests: int) -> float:
    """Part of the requests that two windows have in common, mean over all pairs."""
    half = requests // 2
    pairs = list(combinations(starts(requests), 2))
    return sum(half - abs(one - other) for one, other in pairs) / (len(pairs) * half)


def shared_with_first_half(requests: int) -> tuple[float, float]:
    """Part of a window that lies in the first half of the trace: the least and the most."""
    half = requests // 2
    shares = [(half - start) / half for start in starts(requests)]
    return min(shares), max(shares)
