"""What it takes to have tokens on the device again, in seconds worked out by hand."""

from __future__ import annotations

import pytest

from sgl_importance.policy.cost_model import CostModel
from sgl_importance.tiers import Tier

COST = CostModel(
    prefill_seconds_per_token=0.5,
    prefill_seconds_per_token_pair=0.01,
    bytes_per_token=100,
    host_bytes_per_second=1000.0,
    storage_bytes_per_second=500.0,
)


def test_a_token_passes_the_weights_and_attends_to_all_before_it() -> None:
    # Ten tokens; the middle one of them attends to 20 + 5.
    assert COST.recompute_seconds(10, depth=20) == pytest.approx(10 * 0.5 + 10 * 25 * 0.01)


def test_a_copy_takes_as_long_as_its_bytes_over_every_link_that_it_passes() -> None:
    assert COST.restore_seconds(10, 20, Tier.DEVICE) == 0
    assert COST.restore_seconds(10, 20, Tier.HOST) == pytest.approx(1000 / 1000)
    assert COST.restore_seconds(10, 20, Tier.STORAGE) == pytest.approx(1000 / 1000 + 1000 / 500)
    assert COST.restore_seconds(10, 20, None) == COST.recompute_seconds(10, 20)


def test_nobody_waits_for_a_copy_that_is_slower_than_computing() -> None:
    slow = CostModel(0.5, 0.01, 100, host_bytes_per_second=1.0, storage_bytes_per_second=1.0)
    assert slow.restore_seconds(10, 20, Tier.HOST) == slow.recompute_seconds(10, 20)


def test_constants_follow_from_the_shape_of_the_model() -> None:
    cost = CostModel.from_model(
        parameters=1_000,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        bytes_per_token=100,
        flops_per_second=1e4,
        host_bytes_per_second=1000.0,
        storage_bytes_per_second=500.0,
    )
    assert cost.prefill_seconds_per_token == pytest.approx(2 * 1_000 / 1e4)
    assert cost.prefill_seconds_per_token_pair == pytest.approx(4 * 2 * 4 * 8 / 1e4)


def test_a_constant_that_is_not_positive_is_named() -> None:
    with pytest.raises(ValueError, match="host_bytes_per_second must be positive, not 0"):
        CostModel(0.5, 0.01, 100, host_bytes_per_second=0, storage_bytes_per_second=1.0)
