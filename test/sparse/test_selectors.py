"""Selectors against what they estimate: the largest logit that a query finds in a page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.laboratory import load_control
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.tiered_options import CONTROL_SELECTORS, SPARSE_SELECTORS
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sgl_importance_lab.kv_size.kept_bytes import kept_bytes
from sgl_importance_lab.selectors.registry import ready_selector

from support.page_estimates import GROUP, PAGES, SIZE, drawn, estimated, exact


def test_every_name_of_the_flag_is_a_selector_that_ships_or_a_control_arm() -> None:
    assert {"all", *SELECTORS, *CONTROL_SELECTORS} == set(SPARSE_SELECTORS)
    assert all(load_control(name)(SIZE) for name in CONTROL_SELECTORS)


@given(st.sampled_from(("bits", "token")), st.integers(1, 64), st.sampled_from((16, 64)))
def test_sizes_told_without_tensors_are_those_that_are_kept(name: str, eighths: int, page_size: int) -> None:
    dim = 8 * eighths
    with_unit = SELECTORS[name](page_size).kept_bytes(dim) + 4
    assert kept_bytes(name, dim, page_size) == with_unit


def test_the_selector_of_the_last_release_is_replaced_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    options = ImportanceOptions.of(
        {"policy": "importance", "tiered.residency": "tiered", "sparse.selector": "rep"}
    )
    assert options.sparse.selector == "bits"
    (line,) = caplog.messages
    assert line == "KV importance: --kv-sparse-selector rep is gone: bits takes its place"


@given(st.integers(0, 2**31), st.permutations(range(PAGES)))
def test_token_finds_the_largest_logit_but_for_rounding(seed: int, order: list[int]) -> None:
    keys, queries = drawn(seed)
    pages = torch.tensor(order[:7])
    largest = exact(keys, queries, pages).amax(dim=-1)
    # Both factors are rounded to 1/127 of the largest number in them.
    torch.testing.assert_close(estimated("token", keys, queries, pages), largest, rtol=0, atol=1.0)


@pytest.mark.parametrize("name", ["bits", "token"])
def test_a_key_that_stands_out_is_found(name: str) -> None:
    keys, queries = drawn(0, tokens=1)
    keys *= 0.1
    keys[5, 3, 1] = 3 * queries[0, GROUP] / queries[0, GROUP].norm()
    found = estimated(name, keys, queries, torch.arange(PAGES))
    assert int(found[GROUP].argmax()) == 5


@pytest.mark.parametrize("name", ["bits", "token"])
def test_what_was_written_by_somebody_else_is_represented_anew(name: str) -> None:
    keys, queries = drawn(1)
    representations = Representations(ready_selector(name, keys[None]), (keys,), "cpu")
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
