"""How sure a model is of the tokens that follow steps which read chosen pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_importance.pages.pool import TieredKVPool
from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

SAMPLE_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.sample"


def _around_sample(
    sample: Callable[..., torch.Tensor],
    runner: ModelRunner,
    logits_output: LogitsProcessorOutput,
    forward_batch: ForwardBatch,
) -> torch.Tensor:
    pool = runner.token_to_kv_pool
    if isinstance(pool, TieredKVPool) and pool.selections is not None and forward_batch.rids:
        # Before sampling, which changes logits in place: what the model said, at temperature 1.
        logits = logits_output.next_token_logits
        assert logits is not None
        confidences = logits.float().softmax(dim=-1).amax(dim=-1).tolist()
        lengths = forward_batch.seq_lens.tolist()
        for rid, length, confidence in zip(forward_batch.rids, lengths, confidences, strict=False):
            pool.selections.of(rid).trail.sampled(length - 1, confidence)
    return sample(runner, logits_output, forward_batch)


HOOKS: dict[str, Hook] = {SAMPLE_TARGET: (_around_sample, HookType.AROUND)}
"""The hook in a scheduler that tells requests how sure the model was of their tokens."""
