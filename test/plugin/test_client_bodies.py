"""What common clients send passes the check wherever sglang's own classes read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server

from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.body_check import check_body
from sglang_importance.http.requests.fields.server_facts import ServerFacts

SERVER = ServerFacts(vocabulary=1000, context_length=4096)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
CHAT: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "top_p": 1, "n": 2, "seed": 7, "user": "u", "max_completion_tokens": 5},
    {"temperature": 2, "stop": "x", "logit_bias": {"5": -100}, "presence_penalty": -2},
    {"stop": ["x", "y"], "logprobs": True, "top_logprobs": 20, "frequency_penalty": 2},
    {"stream": True, "stream_options": {"include_usage": True}, "reasoning_effort": "low"},
    {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "skip_special_tokens": False},
    {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    {"safety_identifier": "s", "verbosity": "low", "a_field_of_tomorrow": {"x": 1}},
    {"stop": None, "seed": None, "logit_bias": None, "tools": None, "max_tokens": None},
)
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("CompletionRequest", {"prompt": "a", "best_of": 2, "n": 2, "logprobs": 5, "echo": True, "suffix": ""}),
    ("CompletionRequest", {"prompt": [[1, 2], [3]], "max_tokens": 16, "stop": ["x"], "store": True}),
    ("ResponsesRequest", {"input": "a", "instructions": "b", "max_output_tokens": 16, "store": False}),
    (
        "ResponsesRequest",
        {"input": "a", "prompt_cache_key": "k", "safety_identifier": "s", "truncation": "auto"},
    ),
    (
        "AnthropicMessagesRequest",
        {
            "max_tokens": 5,
            "messages": [USER],
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
            "service_tier": "auto",
            "top_k": 5,
        },
    ),
    ("EmbeddingRequest", {"input": ["a", "b"], "encoding_format": "float", "user": "u"}),
    (
        "OllamaChatRequest",
        {
            "messages": [USER],
            "options": {"num_ctx": 4096, "temperature": 0.8, "top_k": 40},
            "keep_alive": "5m",
        },
    ),
)


@pytest.mark.parametrize("fields", CHAT, ids=[" ".join(fields)[:60] for fields in CHAT])
def test_chats_of_clients_pass(fields: dict[str, Any]):
    check_body(http_server.ChatCompletionRequest(model="default", messages=[USER], **fields), SERVER)


@pytest.mark.parametrize(
    ("kind", "fields"), OTHERS, ids=[f"{kind} {' '.join(fields)[:40]}" for kind, fields in OTHERS]
)
def test_other_bodies_of_clients_pass(kind: str, fields: dict[str, Any]):
    check_body(getattr(http_server, kind)(model="default", **fields), SERVER)


def test_a_template_is_taken_from_those_whom_the_server_trusts():
    brought = {"chat_template_kwargs": {"chat_template": "{{ messages }}"}}
    for kind, fields in (
        ("ResponsesRequest", {"input": "a"}),
        ("ChatCompletionRequest", {"messages": [USER]}),
    ):
        body = getattr(http_server, kind)(model="default", **fields, **brought)
        with pytest.raises(BadField, match=r"chat_template_kwargs.*--trust-request-chat-template"):
            check_body(body, SERVER)
        check_body(body, replace(SERVER, trusts_templates=True))
