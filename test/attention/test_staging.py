"""Numbers on their way to the device, over a stream that runs its copies late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_importance.attention.staging import StagedNumbers

from support.doubles.late_stream import LateMark, LateStream


def sent(depth: int, runs: list[int]) -> tuple[list[int], LateStream]:
    """What a device saw of numbers 0, 1, 2, ... where after each the stream may have got further."""
    seen: list[int] = []
    stream = LateStream()
    staged = StagedNumbers((2,), "cpu", depth=depth, stream=stream)
    stream.after_each = lambda: seen.append(int(staged.device_values[0]))
    values = torch.zeros(2, dtype=torch.int32)
    for number, ran in enumerate(runs):
        values.fill_(number)
        staged.send(values)
        assert stream.pending <= depth
        stream.run(min(number + 1, ran))
    values.fill_(-1)
    stream.run(len(runs))
    return seen, stream


@given(depth=st.integers(1, 4), runs=st.lists(st.integers(0, 12), max_size=12))
def test_every_step_sees_its_own_numbers(depth: int, runs: list[int]) -> None:
    seen, _ = sent(depth, runs)
    assert seen == list(range(len(runs)))


def test_a_ring_that_does_not_wait_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateMark, "synchronize", lambda self: None)
    with pytest.raises(AssertionError):
        sent(2, [0] * 5)


def test_without_a_device_numbers_arrive_at_once() -> None:
    staged = StagedNumbers((3,), "cpu")
    for number in range(9):
        staged.send(torch.full((3,), number, dtype=torch.int32))
        assert staged.device_values.tolist() == [number] * 3
    address = staged.device_values.data_ptr()
    staged.send(torch.zeros(3, dtype=torch.int32))
    assert staged.device_values.data_ptr() == address, "a captured graph holds the address"
