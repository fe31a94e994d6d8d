"""The estimator of least hit density: expected hits per block and unit of time, by class and age."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

CLASSES = 16
MAX_AGE = 20_000
_DECAY = 0.9
_INITIAL_SHIFT = 10
_AGE_ERROR_TOLERANCE = 0.01
_FIRST_ADAPTATION, _LAST_ADAPTATION = 5, 25  # reconfigurations at which the age unit is set

FloatArray: TypeAlias = npt.NDArray[np.float64]


def _class_of_ages() -> list[int]:
    """Class by the sum of a block's last two hit ages: each halving of the age is a class up."""
    classes = [CLASSES - 1]
    for age in range(1, MAX_AGE + 1):
        halvings = 0
        while age << halvings < MAX_AGE and halvings < CLASSES - 1:
            halvings += 1
        classes.append(halvings)
    return classes


class HitDensity:
    """Counts hits and evictions by (class, age) and turns them into densities, as ``lhd.cpp`` of the authors.

    Attributes:
        shift: an age is a number of accesses divided by 2 to this power.
        densities: hit density by class and age, as lists, which are read block by block; minus infinity at
            the greatest age, which stands for all that are not resolved: such blocks go first.
        reconfigurations: how often the densities were computed anew.
    """

    class_of_age = _class_of_ages()

    def __init__(self) -> None:
        self.shift = _INITIAL_SHIFT
        self.reconfigurations = 0
        self._hits: FloatArray = np.zeros((CLASSES, MAX_AGE))
        self._evictions: FloatArray = np.zeros((CLASSES, MAX_AGE))
        # A prior of recency: density falls with age, and is higher where hits came soon.
        prior = np.arange(CLASSES, 2 * CLASSES)[:, None] + 1.0
        densities = prior / np.arange(1, MAX_AGE + 1)
        densities[:, -1] = -np.inf
        self.densities: list[list[float]] = densities.tolist()
        self._blocks = 0.0  # decayed sum of resident blocks, and of its weights
        self._weight = 0.0

    def age(self, accesses: int) -> int:
        """Age of a block that was last used so many accesses ago, at most MAX_AGE - 1."""
        return min(accesses >> self.shift, MAX_AGE - 1)

    def hit(self, reuse_class: int, age: int) -> None:
        self._hits[reuse_class, age] += 1

    def evict(self, reuse_class: int, age: int) -> None:
        self._evictions[reuse_class, age] += 1

    def reconfigure(self, resident: int) -> None:
        """Decays the counts and computes the densities anew.

        Args:
            resident: blocks in the cache.
        """
        self._hits *= _DECAY
        self._evictions *= _DECAY
        self._adapt_age_unit(resident)
        self._model()
        self.reconfigurations += 1

    def _model(self) -> None:
        """Density at an age: hits from there on over time spent from there on, of blocks that got there."""
        hits = _sums_from_age(self._hits)
        events = _sums_from_age(self._hits + self._evictions)
        lifetime = _sums_from_age(events)
        densities = np.divide(hits, lifetime, out=np.zeros_like(hits), where=events > 1e-5)
        densities[:, -1] = -np.inf
        self.densities = densities.tolist()

    def _adapt_age_unit(self, resident: int) -> None:
        """Sets the unit of age so that MAX_AGE covers the ages that a cache of this size sees."""
        self._blocks = self._blocks * _DECAY + resident
        self._weight = self._weight * _DECAY + 1
        if self.reconfigurations not in (_FIRST_ADAPTATION, _LAST_ADAPTATION):
            return
        unit = self._blocks / self._weight / (_AGE_ERROR_TOLERANCE * MAX_AGE)
        shift = max(int(np.ceil(np.log2(max(unit, 2.0)))), 1)
        self._hits = _rescale(self._hits, shift - self.shift)
        self._evictions = _rescale(self._evictions, shift - self.shift)
        self.shift = shift
        self._blocks *= 8
        self._weight *= 8


def _sums_from_age(counts: FloatArray) -> FloatArray:
    return np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]


def _rescale(counts: FloatArray, delta: int) -> FloatArray:
    """Counts by age in units 2**delta times as long; what no longer fits is counted at the greatest age."""
    if delta == 0:
        return counts
    factor = 1 << abs(delta)
    ages = counts[:, :-1]
    if delta > 0:
        padding = -ages.shape[1] % factor
        moved = np.pad(ages, ((0, 0), (0, padding))).reshape(CLASSES, -1, factor).sum(axis=2)
    else:
        moved = np.repeat(ages[:, : -(-MAX_AGE // factor)] / factor, factor, axis=1)[:, : MAX_AGE - 1]
    rescaled = np.zeros_like(counts)
    rescaled[:, : moved.shape[1]] = moved
    rescaled[:, -1] = np.maximum(counts.sum(axis=1) - moved.sum(axis=1), 0.0)
    return rescaled
