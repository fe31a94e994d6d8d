"""The fields of every route that computes, from sglang's own classes: what odd requests are drawn from."""

from __future__ import annotations

import random

from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_importance.http.requests.fields.table_check import defaults_of

from support.odd_requests import OddRequests

CLASSES: dict[str, type] = {
    "/generate": GenerateReqInput,
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatCompletionRequest,
    "/v1/responses": protocol.ResponsesRequest,
    "/v1/messages": http_server.AnthropicMessagesRequest,
    "/v1/embeddings": protocol.EmbeddingRequest,
    "/v1/score": protocol.ScoringRequest,
    "/v1/rerank": protocol.V1RerankReqInput,
    "/encode": EmbeddingReqInput,
    "/classify": EmbeddingReqInput,
}


def seeded_odd_requests(seed: int, largest: int = 2) -> OddRequests:
    """Odd requests on all routes; the same seed makes the same ones beside the same sglang.

    Args:
        seed: of all of them.
        largest: number of odd fields in one, at most.
    """
    fields = {path: _annotations(kind) for path, kind in CLASSES.items()}
    return OddRequests(
        random.Random(seed), fields, _annotations(SamplingParams), vocabulary=1000, largest=largest
    )


def _annotations(kind: type) -> dict[str, str]:
    """Each field with its type as text."""
    known = {
        name: str(value)
        for each in reversed(kind.__mro__)
        for name, value in vars(each).get("__annotations__", {}).items()
    }
    return {name: known.get(name, "") for name in defaults_of(kind)}
