"""A decode step over tiered pages under Triton waits for no device, whatever its batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from support.drivers.counted_step import LAYERS, CountedStep

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the step's pools are on the CPU"),
]

CONTEXT = 312
MOST_LAUNCHES = 6
"""A layer's: write, scan, choose, place, bring, attend."""


@torch.inference_mode()
def test_a_step_waits_for_nothing_and_launches_alike_for_any_batch() -> None:
    counts = [
        CountedStep(batch, CONTEXT, selector).count() for selector in ("token", "bits") for batch in (1, 16)
    ]
    for count in counts:
        assert not count.of_pass.syncs + count.of_layers.syncs
        assert 0 < sum(count.of_layers.launches.values()) <= MOST_LAUNCHES * LAYERS
        assert count.of_layers.launches == counts[0].of_layers.launches
        assert sum(count.of_pass.launches.values()) == sum(counts[0].of_pass.launches.values()) > 0
