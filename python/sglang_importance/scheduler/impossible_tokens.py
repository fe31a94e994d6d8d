"""Rows of logits that allow no token: a grammar that has none to give, or rules that exclude each other.

A regular expression that is over and ``min_new_tokens`` that go on are enough. sglang draws from what such a
row's softmax makes of it, which is no probability, and its scheduler ends (``layers/sampler.py``:
``torch.multinomial``). Here every token of that row is as likely as any other: what is drawn is none of the
grammar's, at which sglang aborts this request and no other one (``Req.grammar.accept_token``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner._preprocess_logits"


def _around_preprocess(
    preprocess: Callable[..., Any],
    runner: Any,
    output: LogitsProcessorOutput,
    info: SamplingBatchInfo,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = preprocess(runner, output, info, *args, **kwargs)
    logits = output.next_token_logits
    if logits is not None and _excludes_tokens(info):
        allow_some_token(logits)
    return result


def _excludes_tokens(info: SamplingBatchInfo) -> bool:
    """Whether some request's rules have been at the logits: the others' are as the model made them."""
    penalties = info.penalizer_orchestrator
    return (
        bool(info.grammars)
        or info.logit_bias is not None
        or info.acc_additive_penalties is not None
        or bool(penalties and penalties.is_required)
    )


def allow_some_token(logits: torch.Tensor) -> None:
    """Makes rows without a finite largest logit uniform, in place and without waiting for the device.

    Args:
        logits: shape ``[requests, vocabulary]``.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    logits.masked_fill_(~torch.isfinite(largest), 0.0)


HOOKS: dict[str, Hook] = {TARGET: (_around_preprocess, HookType.AROUND)}
"""The hook in each scheduler."""
