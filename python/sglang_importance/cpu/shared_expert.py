"""The gate of a shared expert (Qwen's mixtures of experts) without Triton."""

from __future__ import annotations

import torch

from sglang_importance.cpu.shim import Shim


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
