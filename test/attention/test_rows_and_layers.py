"""Rows on their own, and the choice of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sglang_importance.attention.layers import sampled_layers
from sglang_importance.attention.rows import MAX_DEFERRED, Phase, ScoreRows, ScoresFailed

from support.doubles.late_stream import LateMark, LateStream


def rows() -> ScoreRows:
    return ScoreRows(page_size=16, num_slots=3, max_context_tokens=100)


def one_token(num_pages: int) -> torch.Tensor:
    uniform = torch.full((num_pages,), 1 / num_pages)
    return torch.stack((uniform, uniform, uniform))


def test_rows_grow_with_the_sequence_and_shrink_on_consume() -> None:
    store = rows()
    assert store.max_pages == 7
    store.begin(1, "a")
    store.add(1, Phase.DECODE, "a", one_token(2), 1)
    store.add(1, Phase.DECODE, "a", one_token(3), 1)
    store.check_integrity()
    first = store.consume(1, Phase.DECODE)
    assert first is not None
    assert first.body.tolist() == pytest.approx([1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    assert first.peak.tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 3])
    store.add(1, Phase.DECODE, "a", one_token(1), 1)
    second = store.consume(1, Phase.DECODE)
    assert second is not None
    assert second.body.tolist() == [1.0], "nothing of the consumed row came back"
    assert len(first.body) == 3, "a consumed row is the reader's own"


def test_deferred_scores_are_computed_when_they_are_read_and_not_before() -> None:
    store, computed = rows(), []

    def compute(name: str, num_pages: int) -> Callable[[], torch.Tensor]:
        return lambda: (computed.append(name), one_token(num_pages))[1]

    store.begin(1, "a")
    store.add_later(1, Phase.PREFILL, "a", compute("prefill", 2), 1)
    store.add_later(1, Phase.DECODE, "a", compute("decode", 3), 1)
    assert store.consume(1, Phase.PREFILL, "a", compute=False) is None
    assert store.consume(1, Phase.PREFILL, "b") is None, "another's row is left alone"
    assert computed == []
    prefill, decode = (store.consume(1, phase, "a") for phase in Phase)
    assert computed == ["prefill", "decode"]
    assert prefill is not None
    assert decode is not None
    assert (prefill.query_tokens, len(prefill.body), len(decode.body)) == (1, 2, 3)
    store.check_integrity()


def test_deferred_scores_of_a_request_that_lost_its_slot_are_never_computed() -> None:
    store = rows()
    store.add_later(1, Phase.PREFILL, "a", lambda: pytest.fail("reads another's KV"), 1)
    store.begin(1, "b")
    assert store.consume(1, Phase.PREFILL, "b") is None
    store.add_later(1, Phase.PREFILL, "b", lambda: pytest.fail("reads another's KV"), 1)
    store.add_later(1, Phase.PREFILL, "c", lambda: one_token(1), 1)
    consumed = store.consume(1, Phase.PREFILL, "c")
    assert consumed is not None
    assert consumed.query_tokens == 1


def test_a_long_answer_defers_a_few_passes_only() -> None:
    store, computed = rows(), []
    for step in range(3 * MAX_DEFERRED):
        store.add_later(1, Phase.DECODE, "a", lambda step=step: (computed.append(step), one_token(1))[1], 1)
        assert len(computed) >= step + 1 - MAX_DEFERRED
    assert computed == list(range(2 * MAX_DEFERRED))
    consumed = store.consume(1, Phase.DECODE, "a")
    assert consumed is not None
    assert consumed.query_tokens == 3 * MAX_DEFERRED


def test_integrity_check_notices_a_row_that_was_not_zeroed() -> None:
    store = rows()
    store.add(2, Phase.PREFILL, "a", one_token(4), 1)
    store._num_pages[Phase.PREFILL][2] = 3
    with pytest.raises(AssertionError):
        store.check_integrity()


def test_too_many_rows_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"need 8\.0 GiB, the limit is 1 GiB: raise --page-size"):
        ScoreRows(page_size=1, num_slots=4096, max_context_tokens=131_072)


def test_bytes_are_counted_as_allocated() -> None:
    store = rows()
    assert store.num_bytes == sum(sums.nbytes for phase in Phase for sums in store.of_phase(phase))


@pytest.mark.parametrize(
    ("available", "requested", "sampled"),
    [
        (range(4), (), (0, 1, 2, 3)),
        (range(8), (), tuple(range(8))),
        (range(32), (), (16, 21, 26, 31)),
        (range(9), (), (4, 5, 7, 8)),
        (range(1, 24, 2), (), (13, 17, 19, 23)),
        (range(32), (31, 2, 2), (2, 31)),
    ],
)
def test_sampled_layers(available: range, requested: tuple[int, ...], sampled: tuple[int, ...]) -> None:
    assert sampled_layers(available, requested) == sampled


def test_layers_of_another_kind_are_named_in_the_refusal() -> None:
    with pytest.raises(ValueError, match=r"0, 2 not among .*, which are 1, 3-5$"):
        sampled_layers([1, 3, 4, 5], (2, 0, 3))


def late_rows() -> tuple[ScoreRows, LateStream]:
    stream = LateStream()
    return ScoreRows(page_size=4, num_slots=3, max_context_tokens=16, stream=stream), stream


def launch_step(
    rows: ScoreRows,
    stream: LateStream,
    owner: str,
    value: float,
    *,
    slot: int = 1,
    phase: Phase = Phase.DECODE,
) -> None:
    """A pass whose kernels will add to the slot when the device comes to them."""
    rows.claim(slot, phase, owner, 2, 1)
    stream.launch(lambda: rows.of_phase(phase).body[slot, :2].add_(value))
    rows.written(phase, [slot])


def test_a_row_is_read_behind_the_kernels_that_write_it() -> None:
    rows, stream = late_rows()
    rows.begin(1, "a")
    launch_step(rows, stream, "a", 0.25)
    launch_step(rows, stream, "a", 0.25)
    row = rows.consume(1, Phase.DECODE)
    assert row is not None
    assert row.body.tolist() == [0.5, 0.5]
    assert stream.pending == 0
    assert not rows.of_phase(Phase.DECODE).any(), "a late kernel must not write behind the zeroing"


def test_a_slot_that_is_taken_over_is_zeroed_behind_late_kernels() -> None:
    rows, stream = late_rows()
    rows.begin(1, "aborted")
    launch_step(rows, stream, "aborted", 0.5)
    rows.begin(1, "successor")
    launch_step(rows, stream, "successor", 0.125)
    row = rows.consume(1, Phase.DECODE, owner="successor")
    assert row is not None
    assert row.body.tolist() == [0.125, 0.125]


def test_a_reader_waits_for_the_kernels_of_its_own_row_only() -> None:
    rows, stream = late_rows()
    rows.begin(1, "a")
    launch_step(rows, stream, "a", 0.5, phase=Phase.PREFILL)
    launch_step(rows, stream, "a", 0.25)
    launch_step(rows, stream, "b", 0.125, slot=2)
    prefill = rows.consume(1, Phase.PREFILL)
    assert prefill is not None
    assert prefill.body.tolist() == [0.5, 0.5]
    assert stream.pending == 2, "the step that runs now is left to run"
    rows.discard(1)
    assert stream.pending == 1
    assert not rows.of_phase(Phase.DECODE).body[1].any()
    other = rows.consume(2, Phase.DECODE)
    assert other is not None
    assert other.body.tolist() == [0.125, 0.125]


def test_rows_that_do_not_wait_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateMark, "wait", lambda self: None)
    rows, stream = late_rows()
    rows.begin(1, "a")
    launch_step(rows, stream, "a", 0.25)
    row = rows.consume(1, Phase.DECODE)
    assert row is not None
    assert not row.body.any()


def test_what_is_consumed_is_that_of_all_ranks() -> None:
    rows = ScoreRows(page_size=4, num_slots=3, max_context_tokens=16)
    rows.over_ranks = lambda row, failed: replace(row, peak=row.peak * 2)
    rows.begin(1, "a")
    rows.add(1, Phase.DECODE, "a", torch.full((3, 2), 0.25), 1)
    row = rows.consume(1, Phase.DECODE)
    assert row is not None
    assert row.peak.tolist() == [0.5, 0.5]
    assert row.body.tolist() == [0.25, 0.25]


def test_what_fails_on_the_way_to_a_row_is_told_to_who_reads_next() -> None:
    rows = ScoreRows(page_size=4, num_slots=3, max_context_tokens=16)
    rows.begin(1, "a")
    rows.attempt(rows.add, 1, Phase.DECODE, "a", torch.full((3, 2), 0.25), 1)
    assert rows.is_open
    rows.attempt(lambda: 1 // 0)
    assert not rows.is_open
    rows.attempt(pytest.fail, "no more scores are taken")
    with pytest.raises(ScoresFailed) as told:
        rows.consume(1, Phase.DECODE)
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_scores_that_cannot_be_computed_when_they_are_read_have_failed() -> None:
    rows = ScoreRows(page_size=4, num_slots=3, max_context_tokens=16)
    rows.begin(1, "a")
    rows.add_later(1, Phase.PREFILL, "a", lambda: torch.zeros(7, 7), 1)
    with pytest.raises(ScoresFailed):
        rows.consume(1, Phase.PREFILL)
    assert not rows.is_open
    told = []
    rows.over_ranks = lambda row, failed: told.append((row, failed))
    rows.consume(2, Phase.PREFILL)
    assert told == [(None, True)], "the other ranks must hear of it"
