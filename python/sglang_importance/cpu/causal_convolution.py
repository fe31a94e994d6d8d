"""The short causal convolution of linear attention, in torch: its last inputs are a request's state."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, silu

PADDING = -1
"""Upstream's slot of a row that no request is behind (``PAD_SLOT_ID``)."""


def convolve(
    inputs: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One channel after the other over one sequence, in float32.

    Args:
        inputs: [channels, tokens], at least one token.
        window: [channels, width - 1] inputs in front of them; zeros where a sequence begins.
        weight: [channels, width], the newest input last.
        bias: [channels], or None.

    Returns:
        Outputs [channels, tokens], and the window in front of what follows, both float32.
    """
    seen = torch.cat([window.float(), inputs.float()], dim=-1)
    outputs = conv1d(
        seen.unsqueeze(0),
        weight.float().unsqueeze(1),
        None if bias is None else bias.float(),
        groups=len(weight),
    )
    return outputs.squeeze(0), seen[:, seen.shape[1] - window.shape[1] :]


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: object = None,
) -> torch.Tensor:
    """Several sequences behind one another, each with its own window.

    Args:
        x: [channels, tokens] of all sequences.
        weight: [channels, width].
        bias: [channels], or None.
        activation: "silu" or "swish", or None.
        conv_states: [num_slots, channels, width - 1] windows, written to.
        has_initial_state: [num_sequences] whether a sequence goes on where its window ends.
        cache_indices: [num_sequences] slots; ``PADDING`` for none.
        query_start_loc: [num_sequences + 1] first tokens, and the end of the last sequence.
        seq_lens_cpu: upstream's lengths of the sequences, which ``query_start_loc`` tells too.

    Returns:
        [channels, tokens], of the dtype of ``x``; zeros where no sequence is.
    """
    outputs = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    rows = zip(cache_indices.tolist(), has_initial_state.tolist(), starts, starts[1:], strict=False)
    for slot, goes_on, start, end in rows:
        if slot == PADDING or start == end:
            continue
        window = conv_states[slot] if goes_on else torch.zeros_like(conv_states[slot])
        convolved, behind = convolve(x[:, start:end], window, weight, bias)
        outputs[:, start:end] = _activated(convolved, activation).to(x.dtype)
        conv_states[slot] = behind.to(conv_states.dtype)
    return outputs


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """One token for each sequence; [num_sequences, channels] in and out, else as ``causal_conv1d_fn_cpu``."""
    outputs = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot == PADDING:
            continue
        convolved, behind = convolve(x[row].unsqueeze(-1), conv_states[slot], weight, bias)
        outputs[row] = _activated(convolved.squeeze(-1), activation).to(x.dtype)
        conv_states[slot] = behind.to(conv_states.dtype)
    return outputs


def _activated(outputs: torch.Tensor, activation: str | None) -> torch.Tensor:
    return silu(outputs) if activation in ("silu", "swish") else outputs
