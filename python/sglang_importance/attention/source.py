"""The common start of every source of page scores: refusals, sampled layers, rows, sampler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.attention.layers import (
    attention_layers,
    full_attention_layers,
    has_temperature,
    sampled_layers,
)
from sglang_importance.attention.rows import ScoreRows
from sglang_importance.attention.sampling import StepSampler

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

CURE = "start with --kv-importance-source none"
NO_POLICY = "start with --kv-policy default"  # where the tree refuses the model too


@dataclass(frozen=True, slots=True)
class ScoreSource:
    """The sampled layers of a model, and the rows that their scores go to."""

    layers: tuple[int, ...]
    rows: ScoreRows
    sampler: StepSampler


def refuse_unsupported(model_runner: ModelRunner) -> None:
    """Refuses models whose logits are not what the queries and the keys in the pool say.

    Latent attention is refused to producers that do not read latents before the model is loaded.

    Raises:
        ValueError: encoder-decoder models, and logits with a temperature by the query's position.
    """
    if model_runner.model_config.is_encoder_decoder:
        raise ValueError(f"page scores of encoder-decoder models are not supported: {NO_POLICY}")
    if any(has_temperature(layer) for layer in attention_layers(model_runner.model)):
        raise ValueError(f"page scores of logits with a temperature by length are not supported: {CURE}")


def softmax_backend(model_runner: ModelRunner) -> AttentionBackend:
    """The attention backend whose queries read keys: where layers have linear attention too, a part of it."""
    backend = model_runner.attn_backend
    softmax: AttentionBackend = getattr(backend, "full_attn_backend", backend)
    return softmax


def request_table(pool: ReqToTokenPool | None) -> torch.Tensor:
    """Locations in the KV pool by request slot and position, int32 [num_slots, max_context_tokens]."""
    assert pool is not None, "sglang makes the pools before the attention backend"
    return pool.req_to_token


def opened_source(model_runner: ModelRunner, options: ImportanceOptions) -> ScoreSource:
    """Chooses the layers and allocates the rows.

    Raises:
        ValueError: the options name layers that cannot be sampled, or the rows would not fit.
    """
    layers = sampled_layers(full_attention_layers(model_runner.model), options.signal.layers)
    num_slots, max_context_tokens = request_table(model_runner.req_to_token_pool).shape
    rows = ScoreRows(
        page_size=model_runner.page_size or 1,
        num_slots=num_slots,
        max_context_tokens=max_context_tokens,
        device=model_runner.device,
        layers=layers,
    )
    logger.info(
        "KV importance: Page scores from layers %s, every %d decode steps and the last %d prompt tokens",
        list(layers),
        options.signal.interval,
        options.signal.window,
    )
    return ScoreSource(layers, rows, StepSampler(rows, options))
