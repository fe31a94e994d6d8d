"""Selectors that comparisons run, against what they estimate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.page_estimates import DIM, GROUP, KV_HEADS, PAGES, SIZE, drawn, estimated, exact


@given(st.integers(0, 2**31))
def test_a_bounding_box_bounds_every_logit(seed: int) -> None:
    keys, queries = drawn(seed)
    pages = torch.arange(PAGES)
    assert bool(
        (estimated("quest", keys, queries, pages) + 1.0 >= exact(keys, queries, pages).amax(-1)).all()
    )


@given(st.integers(0, 2**31))
def test_the_oracle_orders_pages_by_their_attention(seed: int) -> None:
    keys, queries = drawn(seed)
    pages = torch.arange(PAGES)
    mass = exact(keys, queries, pages).exp().sum(dim=-1)
    torch.testing.assert_close(estimated("oracle", keys, queries, pages).exp(), mass)


@pytest.mark.parametrize("name", ["rep", "quest", "oracle"])
def test_a_key_that_stands_out_is_found(name: str) -> None:
    keys, queries = drawn(0, tokens=1)
    keys *= 0.1
    keys[5, 3, 1] = 3 * queries[0, GROUP] / queries[0, GROUP].norm()
    found = estimated(name, keys, queries, torch.arange(PAGES))
    assert int(found[GROUP].argmax()) == 5


def test_mean_does_not_find_it_and_window_does_not_look() -> None:
    keys, queries = drawn(0, tokens=1)
    keys[5, 3, 1], keys[5, 4, 1] = 9.0, -9.0
    keys[7, :, 1] = queries[0, GROUP]
    pages = torch.arange(PAGES)
    assert int(estimated("mean", keys, queries, pages)[GROUP].argmax()) == 7
    assert estimated("window", keys, queries, pages).argsort(descending=True).tolist() == [
        list(range(PAGES))[::-1]
    ]


def test_a_block_is_as_good_as_its_best_page() -> None:
    draws = torch.Generator().manual_seed(0)
    keys = torch.randn(20, SIZE, KV_HEADS, DIM, generator=draws)
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=draws)
    found = estimated("infllm", keys, queries, torch.arange(20))
    blocks = [found[:, :8], found[:, 8:16], found[:, 16:]]  # 128 tokens are 8 pages
    assert all(bool((block == block[:, :1]).all()) for block in blocks)
    assert not torch.equal(blocks[0][:, 0], blocks[1][:, 0])
