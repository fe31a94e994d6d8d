"""``bits``: what is kept of a page, against keys made of it again and against the error that bits promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.bit_tables import (
    DISTORTIONS,
    FACTORS_PER_DOUBLING,
    HEADER_BYTES,
    MOST_BITS,
    BitTables,
    KeyStatistics,
)
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.selectors import mean_and_bits
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits

LAYERS, PAGES, KV_HEADS, GROUP, DIM = 2, 24, 2, 3, 32


def drawn(seed: int, page_size: int, pages: int = PAGES) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of all layers by page, whose channels differ in scale, and queries of as many tokens."""
    draws = torch.Generator().manual_seed(seed)
    scales = torch.randn(LAYERS, 1, 1, KV_HEADS, DIM, generator=draws).exp()
    keys = scales * torch.randn(LAYERS, pages, page_size, KV_HEADS, DIM, generator=draws)
    keys += 3 * torch.randn(LAYERS, pages, 1, KV_HEADS, DIM, generator=draws)
    return keys, torch.randn(LAYERS, pages * page_size, KV_HEADS * GROUP, DIM, generator=draws)


def calibrated(keys: torch.Tensor, queries: torch.Tensor) -> MeanAndBits:
    page_size = keys.shape[2]
    selector = MeanAndBits(page_size)
    selector.calibrate(KeyStatistics.of(keys.flatten(1, 2), queries, page_size))
    return selector


def made_again(selector: MeanAndBits, layer: int, kept: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """The keys that estimates are made with, by the definition.

    Args:
        kept: int8 [pages, KV heads, bytes].
        units: float32 [pages, KV heads].

    Returns:
        float32 [pages, page size, KV heads, head dimension].
    """
    tables, page_size = selector.tables(layer), selector._page_size
    heads, dim = tables.widths.shape
    means, codes = kept[..., :dim] * units[..., None], kept[..., dim + HEADER_BYTES :].view(torch.uint8).int()
    factors = (kept[..., dim] / FACTORS_PER_DOUBLING).exp2()
    keys = means[:, None].repeat(1, page_size, 1, 1)
    for head in range(heads):
        for channel in range(dim):
            width = int(tables.widths[head, channel])
            for token in range(page_size if width else 0):
                byte, bit = divmod(int(tables.starts[head, channel]), 8)
                at = byte * page_size + token
                word = codes[:, head, at]
                if bit + width > 8:
                    word = word | codes[:, head, at + page_size] << 8
                code = word >> bit & (1 << width) - 1
                steps = tables.steps[head, channel] * factors[:, head]
                keys[:, token, head, channel] += (code - (1 << width) / 2 + 0.5) * steps
    return keys


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), page_size=st.sampled_from((16, 48)), layer=st.sampled_from((0, 1)))
def test_estimates_are_the_largest_products_with_the_keys_made_again(
    seed: int, page_size: int, layer: int
) -> None:
    keys, queries = drawn(seed, page_size, pages=8)
    selector = calibrated(keys, queries)
    representations = Representations(selector, tuple(keys), "cpu")
    pages = torch.tensor([5, 0, 6, 7])
    asked = queries[layer, :2].contiguous()
    found = selector.logits(asked, representations.of(layer, pages))
    kept, units = selector.keep(layer, keys[layer, pages])
    again = made_again(selector, layer, kept, units)
    products = torch.einsum("tkgd,pskd->tkgps", asked.view(2, KV_HEADS, GROUP, DIM), again)
    # What a bit is worth is rounded to a 65,535th of what all bits are worth together.
    tables = selector.tables(layer)
    levels = tables.steps * ((1 << tables.widths) - 1)
    worth = torch.einsum("tkgd,kd->tkg", asked.view(2, KV_HEADS, GROUP, DIM).abs(), levels).max()
    factor = float((kept[..., DIM] / FACTORS_PER_DOUBLING).exp2().max())
    rounded = factor * float(worth) * int(tables.widths[0].sum()) / 2 / 65000
    torch.testing.assert_close(
        found, products.amax(-1).reshape(-1, len(pages)), rtol=1e-4, atol=1e-3 + rounded
    )


def test_more_bits_leave_less_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = drawn(0, 16)
    around = keys[0] - keys[0].mean(dim=1, keepdim=True)
    left = []
    for bits in (0.5, 1, 1.5, 3):
        monkeypatch.setattr(mean_and_bits, "BITS_PER_CHANNEL", bits)
        selector = calibrated(keys, queries)
        again = made_again(selector, 0, *selector.keep(0, keys[0]))
        left.append(float((again - keys[0]).square().sum() / around.square().sum()))
    assert left == sorted(left, reverse=True)
    assert left[0] < 0.6
    assert left[-1] < 0.05


@given(seed=st.integers(0, 2**31), bits=st.integers(0, MOST_BITS * DIM + 3))
def test_bits_are_given_out_and_lie_apart(seed: int, bits: int) -> None:
    keys, queries = drawn(seed, 8)
    tables = BitTables.allotted(KeyStatistics.of(keys.flatten(1, 2), queries, 8), bits)
    given_out = tables.widths.sum(dim=2)
    assert bool((given_out == given_out[:, :1]).all()), "heads of a layer have as many"
    assert bool((given_out % 8 == 0).all()), "a token's codes are whole bytes"
    most = LAYERS * min(bits, MOST_BITS * DIM)
    assert most - 8 < sum(tables.bits) <= most, "no more than a byte is left over"
    for widths, starts in zip(tables.widths.flatten(0, 1), tables.starts.flatten(0, 1), strict=True):
        taken = [at for w, s in zip(widths.tolist(), starts.tolist(), strict=True) for at in range(s, s + w)]
        assert sorted(taken) == list(range(int(widths.sum())))


@pytest.mark.parametrize("turns_halves", [True, False])
def test_bits_go_where_they_take_most_from_the_error(turns_halves: bool) -> None:
    """Of each channel alone, where positions turn no half of the head into the other."""
    keys, queries = drawn(3, 8)
    statistics = replace(KeyStatistics.of(keys.flatten(1, 2), queries, 8), turns_halves=turns_halves)
    tables = BitTables.allotted(statistics, 48)
    variances, energies = (
        each.unflatten(2, (2, -1)).mean(2).repeat(1, 1, 2) if turns_halves else each
        for each in (statistics.variances, statistics.energies)
    )
    weights = (variances * energies)[0, 0]

    def error(widths: torch.Tensor) -> float:
        return float((weights * torch.tensor(DISTORTIONS)[widths.long()]).sum())

    own = tables.widths[0, 0]
    draws = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert error(own) <= error(own[torch.randperm(DIM, generator=draws)]) + 1e-6


@pytest.mark.parametrize("turns_halves", [True, False])
def test_halves_of_a_head_have_as_many_bits_where_positions_turn_them(turns_halves: bool) -> None:
    """Keys differ in the first half alone, at the positions that were seen."""
    variances = torch.cat(
        [torch.ones(LAYERS, KV_HEADS, DIM // 2), torch.zeros(LAYERS, KV_HEADS, DIM // 2)], dim=2
    )
    statistics = KeyStatistics(variances, torch.ones_like(variances), turns_halves=turns_halves)
    first, second = BitTables.allotted(statistics, 2 * DIM).widths.unflatten(2, (2, -1)).unbind(2)
    assert bool((second == (first if turns_halves else 0)).all())


def test_a_layer_whose_products_are_rougher_has_more_bits() -> None:
    keys, queries = drawn(4, 8)
    queries[1] *= 3
    tables = BitTables.allotted(KeyStatistics.of(keys.flatten(1, 2), queries, 8), 48)
    assert tables.bits[1] > tables.bits[0]


def test_a_query_counts_by_the_page_that_it_must_find() -> None:
    """One channel tells a far page from all others, the other only the last tokens, which are read anyway."""
    keys = torch.zeros(1, 128, 1, 2)
    keys[0, 40, 0, 0] = keys[0, 120, 0, 1] = 50.0
    queries = torch.zeros(1, 128, 1, 2)
    queries[0, 126, 0, 0] = queries[0, 127, 0, 1] = 1.0
    energies = KeyStatistics.of(keys, queries, 8).energies[0, 0]
    assert energies[0] > 0
    assert energies[1] < 1e-6 * energies[0]


def test_pages_that_were_complete_before_calibration_are_kept_when_they_are_asked_for() -> None:
    keys, queries = drawn(1, 16)
    selector = MeanAndBits(16)
    representations = Representations(selector, tuple(keys), "cpu")
    pages = torch.arange(PAGES)
    representations.build(0, pages, keys[0])
    selector.calibrate(KeyStatistics.of(keys.flatten(1, 2), queries, 16))
    asked = queries[0, :1].contiguous()
    found = selector.logits(asked, representations.of(0, pages))
    fresh = Representations(selector, tuple(keys), "cpu")
    assert torch.equal(found, selector.logits(asked, fresh.of(0, pages)))
    representations.check_integrity()


def test_a_page_that_ends_among_the_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="use --page-size 16"):
        MeanAndBits(12)


def test_keys_of_one_value_and_of_no_variance_are_kept() -> None:
    keys, queries = drawn(2, 16)
    statistics = KeyStatistics.of(keys.flatten(1, 2), queries, 8)
    selector = MeanAndBits(16)
    selector.calibrate(replace(statistics, variances=torch.zeros_like(statistics.variances)))
    for constant in (0.0, 2.5):
        kept, units = selector.keep(0, torch.full_like(keys[0], constant))
        torch.testing.assert_close(
            made_again(selector, 0, kept, units), torch.full_like(keys[0], constant), rtol=0.01, atol=1e-6
        )
