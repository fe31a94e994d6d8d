"""Intervals over the orders in which sessions begin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t of 95 % intervals, by number of values."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval; the mean alone where there is one value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = T_95[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
