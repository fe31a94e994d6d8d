"""Holds the body of a route's request, which FastAPI has read, against the table of its class."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.embedding_table import EMBEDDING
from sglang_importance.http.requests.fields.field import Table
from sglang_importance.http.requests.fields.generate_table import CLIENT_ONLY_DEFAULT, GENERATE
from sglang_importance.http.requests.fields.openai_tables import CHAT, COMPLETION
from sglang_importance.http.requests.fields.operator_tables import OPERATOR_TABLES
from sglang_importance.http.requests.fields.other_tables import (
    CLASSIFY,
    COUNT_TOKENS,
    DECISION,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RERANK,
    RESPONSES,
    SCORE,
    SYSTEM_ONE,
    TOKENIZE,
    VERTEX,
)
from sglang_importance.http.requests.fields.request_check import check_request
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.table_check import check_values, defaults_of
from sglang_importance.placement.prewarm_request import RID_PREFIX

TABLES: Mapping[str, Table] = {
    "GenerateReqInput": GENERATE,
    "EmbeddingReqInput": EMBEDDING,
    "VertexGenerateReqInput": VERTEX,
    "CompletionRequest": COMPLETION,
    "ChatCompletionRequest": CHAT,
    "ResponsesRequest": RESPONSES,
    "AnthropicMessagesRequest": MESSAGES,
    "AnthropicCountTokensRequest": COUNT_TOKENS,
    "EmbeddingRequest": EMBEDDINGS,
    "ClassifyRequest": CLASSIFY,
    "ScoringRequest": SCORE,
    "V1RerankReqInput": RERANK,
    "DecisionRequest": DECISION,
    "SystemOneRequest": SYSTEM_ONE,
    "TokenizeRequest": TOKENIZE,
    "DetokenizeRequest": DETOKENIZE,
    "OllamaChatRequest": OLLAMA_CHAT,
    "OllamaGenerateRequest": OLLAMA_GENERATE,
    **OPERATOR_TABLES,
}
"""By the name of sglang's class: a release without one of them needs no other import."""


def check_body(body: Any, server: ServerFacts, in_flight: Container[str] = ()) -> None:
    """Looks at what a client wrote.

    Args:
        body: an instance of one of the classes of ``TABLES``.
        server: what it can do.
        in_flight: ids of requests that are not answered yet.

    Raises:
        BadField: this server cannot take it.
    """
    kind: type = type(body)
    if isinstance(body, GenerateReqInput | EmbeddingReqInput):
        defaults = defaults_of(kind)
        for name in CLIENT_ONLY_DEFAULT & defaults.keys():
            if getattr(body, name) != defaults[name]:
                raise BadField(name, "sglang sets it itself: leave it out")
        check_ids_of_clients(body.rid)
        check_request(body, server, in_flight)
        return
    if kind.__name__ not in OPERATOR_TABLES:
        check_ids_of_clients(getattr(body, "rid", None))
    given = getattr(body, "model_fields_set", None) or defaults_of(kind)
    values = ((name, getattr(body, name)) for name in given)
    check_values(values, TABLES[kind.__name__], defaults_of(kind), server, prompts=_num_prompts(body))


RESERVED = (HEALTH_CHECK_PREFIX, RID_PREFIX)


def check_ids_of_clients(rid: Any) -> None:
    """sglang drops a health check where a request runs: a client with such an id would wait for ever."""
    for each in rid if isinstance(rid, list) else [rid]:
        if isinstance(each, str) and each.startswith(RESERVED):
            raise BadField(
                "rid", f"begins as ids of the server's own requests do ({RESERVED[0]}...): give another"
            )


def _num_prompts(body: Any) -> int | None:
    prompt = getattr(body, "prompt", None) or getattr(body, "input", None)
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return None
    return len(prompt) if isinstance(prompt[0], str | list) else None
