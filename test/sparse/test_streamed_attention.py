"""Attention over parts of a context, against all of it at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.selectors.registry import AllKeys
from sgl_importance_kernels.sparse.streamed_attention import (
    PartialAttention,
    attend_causally,
    stream_attention,
)

from support.paged_context import DIM, KV_HEADS, PAGE, SCALE, dense, filled_slots


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@given(
    prefix=st.integers(0, 60),
    new=st.integers(1, 20),
    groups=st.sampled_from((1, 3)),
    num_slots=st.integers(1, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_a_streamed_extend_is_dense_attention(
    dtype: torch.dtype, tolerance: float, prefix: int, new: int, groups: int, num_slots: int, seed: int
) -> None:
    torch.manual_seed(seed)
    slots = filled_slots(num_slots, prefix + new, dtype)
    queries = torch.randn(new, groups * KV_HEADS, DIM).to(dtype)
    expected = dense(queries, slots, prefix + new)
    own = [host.flatten(0, 1)[PAGE + prefix : PAGE + prefix + new] for host in slots.host[0]]
    sums = PartialAttention()
    stream_attention(sums, queries, slots, 0, torch.arange(1, -(-prefix // PAGE) + 1), prefix, SCALE)
    sums.add(*attend_causally(queries, *own, SCALE))
    torch.testing.assert_close(sums.output, expected.float(), rtol=tolerance, atol=tolerance)


@given(
    tokens=st.integers(1, 90),
    budget=st.integers(1, 25),
    num_slots=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_chosen_pages_are_attended_to_and_no_others(
    tokens: int, budget: int, num_slots: int, seed: int
) -> None:
    torch.manual_seed(seed)
    slots = filled_slots(num_slots, tokens, torch.float32)
    representations = Representations(AllKeys(PAGE), (slots.host[0][0],), "cpu")
    chooser = PageChooser(representations, PAGE, ChoiceRule(PAGE, PAGE), slots.traffic)
    query = torch.randn(1, 2 * KV_HEADS, DIM)
    pages = torch.arange(1, -(-tokens // PAGE) + 1)
    chosen, shares = chooser.choose(0, query * SCALE, pages, tokens, budget)
    assert len(chosen) == min(len(pages), max(budget, 2 if tokens % PAGE == 0 else 3))
    sums = PartialAttention()
    left = len(pages) - len(chosen)
    stream_attention(sums, query, slots, 0, chosen, tokens - left * PAGE, SCALE, is_chosen=True)

    slots.flush(0)
    keys, values = (host[chosen].flatten(0, 1)[: tokens - left * PAGE] for host in slots.host[0])
    expected = scaled_dot_product_attention(
        query.movedim(0, 1)[None],
        keys.movedim(0, 1)[None],
        values.movedim(0, 1)[None],
        scale=SCALE,
        enable_gqa=True,
    )
    torch.testing.assert_close(sums.output, expected[0].movedim(0, 1))
    if budget >= len(pages):
        assert torch.equal(chosen, pages)
        assert shares is None
    else:
        assert shares is not None
        assert shares.shape == chosen.shape
        assert 0 <= shares.min() <= shares.max() <= 1


def test_one_page_in_a_slot_is_not_loaded_again() -> None:
    slots = filled_slots(4, 10 * PAGE, torch.float32)
    pages = torch.arange(1, 11)
    for _ in range(2):
        sums = PartialAttention()
        stream_attention(sums, torch.randn(2, KV_HEADS, DIM), slots, 0, pages, 10 * PAGE, SCALE)
    assert slots.traffic.read == 20
    assert slots.traffic.loaded == 10 + 7  # three of four slots are no frames


def test_slots_go_to_those_who_run() -> None:
    """Pages that nobody has read for two passes make room, others do not."""
    slots = filled_slots(3, 8 * PAGE, torch.float32)
    nothing = torch.tensor([], dtype=torch.int64)

    def loads(*pages: int) -> int:
        before = slots.traffic.loaded
        slots.read(0, torch.tensor(pages))
        return slots.traffic.loaded - before

    assert [loads(1, 2), loads(3, 4), loads(1, 2)] == [2, 2, 0]
    slots.begin_pass(nothing)
    assert [loads(3, 4), loads(2), loads(3, 4)] == [2, 0, 2]  # a pass ago they were read
    slots.begin_pass(nothing)
    slots.check_integrity()
    assert [loads(3), loads(2), loads(1), loads(3)] == [1, 0, 1, 0]  # page 1 was not read for two passes
    slots.check_integrity()
