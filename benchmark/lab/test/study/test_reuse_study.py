"""Brier scores and calibration against arithmetic by hand and against traffic of known reuse."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.replay.trace import Trace, TraceBuilder
from sgl_importance_lab.study.reuse_study import CLASSES, CONSTANT, ONE_CLASS, _reused_within, study_reuse

BLOCK = 16


def _trace(paths: list[list[int]]) -> Trace:
    builder = TraceBuilder("made", BLOCK)
    for path in paths:
        builder.add(path, input_tokens=len(path) * BLOCK)
    return builder.build()


def _sessions_and_one_offs(requests: int, seed: int) -> Trace:
    """Half of the requests are turns of five sessions, the others come once."""
    order = random.Random(seed)
    sessions = [[1_000_000 * (i + 1)] for i in range(5)]
    paths = []
    for request in range(requests):
        if order.random() < 0.5:
            session = order.choice(sessions)
            session.append(session[-1] + 1)
            paths.append([0, *session])
        else:
            paths.append([0, 10_000 + 2 * request, 10_001 + 2 * request])
    return _trace(paths)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(1, 10))
def test_outcomes_are_what_a_search_finds(first_blocks: list[int], horizon: int):
    trace = _trace([[block, block + 10] for block in first_blocks])
    expected = [
        float(block in first_blocks[i + 1 : i + 1 + horizon])
        for i, block in enumerate(first_blocks)
        for _ in range(2)
    ]
    assert _reused_within(trace, horizon).tolist() == expected


def test_classes_beat_one_class_where_they_tell_sessions_from_one_offs():
    finding = study_reuse(_sessions_and_one_offs(1200, seed=0), horizon=50, progress=False)
    arms = {arm.name: arm for arm in finding.arms}
    assert finding.gain.low > 0
    assert finding.verdict == "the classes predict better than one class"
    assert arms[CLASSES].brier < 0.5 * arms[ONE_CLASS].brier
    assert arms[CLASSES].calibration_error < 0.1
    rate = finding.base_rate
    assert arms[CONSTANT].brier == pytest.approx(rate * (1 - rate), rel=0.1)
    assert sum(row.predictions for row in finding.by_pair) == finding.predictions


def test_where_every_prompt_is_alike_no_gain_is_claimed():
    order = random.Random(1)
    paths = [[0, order.randrange(1, 40)] for _ in range(800)]
    finding = study_reuse(_trace(paths), horizon=30, progress=False)
    assert abs(finding.gain.value) < 0.1
    assert np.isfinite(finding.gain.low)


def test_too_few_requests_have_a_number_and_no_verdict():
    finding = study_reuse(_trace([[1, i] for i in range(2, 10)]), horizon=1, progress=False)
    assert finding.verdict == "none: n = 3, and fewer than 5 decide nothing"


def test_only_requests_with_predictions_are_units():
    paths = [[1, 100 + i] if i % 2 else [] for i in range(80)]
    finding = study_reuse(_trace(paths), horizon=2, progress=False)
    # Of requests 40 to 77, which are judged, every second one has blocks.
    assert finding.gain.n == 19
    assert not finding.verdict.startswith("none")


def test_a_trace_whose_second_half_asks_for_nothing_is_refused():
    with pytest.raises(ValueError, match="has a block: record more"):
        study_reuse(_trace([[1], [1], *([[]] * 6)]), 1, progress=False)


def test_a_short_trace_and_independent_objects_are_refused():
    with pytest.raises(ValueError, match="lower --horizon to 5"):
        study_reuse(_trace([[i] for i in range(20)]), horizon=10, progress=False)
    builder = TraceBuilder("objects", BLOCK, prefix_tree=False)
    builder.add([1], input_tokens=BLOCK)
    with pytest.raises(ValueError, match="independent objects"):
        study_reuse(builder.build(), horizon=1, progress=False)
