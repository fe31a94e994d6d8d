"""What a request of sglang's holds, in the form that other threads take."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import Req

from sgl_importance.observe.trace.token_sequence import TokenSequence


def prompt_of(req: Req) -> TokenSequence:
    return _sequence(req, req.origin_input_ids)


def prompt_and_output_of(req: Req) -> TokenSequence:
    return _sequence(req, req.origin_input_ids + req.output_ids)


def _sequence(req: Req, tokens: Sequence[int]) -> TokenSequence:
    return TokenSequence((req.extra_key, req.cache_salt), tokens)
