"""The reuse estimator: a life table per class of nodes, learnt online.

Every visit of a node begins an *at-risk interval*, which ends with the next visit. Of each class we count,
per age bucket, the intervals that reached the bucket and those that ended in it: the hazard of a bucket is a
Beta posterior mean. Open intervals count up to their present age (they are censored, not lost), so an
eviction loses no evidence, and the estimate does not depend on the size of the cache.

An old interval is kept with those that began near it, as if it had begun with the last request of its group:
up to 3 % younger than it is. So ages up to eight times as old take 1 % more memory.
"""

from __future__ import annotations

import numpy as np

from sgl_importance.reuse.life_table import (
    BUCKET_STARTS,
    BUCKET_WIDTHS,
    EXACT_AGE,
    GROUP,
    MAX_AGE,
    NUM_AGE_BUCKETS,
    NUM_GROUPS,
    FloatArray,
    age_bucket,
)
from sgl_importance.reuse.reuse_class import NUM_CLASSES, NUM_VISIT_LEVELS

REFRESH_INTERVAL = 16
"""Admitted requests between two computations of the index."""
HALF_LIFE = 2**13
"""Admitted requests after which evidence counts half, so that the estimate follows the traffic."""
DECAY = 0.5 ** (REFRESH_INTERVAL / HALF_LIFE)
"""Of the evidence at each of these computations."""


FIRST_COLUMNS = 32
"""Classes for which there is room at first. Of all that there are, a server sees a few dozen."""
_STARTS: list[int] = BUCKET_STARTS.tolist()


def _group_row(start: int) -> int:
    """Of the open intervals that began in the request's group."""
    return EXACT_AGE + start // GROUP % NUM_GROUPS


def _row_in(rows: dict[int, int], reuse_class: int) -> int:
    """Of the class's estimate: classes that have not occurred share their level's row behind the others."""
    return rows.get(reuse_class, len(rows) + reuse_class % NUM_VISIT_LEVELS)


class ReuseEstimator:
    """Reuse of nodes by class and age, learnt online. The clock counts admitted requests.

    Each method that ends an interval needs only the class under which it began and its start: no record of
    single intervals is kept, whatever their number. Classes get a column of the counts when they first occur.
    """

    def __init__(self) -> None:
        from sgl_importance.reuse.reached import AGES, count_reached  # imports numba

        self._count_reached, self._ages = count_reached, AGES
        self.clock = 0
        self.version = 0
        """Grows whenever the index changes."""
        self._columns: dict[int, int] = {}  # by class
        # Open intervals by start and column: a ring of requests, and behind it one of groups. The system
        # gives it no memory until it is written to.
        self._open = np.zeros((EXACT_AGE + NUM_GROUPS, FIRST_COLUMNS), dtype=np.int32)
        self._hits = np.zeros((FIRST_COLUMNS, NUM_AGE_BUCKETS))
        self._reached = np.zeros((FIRST_COLUMNS, NUM_AGE_BUCKETS))
        self._index: tuple[dict[int, int], list[list[float]]] = {}, []  # rows by class; values by row
        self._hazards: FloatArray = np.empty(0)
        self._probabilities: list[list[float]] | None = None  # computed on demand
        self.refresh()

    def tick(self) -> int:
        """One more request is admitted; returns the new clock."""
        self.clock += 1
        self._count_reached(self.clock, self._open, self._reached[: len(self._columns)], self._ages)
        if self.clock % REFRESH_INTERVAL == 0:
            self._hits *= DECAY
            self._reached *= DECAY
            self.refresh()
        return self.clock

    def began(self, reuse_class: int) -> None:
        """A node of this class was visited or made now: an interval begins."""
        column = self._column(reuse_class)  # which may replace the arrays
        self._open[self.clock % EXACT_AGE, column] += 1

    def resumed(self, reuse_class: int, start: int) -> None:
        """An interval that began at clock ``start`` goes on twice: its node was cut in two."""
        if self.clock - start < MAX_AGE:
            column = self._column(reuse_class)
            self._open[self._row(start), column] += 1

    def hit(self, reuse_class: int, start: int) -> None:
        """An interval that began at clock ``start`` ends with a visit."""
        column = self._column(reuse_class)
        self._hits[column, age_bucket(self._counted_age(start))] += 1.0
        self.forgotten(reuse_class, start)

    def forgotten(self, reuse_class: int, start: int) -> None:
        """An interval is censored: the next visit could not be recognised any more."""
        if self.clock - start < MAX_AGE:
            column = self._column(reuse_class)
            self._open[self._row(start), column] -= 1

    def reclassified(self, old_class: int, new_class: int, start: int) -> None:
        """The node's class changed: its interval goes on in the new one."""
        self.forgotten(old_class, start)
        self.resumed(new_class, start)

    def forget_open(self) -> None:
        """Every open interval is censored."""
        self._open[:] = 0

    def open_intervals(self) -> dict[tuple[int, int], int]:
        """How many intervals have no outcome yet, by their row of the rings and their class."""
        class_of = {column: each for each, column in self._columns.items()}
        found = np.argwhere(self._open).tolist()
        return {(row, class_of[column]): int(self._open[row, column]) for row, column in found}

    def counts(self) -> tuple[FloatArray, FloatArray]:
        """The ``hits`` and ``reached`` so far, without open intervals; float64 [NUM_CLASSES, NUM_AGE_BUCKETS]
        each, copies."""
        hits, reached = np.zeros((2, NUM_CLASSES, NUM_AGE_BUCKETS))
        classes, columns = list(self._columns), list(self._columns.values())
        hits[classes], reached[classes] = self._hits[columns], self._reached[columns]
        return hits, reached

    def restore(self, hits: FloatArray, reached: FloatArray, clock: int) -> None:
        """Goes on where an earlier estimator ended, whose ``counts`` these are; ``resumed`` gives it the
        intervals that were open."""
        assert not self._open.any(), "restore an estimator without open intervals"
        self._hits[:] = self._reached[:] = 0.0
        for reuse_class in np.flatnonzero(hits.any(axis=1) | reached.any(axis=1)).tolist():
            column = self._column(reuse_class)
            self._hits[column], self._reached[column] = hits[reuse_class], reached[reuse_class]
        self.clock = clock
        self.refresh()

    def _row(self, start: int) -> int:
        """Of the open intervals that began then."""
        return start % EXACT_AGE if self.clock - start < EXACT_AGE else _group_row(start)

    def _counted_age(self, start: int) -> int:
        """Of an interval that began then: old ones have got to no bucket that their group has not got to."""
        age = self.clock - start
        return age if age < EXACT_AGE else self.clock - (start | (GROUP - 1))

    def _column(self, reuse_class: int) -> int:
        column = self._columns.get(reuse_class)
        if column is None:
            column = self._columns[reuse_class] = len(self._columns)
            if column == len(self._hits):
                self._hits = np.concatenate((self._hits, np.zeros_like(self._hits)))
                self._reached = np.concatenate((self._reached, np.zeros_like(self._reached)))
                self._open = np.hstack((self._open, np.zeros_like(self._open)))
        return column

    def refresh(self) -> None:
        """Computes hazards and index from the evidence so far."""
        from sgl_importance.reuse.hazards import hazards, retention_index  # imports numba

        # A row for each class that has occurred, by its number, then one for each level's other classes.
        active = sorted(self._columns)
        columns = [self._columns[each] for each in active]
        hits, reached = np.zeros((2, len(active) + NUM_VISIT_LEVELS, NUM_AGE_BUCKETS))
        hits[: len(active)], reached[: len(active)] = self._hits[columns], self._reached[columns]
        levels = [each % NUM_VISIT_LEVELS for each in active] + list(range(NUM_VISIT_LEVELS))
        self._hazards = hazards(hits, reached, np.array(levels, dtype=np.int64))
        rows = {each: row for row, each in enumerate(active)}
        self._index = rows, retention_index(self._hazards).tolist()  # at once: the ledger's thread reads it
        self._probabilities = None
        self.version += 1

    def index(self, reuse_class: int, age: int) -> float:
        """Reuses per admitted request that keeping a node of this class and age can earn."""
        return self.bucket_index(reuse_class)[age_bucket(age)]

    def bucket_index(self, reuse_class: int) -> list[float]:
        """``index`` by age bucket."""
        rows, index = self._index
        return index[_row_in(rows, reuse_class)]

    def probability(self, reuse_class: int, age: int) -> float:
        """P(a node of this class and age is visited in the next ``EXACT_AGE`` admitted requests), in whole
        buckets."""
        if self._probabilities is None:
            missed = 1.0 - self._hazards
            ends = [max(age_bucket(first + EXACT_AGE), bucket + 1) for bucket, first in enumerate(_STARTS)]
            within = [1.0 - missed[:, bucket:end].prod(axis=1) for bucket, end in enumerate(ends)]
            self._probabilities = np.stack(within, axis=1).tolist()
        return self._probabilities[_row_in(self._index[0], reuse_class)][age_bucket(age)]

    def probability_within(self, reuse_class: int, age: int, horizon: int) -> float:
        """P(a node of this class and age is visited in the next ``horizon`` admitted requests)."""
        survival = 1.0
        hazard = self._hazards[_row_in(self._index[0], reuse_class)]
        age = max(age, 1)
        end = age + horizon
        for bucket in range(age_bucket(age), NUM_AGE_BUCKETS):
            first = int(BUCKET_STARTS[bucket])
            if first >= end:
                break
            width = float(BUCKET_WIDTHS[bucket])
            covered = min((min(end, first + width) - max(age, first)) / width, 1.0)
            survival *= (1.0 - hazard[bucket]) ** max(covered, 0.0)
        return float(1.0 - survival)
