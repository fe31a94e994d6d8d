"""Life tables of turns: how soon a session goes on, by how its last answer ended and by its own rhythm.

A *turn* is one request and what it left in the cache. It ends with the first request that goes on from its
text. All nodes that a turn was the last to visit share its fate, so there is one at-risk interval for a turn
and none for its nodes.

Ages count in the clock of the driver: seconds in replays of traces, for what a session waits for, a tool or a
person, does not care how busy the server is; admitted requests on a server, where all ranks must agree. On
recorded agent sessions, ages in requests close less of the gap to the optimum (docs/evidence/agents.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import log2

import numpy as np

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.estimator import DECAY, REFRESH_INTERVAL
from sgl_importance.reuse.life_table import BUCKET_STARTS, NUM_EXACT_BUCKETS, FloatArray, age_bucket

RHYTHM_STARTS = (0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
"""First rhythm, log2 of the clock, of each level but the lowest: that is of sessions without a gap so far."""
RHYTHM_WEIGHT = 0.3
"""Of the last gap in a session's rhythm."""
OUTPUT_STARTS = (100, 300, 1000)
"""First number of generated tokens of each level but the lowest."""
CLASS_STRENGTH = 8.0
"""Intervals that the hazard of all turns with the same end is worth for one class of them, per bucket."""
NO_RHYTHM = -1.0
_NUM_RHYTHMS = len(RHYTHM_STARTS) + 1
_NUM_OUTPUTS = len(OUTPUT_STARTS) + 1
_CLASSES_OF_END = _NUM_RHYTHMS * _NUM_OUTPUTS
NUM_TURN_CLASSES = 2 * len(AnswerEnd) * _CLASSES_OF_END
"""The second half is of turns that another request departed from; these are told apart by their end only."""
NUM_TURN_BUCKETS = NUM_EXACT_BUCKETS
"""Of ages in seconds or requests. The last one begins at 26,008: an open turn is in memory until then."""
_BUCKET_SECONDS: FloatArray = BUCKET_STARTS[:NUM_TURN_BUCKETS].astype(np.float64)
FIRST_INTERVALS = 1024
"""For which there is room at first."""


def turn_bucket(age: float) -> int:
    """The bucket of a turn's age."""
    return min(age_bucket(int(age)), NUM_TURN_BUCKETS - 1)


def turn_class(answer_end: AnswerEnd, rhythm: float, output_tokens: int) -> int:
    """Number of the class whose history predicts a turn, in [0, NUM_TURN_CLASSES).

    Args:
        answer_end: of its answer.
        rhythm: of its session, log2 of the clock; NO_RHYTHM before the first gap.
        output_tokens: that were generated.
    """
    level = answer_end * _NUM_RHYTHMS + bisect_right(RHYTHM_STARTS, rhythm)
    return level * _NUM_OUTPUTS + bisect_right(OUTPUT_STARTS, output_tokens)


Classify = Callable[[AnswerEnd, float, int], int]


@dataclass(slots=True, eq=False)
class Turn:
    """One request, from its answer on.

    Attributes:
        since: by the clock, when its answer ended, or when it was last departed from.
        rhythm: moving mean of the session's gaps until then, log2 of the clock; NO_RHYTHM before the first.
        turn_class: by which its return is predicted.
        prompt_tokens: of its prompt; set by a driver that finds out what goes on from it.
        tokens: of its whole text, in whole pages, likewise.
        ranks: whether nodes that it was the last to visit are ranked by it.
        is_open: whether nothing has gone on from it yet.
        interval: place of its at-risk interval in the estimator's memory; below 0 when it is forgotten.
    """

    since: float
    rhythm: float
    turn_class: int
    prompt_tokens: int = 0
    tokens: int = 0
    ranks: bool = True
    is_open: bool = True
    interval: int = 0


class TurnEstimator:
    """When turns go on, learnt online. Time never runs backwards.

    Args:
        classify: ``turn_class``, or what leaves out some of its facts (ablations).
    """

    def __init__(self, classify: Classify = turn_class) -> None:
        from sgl_importance.reuse.reached import count_turns_reached  # imports numba

        self._count_reached = count_turns_reached
        self._classify = classify
        self._hazards: FloatArray | None = None  # computed when they are asked for: most servers never do
        self._index: FloatArray | None = None
        self.version = 0
        """Grows whenever the index changes."""
        self.seconds_per_request = 1.0
        self._turns = 0
        self._now = 0.0
        self._hits = np.zeros((NUM_TURN_CLASSES, NUM_TURN_BUCKETS))
        self._reached = np.zeros((NUM_TURN_CLASSES, NUM_TURN_BUCKETS))
        # At-risk intervals as they began, which is how they get to each bucket. See ``count_turns_reached``.
        self._since, self._classes = np.zeros(FIRST_INTERVALS), np.zeros(FIRST_INTERVALS, dtype=np.int64)
        self._following = np.zeros(NUM_TURN_BUCKETS, dtype=np.int64)
        self._at_risk: list[Turn] = []
        self._recent_turns = self._recent_seconds = 1.0
        self._has_begun = False
        self._refresh()

    def begin(
        self,
        since: float,
        answer_end: AnswerEnd,
        output_tokens: int,
        before: Turn | None = None,
        *,
        now: float | None = None,
    ) -> Turn:
        """A request was answered.

        Args:
            since: when it came, which is when the open turn went on.
            answer_end: how the answer ended.
            output_tokens: that were generated.
            before: the open turn that the request went on from, which ends; None where there is none.
            now: when the answer ended; None for at once.
        """
        now = since if now is None else now
        assert since <= now, "an answer ends behind its request"
        self._advance(now)
        rhythm = NO_RHYTHM
        if before is not None:
            assert before.is_open, "a turn ends once"
            waited = max(since - before.since, 0.0)
            # It counted as waiting while what went on from it was answered.
            while_answered = slice(turn_bucket(waited) + 1, turn_bucket(now - before.since) + 1)
            reached = self._reached[before.turn_class]
            reached[while_answered] = np.maximum(reached[while_answered] - 1.0, 0.0)
            self._hits[before.turn_class, turn_bucket(waited)] += 1.0
            self._close(before)
            gap = log2(max(waited, 1.0))
            is_first = before.rhythm == NO_RHYTHM
            rhythm = gap if is_first else before.rhythm + RHYTHM_WEIGHT * (gap - before.rhythm)
        turn = Turn(now, rhythm, self._classify(answer_end, rhythm, output_tokens))
        self._begin_interval(turn)
        self._turns += 1
        if self._turns % REFRESH_INTERVAL == 0:
            self._refresh()
        return turn

    def departed(self, turn: Turn) -> None:
        """The last request begun left the text of an open turn early on: is its session over, or is there
        another one? From now on the turn is predicted by what became of others in its place."""
        assert turn.is_open
        answer_end = turn.turn_class // _CLASSES_OF_END % len(AnswerEnd)
        self._reclassify(turn, -1)
        turn.since, turn.turn_class = self._now, (len(AnswerEnd) + answer_end) * _CLASSES_OF_END
        self._begin_interval(turn)

    def ended_as(self, turn: Turn, answer_end: AnswerEnd) -> None:
        """It became known how the answer of an open turn ended: its interval goes on in that end's class."""
        assert turn.is_open
        bucket = turn_bucket(max(self._now - turn.since, 0.0))
        reached = self._reached[turn.turn_class]
        reached[bucket] = max(reached[bucket] - 1.0, 0.0)
        is_departed = turn.turn_class >= len(AnswerEnd) * _CLASSES_OF_END
        number = is_departed * len(AnswerEnd) + answer_end
        turn.turn_class = number * _CLASSES_OF_END + turn.turn_class % _CLASSES_OF_END
        self._reclassify(turn, turn.turn_class)
        self._reached[turn.turn_class, bucket] += 1.0

    def over(self, turn: Turn) -> None:
        """The session of an open turn said that it is over: nothing will go on from it.

        The interval is censored. What is learnt is when turns go on of which nobody has said so.
        """
        assert turn.is_open
        bucket = turn_bucket(max(self._now - turn.since, 0.0))
        reached = self._reached[turn.turn_class]
        reached[bucket] = max(reached[bucket] - 1.0, 0.0)
        self._close(turn)

    def forget_open(self) -> None:
        """Every open interval is censored."""
        for turn in self._at_risk:
            turn.is_open = False
        self._at_risk.clear()
        self._following[:] = 0

    @property
    def index(self) -> FloatArray:
        """Returns per second, or request, that keeping a turn can earn; float64 [NUM_TURN_CLASSES,
        NUM_TURN_BUCKETS]."""
        from sgl_importance.reuse.hazards import retention_index  # imports numba

        if self._index is None:
            self._index = retention_index(self._all_hazards())
        return self._index

    def probability(self, turn_class: int, age: int) -> float:
        """P(a turn of this class and age goes on before its interval is given up)."""
        return float(1.0 - np.prod(1.0 - self._all_hazards()[turn_class, turn_bucket(age) :]))

    def _all_hazards(self) -> FloatArray:
        """Of all classes, from the evidence at the last refresh."""
        from sgl_importance.reuse.hazards import PRIORS, hazards  # imports numba

        if self._hazards is None:
            # Turns with one end share a prior: people and tools return after times of quite another shape.
            by_end = (2 * len(AnswerEnd), _CLASSES_OF_END, NUM_TURN_BUCKETS)
            levels = np.ones(_CLASSES_OF_END, dtype=np.int64)
            priors = PRIORS._replace(class_strength=CLASS_STRENGTH, is_shrunk=True)
            ends = zip(*(counts.reshape(by_end) for counts in self._evidence), strict=True)
            self._hazards = np.concatenate([hazards(hits, reached, levels, priors) for hits, reached in ends])
        return self._hazards

    def _begin_interval(self, turn: Turn) -> None:
        if len(self._at_risk) == len(self._since):
            self._make_room()
        turn.interval = len(self._at_risk)
        self._since[turn.interval], self._classes[turn.interval] = turn.since, turn.turn_class
        self._at_risk.append(turn)
        self._following[0] = len(self._at_risk)
        self._reached[turn.turn_class, 0] += 1.0

    def _make_room(self) -> None:
        """Forgets intervals that have ended or got to the last bucket; twice the room where most go on."""
        goes_on = self._classes >= 0
        for number in range(self._following[-1]):
            if goes_on[number]:
                self._at_risk[number].interval = -1
        goes_on[: self._following[-1]] = False
        self._following = np.concatenate(([0], np.cumsum(goes_on)))[self._following]
        kept = np.flatnonzero(goes_on)
        self._at_risk = [self._at_risk[number] for number in kept]
        for place, turn in enumerate(self._at_risk):
            turn.interval = place
        room = len(goes_on) * (1 + (2 * len(kept) > len(goes_on)))
        since, classes = np.zeros(room), np.zeros(room, dtype=np.int64)
        since[: len(kept)], classes[: len(kept)] = self._since[kept], self._classes[kept]
        self._since, self._classes = since, classes

    def _reclassify(self, turn: Turn, turn_class: int) -> None:
        """The turn's interval goes on in the class; below 0: it has ended."""
        if turn.interval >= 0:
            self._classes[turn.interval] = turn_class

    def _close(self, turn: Turn) -> None:
        turn.is_open = False
        self._reclassify(turn, -1)

    def _advance(self, seconds: float) -> None:
        assert seconds >= self._now, "time runs backwards"
        self._count_reached(
            seconds, self._since, self._classes, self._following, self._reached, _BUCKET_SECONDS
        )
        self._recent_turns += 1.0
        if self._has_begun:  # requests before the first turn, or of servers before, say nothing of their rate
            self._recent_seconds += seconds - self._now
        self._has_begun = True
        self._now = seconds

    def _refresh(self) -> None:
        self._hits *= DECAY
        self._reached *= DECAY
        self._recent_turns *= DECAY
        self._recent_seconds *= DECAY
        self.seconds_per_request = self._recent_seconds / self._recent_turns
        self._evidence = self._hits.copy(), self._reached.copy()
        self._hazards = self._index = None
        self.version += 1
