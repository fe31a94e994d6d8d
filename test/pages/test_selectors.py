"""Selectors against what they estimate: the largest logit that a query finds in a page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.settings import SPARSE_SELECTORS
from sgl_importance_kernels.pages.page_choice import best_pages
from sgl_importance_kernels.pages.representations import Representations
from sgl_importance_kernels.pages.selectors.registry import SELECTORS

PAGES, SIZE, KV_HEADS, GROUP, DIM = 12, 8, 2, 3, 16


def drawn(seed: int, tokens: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of all pages, and queries."""
    draws = torch.Generator().manual_seed(seed)
    keys = torch.randn(PAGES, SIZE, KV_HEADS, DIM, generator=draws)
    return keys, torch.randn(tokens, KV_HEADS * GROUP, DIM, generator=draws)


def estimated(name: str, keys: torch.Tensor, queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    representations = Representations(SELECTORS[name](SIZE), (keys,), "cpu")
    return representations.selector.logits(queries, representations.of(0, pages))


def exact(keys: torch.Tensor, queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Every logit, [tokens * heads, pages, page size]."""
    by_head = queries.view(len(queries), KV_HEADS, GROUP, DIM)
    return torch.einsum("tkgd,pskd->tkgps", by_head, keys[pages]).reshape(-1, len(pages), SIZE)


def test_every_name_of_the_flag_is_a_selector() -> None:
    assert {"all", *SELECTORS} == set(SPARSE_SELECTORS)


@given(st.integers(0, 2**31), st.permutations(range(PAGES)))
def test_token_finds_the_largest_logit_but_for_rounding(seed: int, order: list[int]) -> None:
    keys, queries = drawn(seed)
    pages = torch.tensor(order[:7])
    largest = exact(keys, queries, pages).amax(dim=-1)
    # Both factors are rounded to 1/127 of the largest number in them.
    torch.testing.assert_close(estimated("token", keys, queries, pages), largest, rtol=0, atol=1.0)


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


@pytest.mark.parametrize("name", ["rep", "token", "quest", "oracle", "infllm"])
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


def test_what_was_written_by_somebody_else_is_represented_anew() -> None:
    keys, queries = drawn(1)
    representations = Representations(SELECTORS["rep"](SIZE), (keys,), "cpu")
    pages = torch.arange(PAGES)
    before = representations.selector.logits(queries, representations.of(0, pages))
    keys[4] *= 2
    stale = representations.selector.logits(queries, representations.of(0, pages))
    assert torch.equal(stale, before)
    with pytest.raises(AssertionError, match="of other keys"):
        representations.check_integrity()
    representations.forget(torch.tensor([4]))
    fresh = representations.selector.logits(queries, representations.of(0, pages))
    changed = (fresh != before).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [4]


@given(
    seed=st.integers(0, 2**31),
    num_pages=st.integers(1, 40),
    max_pages=st.integers(0, 45),
    num_sinks=st.integers(0, 3),
    num_recent=st.integers(0, 3),
    unit_pages=st.sampled_from((1, 4)),
    top_p=st.sampled_from((0.5, 1.0)),
    least_share=st.sampled_from((0.0, 0.1)),
)
def test_the_choice_keeps_its_promises(
    seed: int,
    num_pages: int,
    max_pages: int,
    num_sinks: int,
    num_recent: int,
    unit_pages: int,
    top_p: float,
    least_share: float,
) -> None:
    logits = 4 * torch.randn(3, num_pages, generator=torch.Generator().manual_seed(seed))
    found, shares = best_pages(
        logits,
        max_pages=max_pages,
        num_sinks=num_sinks,
        num_recent=num_recent,
        unit_pages=unit_pages,
        top_p=top_p,
        least_share=least_share,
    )
    torch.testing.assert_close(shares, logits.softmax(dim=1).amax(dim=0)[found])
    kept = found.tolist()
    forced = {*range(min(num_sinks, num_pages)), *range(max(num_pages - num_recent, 0), num_pages)}
    assert kept == sorted(set(kept))
    assert forced <= set(kept)
    assert len(kept) <= max(max_pages, len(forced))
    if top_p == 1 and least_share == 0:
        assert len(kept) == min(max(max_pages, len(forced)), num_pages) or num_sinks + num_recent > num_pages
    if top_p < 1 and least_share == 0 and len(kept) < min(max_pages, num_pages):
        assert bool((logits.softmax(dim=1)[:, kept].sum(dim=1) >= top_p - 1e-5).all())
    if least_share > 0 and top_p == 1 and max_pages >= num_pages:
        weights = (logits - logits.amax(dim=1, keepdim=True)).exp().amax(dim=0)
        assert {page for page in range(num_pages) if weights[page] >= least_share} <= set(kept)


def test_units_are_taken_whole() -> None:
    logits = torch.zeros(1, 16)
    logits[0, 6] = 5.0
    kept, _ = best_pages(logits, max_pages=5, num_sinks=1, num_recent=0, unit_pages=4)
    assert kept.tolist()[:1] == [0]
    assert {4, 5, 6, 7} <= set(kept.tolist())
