"""Life tables of turns: what is counted, what is learnt from it, and by which clock."""

import gc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.reuse import turns
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.life_table import age_bucket
from sgl_importance.reuse.turns import (
    NO_RHYTHM,
    NUM_TURN_CLASSES,
    Turn,
    TurnEstimator,
    turn_bucket,
    turn_class,
)


def test_classes_are_numbered_without_a_clash() -> None:
    seen = {
        turn_class(end, rhythm, tokens)
        for end in AnswerEnd
        for rhythm in (NO_RHYTHM, 0, 3, 4, 5, 6, 7, 8)
        for tokens in (0, 100, 300, 1000)
    }
    assert seen == set(range(NUM_TURN_CLASSES // 2))


def play(estimator: TurnEstimator, sessions: int, end: AnswerEnd, gap: float | None) -> None:
    """Sessions of two requests each, the second ``gap`` seconds later; None: it never comes."""
    start = estimator._now
    for _ in range(sessions):
        turn = estimator.begin(start, end, 0)
        if gap is not None:
            estimator.begin(start + gap, AnswerEnd.UNKNOWN, 0, turn)
        start += 1000.0


def test_who_comes_back_soon_is_worth_more_than_who_does_not() -> None:
    estimator = TurnEstimator()
    for _ in range(20):
        play(estimator, 4, AnswerEnd.TOOL_CALL, 8.0)
        play(estimator, 4, AnswerEnd.END_OF_TURN, None)
    index = estimator.index
    tool, end = (turn_class(end, NO_RHYTHM, 0) for end in (AnswerEnd.TOOL_CALL, AnswerEnd.END_OF_TURN))
    assert index[tool, age_bucket(1)] > 10 * index[end, age_bucket(1)]
    # A tool that should have answered long ago is as bad a sign as a person who has not.
    assert index[tool, age_bucket(500)] < index[tool, age_bucket(1)] / 10


@pytest.mark.parametrize("idle_requests", [0, 50])
def test_ages_are_seconds_whatever_else_is_asked(idle_requests: int) -> None:
    """Other sessions' requests in between change nothing of what is learnt about a gap."""
    estimator = TurnEstimator()
    turn = estimator.begin(0.0, AnswerEnd.TOOL_CALL, 0)
    for number in range(idle_requests):
        estimator.begin(1.0 + number / 100, AnswerEnd.ABORT, 0)
    estimator.begin(20.0, AnswerEnd.TOOL_CALL, 0, turn)
    assert np.flatnonzero(estimator._hits[turn.turn_class]).tolist() == [age_bucket(20)]


@pytest.mark.parametrize("start", [0.0, 100_000.0])
def test_how_often_requests_come_does_not_depend_on_when_turns_begin(start: float) -> None:
    """A server's clock counts requests, goes on from its ledger's, and may know no ends for a long time."""
    estimator = TurnEstimator()
    for number in range(64):
        estimator.begin(start + number, AnswerEnd.TOOL_CALL, 0)
    assert estimator.seconds_per_request == pytest.approx(1.0, rel=0.05)


def test_a_rhythm_follows_the_gaps() -> None:
    estimator = TurnEstimator()
    turn = estimator.begin(0.0, AnswerEnd.TOOL_CALL, 0)
    assert turn.rhythm == NO_RHYTHM
    turn = estimator.begin(16.0, AnswerEnd.TOOL_CALL, 0, turn)
    assert turn.rhythm == 4.0
    turn = estimator.begin(16.0 + 1024.0, AnswerEnd.TOOL_CALL, 0, turn)
    assert turn.rhythm == pytest.approx(4.0 + 0.3 * 6.0)


def test_a_turn_that_was_departed_from_is_predicted_by_such_turns() -> None:
    estimator = TurnEstimator()
    turn = estimator.begin(0.0, AnswerEnd.TOOL_CALL, 0)
    estimator.begin(9.0, AnswerEnd.TOOL_CALL, 0)
    before = turn.turn_class
    estimator.departed(turn)
    assert turn.turn_class >= NUM_TURN_CLASSES // 2 > before
    assert turn.since == 9.0
    estimator.begin(10.0, AnswerEnd.TOOL_CALL, 0, turn)
    assert estimator._hits[before].sum() == 0
    assert estimator._hits[turn.turn_class, age_bucket(1)] == 1


gaps = st.integers(0, 80_000).map(lambda sixteenths: sixteenths / 16)  # whose sums and differences are exact
requests = st.tuples(
    gaps,
    gaps | st.just(0.0),
    st.sampled_from(AnswerEnd),
    st.integers(0, 3),
    st.sampled_from(("goes on", "departs", "is told")),
    st.integers(0, 2000),
)


# Fewer than a refresh, so that nothing decays; where there is room for one, old ones are forgotten and moved.
@given(st.lists(requests, min_size=1, max_size=15), st.sampled_from((1, 1024)))
def test_counts_are_those_of_a_record_of_every_interval(history: list, room: int) -> None:
    """Against a naive count that keeps every interval: its class, the bucket it begins in, and its start."""
    with patch.object(turns, "FIRST_INTERVALS", room):
        estimator = TurnEstimator()
    now, open_turns = 0.0, []
    intervals: dict[Turn, tuple[int, int, float]] = {}
    hits, reached = np.zeros_like(estimator._hits), np.zeros_like(estimator._hits)

    def close(turn: Turn, at: float, *, is_hit: bool = False, is_moved: bool = False) -> int:
        turn_class, first, since = intervals.pop(turn)
        last = turn_bucket(max(at - since, 0.0))
        hits[turn_class, last] += is_hit
        reached[turn_class, first : last + (not is_moved)] += 1
        return last

    for gap, answered_in, end, choice, relation, tokens in history:
        came, now = now + gap, now + gap + answered_in
        chosen = open_turns[choice] if choice < len(open_turns) else None
        before = chosen if relation == "goes on" else None
        turn = estimator.begin(came, end, tokens, before, now=now)
        if before is not None:
            open_turns.remove(before)
            close(before, came, is_hit=True)
        elif chosen is not None and relation == "departs":
            close(chosen, now)
            estimator.departed(chosen)
            intervals[chosen] = (chosen.turn_class, 0, now)
        elif chosen is not None:
            bucket = close(chosen, now, is_moved=True)
            estimator.ended_as(chosen, end)
            intervals[chosen] = (chosen.turn_class, bucket, chosen.since)
        open_turns.append(turn)
        intervals[turn] = (turn.turn_class, 0, now)
    for turn in list(intervals):
        close(turn, now)
    assert np.array_equal(estimator._hits, hits)
    assert np.array_equal(estimator._reached, reached)


def test_turns_that_have_ended_are_not_kept() -> None:
    """A busy server begins hundreds of thousands of them in the hours that an open one is waited for."""
    estimator, turn = TurnEstimator(), None
    open_turns = [estimator.begin(0.0, AnswerEnd.UNKNOWN, 0) for _ in range(10)]
    for number in range(5 * turns.FIRST_INTERVALS):
        turn = estimator.begin(number / 1000, AnswerEnd.UNKNOWN, 0, turn)
    gc.collect()
    assert sum(type(each) is Turn for each in gc.get_objects()) <= turns.FIRST_INTERVALS + 1
    assert all(each.is_open for each in open_turns)
