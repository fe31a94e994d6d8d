"""What keeping a node can earn, by what predicts it: its own class, or the turn that visited it last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS, age_bucket
from sgl_importance.reuse.reuse_class import NUM_CLASSES
from sgl_importance.reuse.turns import NUM_TURN_CLASSES, Turn, TurnEstimator

GONE_ON = NUM_CLASSES + NUM_TURN_CLASSES
"""The class of what a session went on without: it earns nothing."""
_NOTHING = [0.0] * NUM_AGE_BUCKETS


class ReuseIndex(Protocol):
    """What an order of victims asks."""

    @property
    def clock(self) -> int:
        """Admitted requests so far."""

    @property
    def version(self) -> int:
        """Grows whenever the index changes."""

    def bucket_index(self, reuse_class: int) -> Sequence[float]:
        """Reuses per admitted request that keeping a node of the class can earn, by age bucket."""


class NodesAndTurns:
    """The classes of nodes, then those of turns, then ``GONE_ON``.

    Args:
        nodes: of nodes that are ranked by themselves.
        turns: of turns, with ages in admitted requests.
    """

    def __init__(self, nodes: ReuseEstimator, turns: TurnEstimator) -> None:
        self._nodes = nodes
        self._turns = turns
        self._rows: list[list[float]] = []  # of turns, by class
        self._rows_version = -1

    @property
    def clock(self) -> int:
        return self._nodes.clock

    @property
    def version(self) -> int:
        return self._nodes.version + self._turns.version

    def bucket_index(self, reuse_class: int) -> Sequence[float]:
        if reuse_class < NUM_CLASSES:
            return self._nodes.bucket_index(reuse_class)
        if reuse_class == GONE_ON:
            return _NOTHING
        if self._rows_version != self._turns.version:
            self._rows_version = self._turns.version
            older = NUM_AGE_BUCKETS - self._turns.index.shape[1]  # as the last bucket, which has no end
            self._rows = np.pad(self._turns.index, ((0, 0), (0, older)), mode="edge").tolist()
        return self._rows[reuse_class - NUM_CLASSES]

    def index(self, reuse_class: int, age: int) -> float:
        """``bucket_index`` at an age in admitted requests."""
        return self.bucket_index(reuse_class)[age_bucket(age)]

    def probability(self, reuse_class: int, age: int) -> float:
        """P(reuse in the next ``EXACT_AGE`` admitted requests); of a turn, P(it goes on at all)."""
        if reuse_class < NUM_CLASSES:
            return self._nodes.probability(reuse_class, age)
        return 0.0 if reuse_class == GONE_ON else self._turns.probability(reuse_class - NUM_CLASSES, age)


def class_of_turn(turn: Turn) -> int:
    """The class among those of ``NodesAndTurns``."""
    return NUM_CLASSES + turn.turn_class if turn.is_open else GONE_ON
