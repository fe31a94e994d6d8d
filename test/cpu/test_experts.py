"""Experts that are divided over ranks, in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_importance.cpu.experts import ExpertsOfOtherRanks

EXPERTS, HIDDEN, INNER, TOKENS = 4, 8, 6, 10
CONFIG: Any = SimpleNamespace(
    activation="silu", apply_router_weight_on_input=False, gemm1_alpha=None, gemm1_clamp_limit=None
)


def test_the_shim_looks_for_the_defect_itself() -> None:
    assert not ExpertsOfOtherRanks().needed()  # ours is in place


def test_the_shares_of_two_ranks_are_the_whole() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=rng)
    up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=rng)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=rng)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:2] for _ in range(TOKENS)]).to(torch.int32)
    weights = torch.rand(TOKENS, 2, generator=rng)

    def computed(first: int, last: int) -> torch.Tensor:
        """What a rank with the experts from ``first`` on, and before ``last``, makes of the tokens."""
        layer: Any = SimpleNamespace(
            num_experts=EXPERTS, w13_weight=up[first:last], w2_weight=down[first:last]
        )
        here = (ids >= first) & (ids < last)
        chosen = StandardTopKOutput(weights, torch.where(here, ids - first, -1), torch.empty(0))
        return fused_moe_native.moe_forward_native(layer, x, chosen, CONFIG)

    torch.testing.assert_close(computed(0, 2) + computed(2, 4), computed(0, 4))
