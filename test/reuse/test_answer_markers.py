"""How answers ended, from their tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd, AnswerMarkers

MARKER = 7
EVERY_CALL = AnswerMarkers(frozenset({MARKER, 8}), mark_every_call=True)
SOME_CALLS = AnswerMarkers(frozenset({MARKER}), mark_every_call=False)
NO_CALL = AnswerMarkers(frozenset(), mark_every_call=False)
text = st.lists(st.integers(10, 99), max_size=20)


@given(text, text, st.booleans())
def test_a_marker_anywhere_is_a_call(before: list[int], after: list[int], is_json: bool) -> None:
    answer = [*before, MARKER, *after]
    for markers in (EVERY_CALL, SOME_CALLS):
        assert markers.end_of("stop", answer, is_json=is_json) is AnswerEnd.TOOL_CALL
    assert NO_CALL.end_of("stop", answer, is_json=is_json) is AnswerEnd.UNKNOWN


@given(text)
def test_text_without_a_marker_ends_a_turn_only_where_every_call_has_one(answer: list[int]) -> None:
    assert EVERY_CALL.end_of("stop", answer, is_json=False) is AnswerEnd.END_OF_TURN
    assert EVERY_CALL.end_of("stop", answer, is_json=True) is AnswerEnd.UNKNOWN
    assert SOME_CALLS.end_of("stop", answer, is_json=False) is AnswerEnd.UNKNOWN


@given(st.sampled_from([EVERY_CALL, SOME_CALLS, NO_CALL]), text)
def test_limits_and_aborts_say_it_themselves(markers: AnswerMarkers, answer: list[int]) -> None:
    called = [*answer, MARKER]
    assert markers.end_of("length", called, is_json=False) is AnswerEnd.LENGTH
    assert markers.end_of("abort", called, is_json=False) is AnswerEnd.ABORT
    assert markers.end_of("a reason of a later release", called, is_json=False) is AnswerEnd.UNKNOWN
