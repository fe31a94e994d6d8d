"""Device memory for page scores, set aside before the KV pool takes what is left.

sglang sizes its KV pool from the memory that is free once the weights are loaded, and builds the attention
backend after that: what we allocate there would be missing when CUDA graphs are captured. On a CPU nothing is
set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import bytes_per_query
from sgl_importance_kernels.triton.paged_queries import observed_at_once
from sglang_importance.attention.decode_emission import MAX_EMITTED_BYTES
from sglang_importance.attention.layers import attention_layers, full_attention_layers, sampled_layers
from sglang_importance.attention.prefill_probe import MAX_LOG_SUMS_BYTES
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.source import CURE
from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import importance_options

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)

EXTRA_CONTEXT_TOKENS = 16
"""Room that upstream's request table has behind the longest context, at most."""


def score_bytes(
    options: ImportanceOptions,
    *,
    layers: int,
    heads: int,
    slots: int,
    max_context_tokens: int,
    page_size: int,
) -> int:
    """Bytes that the producer ``options.source`` allocates on the device, those of a prefill's pass included.

    Args:
        layers: sampled layers.
        heads: query heads of this rank.
        slots: rows of upstream's request table, its padding row included.
        max_context_tokens: tokens of such a row.
        page_size: tokens per page.
    """
    max_pages = -(-max_context_tokens // page_size)
    rows = len(Phase) * PageRows.bytes_needed(slots, max_pages)
    of_query = bytes_per_query(layers, heads, max_pages)
    prefill = min(MAX_LOG_SUMS_BYTES, slots * options.signal.window * of_query)
    observed = observed_at_once(slots, options.signal.interval)
    if options.source == "flashinfer":
        half_logits = min(MAX_EMITTED_BYTES, 2 * layers * heads * slots * max_context_tokens)
        decode = half_logits + 4 * layers * heads * slots + 2 * 4 * observed * max_pages
    else:
        header = of_query + 4 * layers * slots  # of ``DecodeLogSums``
        decode = max(of_query, min(MAX_EMITTED_BYTES, observed * of_query)) + header
    return int(rows + prefill + decode)


def _without_scores(
    profile: Callable[..., int], configurator: KVCacheConfigurator, pre_model_load_memory: int
) -> int:
    """Bytes that the KV pool may take, without those of the page scores.

    Raises:
        LaunchRefused: nothing would be left.
    """
    free = profile(configurator, pre_model_load_memory)
    options = importance_options(configurator.server_args)
    is_ours = options is not None and not configurator.is_draft_worker
    if options is None or not is_ours or torch.device(configurator.device).type == "cpu":
        return free
    layers = sampled_layers(full_attention_layers(configurator.model), options.signal.layers)
    # As many requests as a pool of all that memory would have: more than there will be.
    tokens = configurator.config_from_budget(free).max_total_num_tokens
    needed = score_bytes(
        options,
        layers=len(layers),
        heads=max(layer.tp_q_head_num for layer in attention_layers(configurator.model, layers)),
        slots=configurator.resolve_max_num_reqs(tokens) + 1,
        max_context_tokens=configurator.model_config.context_len + EXTRA_CONTEXT_TOKENS,
        page_size=configurator.page_size,
    )
    if needed >= free:
        raise LaunchRefused(
            [
                f"page scores need {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are left for the KV "
                "cache: lower --max-running-requests or --context-length, raise --mem-fraction-static, or "
                f"{CURE}"
            ]
        )
    logger.info("KV importance: Page scores: %.0f MiB set aside before the KV cache is sized", needed / 2**20)
    return free - needed


HOOKS: dict[str, Hook] = {
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": (
        _without_scores,
        HookType.AROUND,
    )
}
