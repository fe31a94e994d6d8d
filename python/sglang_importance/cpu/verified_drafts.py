"""Attention of speculative decoding beside torch_native: of drafts to be verified, and of the draft model."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sglang_importance.cpu.request_attention import attend_masked
from sglang_importance.cpu.shim import Shim


def verify_drafts(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    *,
    scaling: float,
) -> torch.Tensor:
    """Self-attention of each request's drafts over its context, and over those of its drafts that each sees.

    Args:
        query: [num_requests * drafts, num_heads, head_dim].
        output: the same shape, written in place and returned.
        k_cache: [num_slots, num_kv_heads, head_dim], drafts included.
        v_cache: [num_slots, num_kv_heads, head_dim].
        req_to_token: [max_requests, max_context] slots.
        req_pool_indices: [num_requests] rows of ``req_to_token``.
        seq_lens: [num_requests] tokens in front of the drafts.
        tree_mask: [num_requests, drafts, drafts] whether a draft (row) sees another (column).
        scaling: factor on the logits.
    """
    drafts = tree_mask.shape[-1]
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), tree_mask, strict=True)
    for number, (request, length, mask) in enumerate(rows):
        slots = req_to_token[request, : length + drafts]
        own = slice(number * drafts, (number + 1) * drafts)
        output[own] = attend_masked(
            query[own],
            k_cache.index_select(0, slots),
            v_cache.index_select(0, slots),
            mask,
            scaling=scaling,
        )
    return output


class VerifiedDrafts(Shim):
    defect = (
        "torch_native takes drafts to be verified for a prompt that goes on, and looks for lengths that "
        "their batch does not have (layers/attention/torch_native_backend.py:87)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return "is_target_verify" not in inspect.getsource(TorchNativeAttnBackend.forward_extend)

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        upstream = TorchNativeAttnBackend.forward_extend

        def forward_extend(
            self: Any,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
        ) -> torch.Tensor:
            if not forward_batch.forward_mode.is_target_verify():
                result: torch.Tensor = upstream(self, q, k, v, layer, forward_batch, save_kv_cache)
                return result
            pool = self.token_to_kv_pool
            if save_kv_cache:
                pool.set_kv_buffer(
                    layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
                )
            drafts = forward_batch.spec_info.draft_token_num
            output = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            verify_drafts(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                output,
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.spec_info.custom_mask.view(-1, drafts, drafts),
                scaling=layer.scaling,
            )
            return output.flatten(1)

        # Replaces the method on the class.
        TorchNativeAttnBackend.forward_extend = forward_extend  # type: ignore[method-assign]


class DraftsInTorch(Shim):
    defect = (
        "the draft model has no attention beside torch_native (speculative/draft_utils.py:129); one step of "
        "drafts needs none of its own for decoding"
    )

    def needed(self) -> bool:
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        return "torch_native" not in inspect.getsource(DraftBackendFactory._create_backend)

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        upstream = DraftBackendFactory._create_backend

        def create(
            factory: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            if backend_name == "prefill_attention_backend":
                runner = factory.draft_model_runner
                backend_map = {
                    **backend_map,
                    "torch_native": lambda: ("torch_native", TorchNativeAttnBackend(runner)),
                }
            return upstream(factory, backend_name, backend_map, *args, **kwargs)

        # Replaces the method on the class.
        DraftBackendFactory._create_backend = create  # type: ignore[assignment, method-assign]
