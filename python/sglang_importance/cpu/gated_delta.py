"""Gated delta rule (Qwen3-Next's linear attention) without sgl_kernel, in torch, token after token.

A head's state maps keys to values. Each token lets it fade, takes out what it says of the token's key, and
puts in the token's value: S = exp(g) S; S += beta (v - S k) k^T; its output is S q.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.nn.functional import silu, softplus

from sglang_importance.cpu.causal_convolution import (
    PADDING,
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
)
from sglang_importance.cpu.shim import Shim

NORM_EPSILON = 1e-6  # as upstream's l2norm has it, under the root


def run_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One sequence, or what follows of it. A query and key head serves several value heads.

    Args:
        query: [tokens, key_heads, key_dim], not scaled.
        key: the same shape.
        value: [tokens, value_heads, value_dim].
        decay: [tokens, value_heads] logarithms, at most 0.
        beta: [tokens, value_heads] between 0 and 1.
        state: [value_heads, value_dim, key_dim] float32, written to.

    Returns:
        [tokens, value_heads, value_dim] float32.
    """
    group = value.shape[1] // key.shape[1]
    query = _normed(query).repeat_interleave(group, dim=1) * key.shape[-1] ** -0.5
    key = _normed(key).repeat_interleave(group, dim=1)
    value, beta, kept = value.float(), beta.float(), decay.float().exp()
    outputs = torch.empty_like(value)
    for token in range(len(value)):
        state *= kept[token, :, None, None]
        said = torch.einsum("hvk,hk->hv", state, key[token])
        correction = beta[token, :, None] * (value[token] - said)
        state += correction[:, :, None] * key[token, :, None, :]
        outputs[token] = torch.einsum("hvk,hk->hv", state, query[token])
    return outputs


def _normed(vectors: torch.Tensor) -> torch.Tensor:
    vectors = vectors.float()
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + NORM_EPSILON)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of a state each token keeps, as a logarithm, and how strongly it writes.

    Args:
        A_log: [value_heads].
        a: [tokens, value_heads].
        b: [tokens, value_heads].
        dt_bias: [value_heads].

    Returns:
        Decay and beta, each [1, tokens, value_heads] float32.
    """
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """Several sequences behind one another, each from its slot's state, which it leaves its own in.

    Args:
        q: [1, tokens, key_heads, key_dim].
        k: the same shape.
        v: [1, tokens, value_heads, value_dim].
        g: [1, tokens, value_heads] decay, and so the next.
        beta: how strongly a token writes.
        initial_state: [num_slots, value_heads, value_dim, key_dim], written to.
        initial_state_indices: [num_sequences] slots; ``PADDING`` for none.
        cu_seqlens: [num_sequences + 1] first tokens, and the end of the last sequence.
        head_first: never so on a CPU.
        use_qk_l2norm_in_kernel: always so.

    Returns:
        Outputs [1, tokens, value_heads, value_dim] of ``v``'s dtype. No final states, which are in their
        slots, and none within a sequence, which upstream asks for on accelerators only.
    """
    assert use_qk_l2norm_in_kernel, "upstream calls it so"
    assert not head_first
    outputs = torch.zeros_like(v)
    starts = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), starts, starts[1:], strict=False):
        if slot == PADDING or start == end:
            continue
        state = initial_state[slot].float()
        tokens = slice(start, end)
        said = run_delta_rule(q[0, tokens], k[0, tokens], v[0, tokens], g[0, tokens], beta[0, tokens], state)
        outputs[0, tokens] = said.to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return outputs, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """As ``fused_gdn_gating_cpu`` and ``chunk_gated_delta_rule_cpu`` together: a step of decoding."""
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0), "torch's own, with which upstream calls it"
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    outputs, _, _ = chunk_gated_delta_rule_cpu(
        *(q, k, v, decay, beta),
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return outputs


MODULE = "sgl_kernel.mamba"
IMPORTED = (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu)
CALLED = (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu)


class GatedDeltaKernels(Shim):
    defect = (
        "gated delta nets import operators of sgl_kernel on a CPU (attention/linear/gdn_backend.py:181, "
        "attention/linear/kernels/gdn_triton.py:28), and its PyPI wheel is CUDA only"
    )

    def needed(self) -> bool:
        # Where another stands in for it, every name can be imported, and nothing called.
        kernels = sys.modules.get("sgl_kernel")
        return not hasattr(kernels, "__file__") and MODULE not in sys.modules

    def apply(self) -> None:
        states = ModuleType(MODULE)
        states.__spec__ = ModuleSpec(MODULE, None)
        for imported in IMPORTED:
            states.__dict__[imported.__name__] = imported
        sys.modules[MODULE] = states
        for called in CALLED:
            setattr(torch.ops.sgl_kernel, called.__name__, called)


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
