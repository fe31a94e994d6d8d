"""Attention of a token to pages, head by head, against a computation of single numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.page_lists import best_first, page_masses


def naive(
    queries: torch.Tensor, keys: torch.Tensor, page_size: int, scale: float, cap: float, sinks: list[float]
) -> list[list[float]]:
    """Of keys [tokens, KV heads, dimension] in the order of the sequence."""
    heads, kv_heads = len(queries), keys.shape[1]
    group = heads // kv_heads
    found = []
    for kv_head in range(kv_heads):
        pages = [0.0] * -(-len(keys) // page_size)
        for head in range(kv_head * group, (kv_head + 1) * group):
            logits = [scale * float(queries[head] @ key[kv_head]) for key in keys]
            if cap:
                logits = [cap * math.tanh(logit / cap) for logit in logits]
            total = sum(map(math.exp, logits)) + (math.exp(sinks[head]) if sinks else 0)
            for at, logit in enumerate(logits):
                pages[at // page_size] += math.exp(logit) / total / group
        found.append(pages)
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 23),
    st.sampled_from([(4, 2), (4, 4), (3, 1)]),
    st.integers(1, 5),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
    st.integers(0, 999),
)
def test_masses_are_those_of_each_head(
    tokens: int, heads: tuple[int, int], page_size: int, cap: float, has_sinks: bool, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads[0], 6, generator=draws)
    pool = torch.randn(40, heads[1], 6, generator=draws)
    locations = torch.randperm(40, generator=draws)[:tokens]
    sinks = torch.randn(heads[0], generator=draws) if has_sinks else None
    found = page_masses(queries, pool, locations, page_size, scale=0.4, logit_cap=cap, sinks=sinks)
    expected = naive(queries, pool[locations], page_size, 0.4, cap, [] if sinks is None else sinks.tolist())
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    if sinks is None:
        torch.testing.assert_close(found.sum(dim=-1), torch.ones(heads[1]))


def test_the_best_pages_come_first_and_equals_in_their_order() -> None:
    pages, masses = best_first(torch.tensor([[0.1, 0.4, 0.1, 0.4], [0.0, 0.0, 1.0, 0.0]]), 3)
    assert pages.tolist() == [[1, 3, 0], [2, 0, 1]]
    assert masses[0].tolist() == pytest.approx([0.4, 0.4, 0.1])
