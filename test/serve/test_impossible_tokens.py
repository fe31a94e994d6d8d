"""Rows of logits that allow no token are made uniform; the others stay bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_importance.scheduler.impossible_tokens import allow_some_token

NOTHING = (float("-inf"), float("nan"), float("inf"))
logits = st.lists(
    st.lists(st.sampled_from((0.5, -3.0, 1e30, *NOTHING)), min_size=4, max_size=4), min_size=1, max_size=5
)


@given(logits)
def test_every_row_can_be_drawn_from(rows: list[list[float]]):
    before, after = torch.tensor(rows), torch.tensor(rows)
    allow_some_token(after)
    drawn = torch.multinomial(after.softmax(dim=-1), num_samples=1)  # which raises where a row is none
    assert drawn.shape == (len(rows), 1)
    for old, new in zip(before, after, strict=True):
        is_right = bool((old.softmax(dim=-1) >= 0).all())
        assert torch.equal(new, old if is_right else torch.zeros(4))
