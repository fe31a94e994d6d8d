"""The norm behind linear attention, times its gate, without Triton."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from sglang_importance.cpu.shim import Shim


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``x`` over its root mean square, weighted, times the activated gate.

    Args:
        x: [..., channels].
        g: the same shape: the gate.
        weight: [channels], or None.
        bias: [channels], or None.
        activation: "swish" or "silu", else the gate's sigmoid.
        residual: None; nothing that has run on a CPU adds one, and so the next two.
        prenorm: False.
        residual_in_fp32: False.
        eps: added to the mean square.

    Returns:
        The shape and dtype of ``x``.
    """
    assert residual is None
    assert not prenorm
    wide, gate = x.float(), g.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight.float()
    normed = normed if bias is None else normed + bias.float()
    return (normed * (silu(gate) if activation in ("swish", "silu") else gate.sigmoid())).to(x.dtype)


class GatedNorm(Shim):
    defect = "the norm behind linear attention is a Triton kernel without AMX (fla/fused_norm_gate.py:400)"

    def needed(self) -> bool:
        from sglang.kernels.ops.attention.fla import fused_norm_gate

        return not fused_norm_gate._use_cpu and fused_norm_gate.rms_norm_gated is not rms_norm_gated

    def apply(self) -> None:
        from sglang.kernels.ops.attention.fla import fused_norm_gate

        fused_norm_gate.rms_norm_gated = rms_norm_gated
