"""Whether something grows with use: what a soak asks of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def slope(
    operations: Sequence[float], values: Sequence[float], *controls: Sequence[float]
) -> tuple[float, float]:
    """Least-squares growth per 1,000 operations over the second half, and its standard error.

    Both are NaN where it has no more values than what is fitted to them.

    Args:
        controls: what else moves the values up and down, such as the size of the tree.
    """
    half = len(operations) // 2
    columns = [np.ones(len(operations) - half), np.array(operations[half:], dtype=float) / 1000]
    columns += [np.array(control[half:], dtype=float) for control in controls]
    design = np.stack(columns, axis=1)
    y = np.array(values[half:], dtype=float)
    if len(y) <= design.shape[1]:
        return math.nan, math.nan
    fitted, *_ = np.linalg.lstsq(design, y, rcond=None)
    rest = y - design @ fitted
    variance = rest @ rest / (len(y) - design.shape[1])
    return float(fitted[1]), float(np.sqrt(variance * np.linalg.pinv(design.T @ design)[1, 1]))


def known(value: float, digits: int = 2) -> float | None:
    """Rounded, as JSON has it: null where it was not measured."""
    return None if math.isnan(value) else round(value, digits)
