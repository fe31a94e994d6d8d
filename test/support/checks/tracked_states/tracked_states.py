"""A plugin that lets a CPU serve linear attention with ``extra_buffer``, GPUs' strategy, in plain torch.

It keeps a state at multiples of 64 tokens of a prompt too, so that prompts share prefixes. What it lacks on a
CPU is small: states within a prompt, and a copy while tokens are generated. Slow, and for tests.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

CHUNK_TOKENS = 64


def register() -> None:
    from sglang.srt.arg_groups import mamba_hook

    mamba_hook.validate_mamba_extra_buffer = lambda *args, **kwargs: None
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    _pin_nothing()
    gdn_triton.chunk_gated_delta_rule = _with_states_within
    hybrid_linear_attn_backend.track_mamba_states_all_layers = _copy_states


def _pin_nothing() -> None:
    # managers/schedule_batch.py:2226 and 3649
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def _with_states_within(
    *inputs: Any, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any, **kwargs: Any
) -> tuple[Any, None, Any]:
    """Chunk by chunk: the outputs, and the state in front of each chunk [1, chunks, heads, value, key]."""
    from sglang_importance.cpu.gated_delta import chunk_gated_delta_rule_cpu

    tensors = [*inputs, *(kwargs.pop(name) for name in ("q", "k", "v", "g", "beta") if name in kwargs)]
    outputs, before = torch.zeros_like(tensors[2]), []
    starts = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices, starts, starts[1:], strict=False):
        for first in range(start, end, CHUNK_TOKENS):
            tokens = slice(first, min(first + CHUNK_TOKENS, end))
            before.append(initial_state[slot].clone())
            outputs[:, tokens], _, _ = chunk_gated_delta_rule_cpu(
                *(tensor[:, tokens] for tensor in tensors),
                initial_state=initial_state,
                initial_state_indices=slot.unsqueeze(0),
                cu_seqlens=torch.tensor([0, tokens.stop - tokens.start]),
                **kwargs,
            )
    return outputs, None, torch.stack(before).unsqueeze(0)


def _copy_states(
    conv: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    tracked: torch.Tensor,
    to: torch.Tensor,
    batch_size: int,
    **_: Any,
) -> None:
    wanted = tracked[:batch_size]
    for pool in (conv, states):
        pool[:, to[:batch_size][wanted]] = pool[:, slots[:batch_size][wanted]]
