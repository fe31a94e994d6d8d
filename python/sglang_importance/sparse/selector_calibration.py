"""What a selector must know of a model's keys and queries, from one forward pass at the start of a server."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch.nn.functional import scaled_dot_product_attention

from sgl_importance_kernels.sparse.bit_tables import CALIBRATION_TOKENS, KeyStatistics, calibration_tokens


class _ObservedAttention:
    """Causal attention among the tokens of one pass: keeps no KV, takes statistics of every layer."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._of_layers: dict[int, KeyStatistics] = {}

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        self._of_layers[layer.layer_id] = KeyStatistics.of(
            keys[None], queries[None] * layer.scaling, self._page_size
        )
        outputs = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            is_causal=True,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num > layer.tp_k_head_num,
        )
        return outputs[0].transpose(0, 1).reshape(len(queries), -1)

    def statistics(self, *, turns_halves: bool) -> KeyStatistics:
        """Of all layers, in their order."""
        of_layers = [self._of_layers[layer] for layer in sorted(self._of_layers)]
        return KeyStatistics(
            variances=torch.cat([each.variances for each in of_layers]),
            energies=torch.cat([each.energies for each in of_layers]),
            turns_halves=turns_halves,
        )


@torch.no_grad()
def key_statistics(model: torch.nn.Module, *, vocabulary: int, page_size: int, device: Any) -> KeyStatistics:
    """Statistics of a model, from one pass that writes no KV (``calibration_tokens``).

    Args:
        model: sglang's, loaded.
        vocabulary: token ids that it knows.
        page_size: tokens per page.
        device: where the model is.
    """
    tokens = calibration_tokens(vocabulary).to(device)
    positions, lengths = torch.arange(len(tokens), device=device), torch.tensor([len(tokens)], device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=lengths,
        out_cache_loc=torch.zeros_like(tokens),
        seq_lens_sum=CALIBRATION_TOKENS,
        positions=positions,
        extend_num_tokens=CALIBRATION_TOKENS,
        extend_seq_lens=lengths.int(),
        extend_prefix_lens=torch.zeros(1, dtype=torch.int32, device=device),
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        extend_seq_lens_cpu=[CALIBRATION_TOKENS],
        extend_prefix_lens_cpu=[0],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    observed = _ObservedAttention(page_size)
    with forward_context(ForwardContext(attn_backend=observed)):  # type: ignore[arg-type]  # what layers call
        model(tokens, positions, batch)
    return observed.statistics(turns_halves=turns_halves(model))


def turns_halves(model: torch.nn.Module) -> bool:
    """Whether the model rotates whole heads, each channel into the one half the head away."""
    told = ("rotary_dim", "head_size")
    rotations = [module for module in model.modules() if all(hasattr(module, name) for name in told)]
    # One without a style, which has a cache of its own for long contexts, is NeoX's.
    return bool(rotations) and all(
        each.rotary_dim == each.head_size and getattr(each, "is_neox_style", True) for each in rotations
    )
