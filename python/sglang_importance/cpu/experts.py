"""Experts of other ranks, without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sglang_importance.cpu.shim import Shim


class ExpertsOfOtherRanks(Shim):
    defect = (
        "with expert parallelism, an expert of another rank has id -1 (layers/moe/token_dispatcher/"
        "standard.py:192), which the experts in torch take for an index (layers/moe/fused_moe_native.py:77)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

        # Upstream's own way to count the tokens of an expert.
        return "scatter_(1, topk_ids" in inspect.getsource(moe_forward_native)

    def apply(self) -> None:
        from sglang.srt.layers.moe import fused_moe_native

        upstream = fused_moe_native.moe_forward_native

        def forward(layer: torch.nn.Module, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
            """The rank's own share of each token; the ranks' shares are summed behind it.

            Args:
                layer: its experts.
                x: [num_tokens, hidden_size].
                chosen: experts of each token, [num_tokens, top_k] ids and weights.
                config: of the layer.
            """
            elsewhere = chosen.topk_ids < 0
            if not elsewhere.any():
                result: torch.Tensor = upstream(layer, x, chosen, config)
                return result
            ids = chosen.topk_ids.clamp(min=0)
            weights = chosen.topk_weights.masked_fill(elsewhere, 0.0)
            # One choice of each token at a time: upstream wants the experts of a token to differ.
            shares = [
                upstream(layer, x, chosen._replace(topk_ids=one_id, topk_weights=weight), config)
                for one_id, weight in zip(ids.split(1, dim=1), weights.split(1, dim=1), strict=True)
            ]
            return torch.stack(shares).sum(dim=0)

        fused_moe_native.moe_forward_native = forward  # type: ignore[assignment]  # it is called by place


def gate_shared_output(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """The shared expert's output, times the sigmoid of each token's gate, in float32.

    Args:
        hidden_states: [tokens, channels].
        gate_weight: [channels].
        shared_output: [tokens, channels].
        output: [tokens, channels], written to.
        do_add: whether it is added to what ``output`` holds.
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(-1)
    gated = gate * shared_output.float()
    output.copy_(output.float() + gated if do_add else gated)


class SharedExpertGate(Shim):
    defect = "the gate of a shared expert is a Triton kernel (kernels/ops/elementwise/elementwise.py:539)"

    def needed(self) -> bool:
        from sglang.kernels.ops.elementwise import elementwise

        return elementwise._launch_fused_gate_sigmoid_mul is not gate_shared_output

    def apply(self) -> None:
        from sglang.kernels.ops.elementwise import elementwise

        elementwise._launch_fused_gate_sigmoid_mul = gate_shared_output
