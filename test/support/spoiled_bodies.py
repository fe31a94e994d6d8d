"""Bodies that use what each route can do, spoiled at places anywhere inside: seeded."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from support.odd_requests import OddRequest, value_of

_FEW = {"max_new_tokens": 3, "temperature": 0}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
_TOOL = {"name": "look", "description": "looks", "parameters": _SCHEMA}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": "b"}'}}
_TEXTS = [{"type": "text", "text": "Alice copper."}, {"type": "text", "text": "Bruno lantern."}]
_CHAT = [
    {"role": "system", "content": "Clara marble."},
    {"role": "user", "content": _TEXTS},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ladder"},
    {"role": "user", "content": "Question: Bruno"},
]
_ENVELOPE = {
    "protocol_version": "1",
    "message_id": "m1",
    "actions": [
        {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1", "payload": {"tokens": 16}},
        {"action_id": "2", "action_type": "kv.demote", "action_version": "1", "payload": {}},
        {
            "action_id": "4",
            "action_type": "kv.retain",
            "action_version": "1.0",
            "payload": {"directives": [{"start": 0, "end": 16, "priority": 5, "duration": 1}]},
        },
        {
            "action_id": "3",
            "action_type": "sgl_importance.retain",
            "action_version": "1",
            "payload": {"ttl_seconds": 1},
        },
    ],
}
_HINTS = {
    "report": True,
    "retain": {"ttl_seconds": 1, "tokens": 16},
    "block_types": [{"type": "document", "tokens": [0, 8]}],
    "answer_end": "tool_call",
    "budget": 0.5,
}
_SALTED = {"cache_salt": "tenant a", "extra_key": "key", "session_id": "s1"}
_MODEL = {"model": "default"}
_OLLAMA = {"options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "top_k": 5}, "stream": False}

BODIES: tuple[tuple[str, Any], ...] = (
    (
        "/generate",
        {
            "input_ids": [[20, 30, 40], [21, 31]],
            "sampling_params": [{**_FEW, "stop": ["x"], "n": 1}, {**_FEW, "logit_bias": {"7": 1.0}}],
            "rid": ["a1", "b1"],
            "return_logprob": [True, False],
            "top_logprobs_num": [2, 0],
            "logprob_start_len": [0, -1],
            "token_ids_logprob": [[5, 6], None],
            "extra_key": ["k", "l"],
            "lora_path": [None, None],
        },
    ),
    ("/generate", {"text": "Alice copper.", "sampling_params": _FEW, "kv_hints": _HINTS, **_SALTED}),
    ("/generate", {"text": "Alice copper.", "sampling_params": _FEW, "kv_hints": _ENVELOPE}),
    ("/generate", {"text": "Alice", "sampling_params": {**_FEW, "n": 2}, "stream": True}),
    (
        "/generate",
        {
            "text": "Alice",
            "sampling_params": {
                **_FEW,
                "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
                "custom_params": {"a": [1, "b"]},
                "stop_regex": ["a+"],
                "min_new_tokens": 1,
                "stop_token_ids": [5],
            },
        },
    ),
    (
        "/v1/completions",
        {**_MODEL, "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": True, "n": 2},
    ),
    (
        "/v1/completions",
        {
            **_MODEL,
            "prompt": [[20, 30], [40]],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
            **_SALTED,
        },
    ),
    (
        "/v1/chat/completions",
        {
            **_MODEL,
            "messages": _CHAT,
            "max_tokens": 3,
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "metadata": {"cache_salt": "tenant b", "kv_hints": '{"report": true}'},
        },
    ),
    (
        "/v1/chat/completions",
        {
            **_MODEL,
            "messages": _CHAT,
            "max_tokens": 3,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
            "chat_template_kwargs": {"enable_thinking": False},
            "kv_hints": _HINTS,
            "stop": ["a"],
            "logit_bias": {"7": 2},
        },
    ),
    (
        "/v1/chat/completions",
        {
            **_MODEL,
            "messages": _CHAT,
            "max_tokens": 3,
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": _SCHEMA, "end": "</a>"}],
                "triggers": ["<a>"],
            },
        },
    ),
    (
        "/v1/responses",
        {
            **_MODEL,
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Alice"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"type": "reasoning", "summary": [], "id": "r"},
            ],
            "max_output_tokens": 5,
            "tools": [{"type": "function", **_TOOL}],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
            "previous_response_id": "resp_1",
            "include": ["reasoning.encrypted_content"],
            "store": False,
            **_SALTED,
        },
    ),
    (
        "/v1/responses",
        {**_MODEL, "input": "Alice", "max_output_tokens": 4, "stream": True, "kv_hints": _HINTS},
    ),
    (
        "/v1/messages",
        {
            **_MODEL,
            "max_tokens": 3,
            "system": [
                {"type": "text", "text": "Clara.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
            ],
            "messages": [
                {"role": "user", "content": _TEXTS},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": "y"},
                        {"type": "tool_use", "id": "t", "name": "look", "input": {"a": "b"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "text", "text": "x"}],
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                },
            ],
            "tools": [{"name": "look", "description": "x", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
            **_SALTED,
        },
    ),
    (
        "/v1/messages/count_tokens",
        {**_MODEL, "system": "x", "messages": [{"role": "user", "content": _TEXTS}], "tools": []},
    ),
    (
        "/v1/score",
        {
            **_MODEL,
            "query": "Alice",
            "items": ["copper", "marble"],
            "label_token_ids": [9, 10],
            "apply_softmax": True,
            "item_first": False,
        },
    ),
    (
        "/v1/rerank",
        {"query": "Alice", "documents": ["copper", "marble"], "top_n": 1, "return_documents": True},
    ),
    ("/v1/embeddings", {**_MODEL, "input": ["a", "b"], "dimensions": 8, "encoding_format": "float"}),
    ("/v1/classify", {**_MODEL, "input": ["a", "b"]}),
    ("/api/chat", {**_MODEL, "messages": [{"role": "user", "content": "Alice"}], **_OLLAMA}),
    ("/api/chat", {**_MODEL, "messages": [{"role": "user", "content": "a"}], **_OLLAMA, "stream": True}),
    ("/api/generate", {**_MODEL, "prompt": "Alice", "system": "x", "format": "json", **_OLLAMA}),
    ("/api/show", {"model": "default"}),
    ("/vertex_generate", {"instances": [{"text": "Alice"}], "parameters": {"sampling_params": _FEW}}),
    ("/vertex_generate", {"instances": [{"input_ids": [20, 30]}], "parameters": {"sampling_params": _FEW}}),
    ("/invocations", {**_MODEL, "messages": _CHAT, "max_tokens": 3, **_SALTED}),
    ("/tokenize", {**_MODEL, "prompt": ["a", "b"], "add_special_tokens": True}),
    ("/v1/tokenize", {**_MODEL, "messages": _CHAT, "tools": [{"type": "function", "function": _TOOL}]}),
    ("/detokenize", {**_MODEL, "tokens": [[20, 30], [40]], "skip_special_tokens": True}),
    ("/open_session", {"capacity_of_str_len": 1000, "session_id": "t1", "streaming": False, "timeout": 1.0}),
    ("/close_session", {"session_id": "s1", "cache_salt": "tenant a", "at_once": True}),
    ("/abort_request", {"rid": "nobody", "abort_all": False}),
    ("/parse_function_call", {"text": "x", "tool_call_parser": "qwen25", "tools": [{"function": _TOOL}]}),
    ("/separate_reasoning", {"text": "x", "reasoning_parser": "qwen3"}),
    ("/kv_importance/pin", {"text": "Alice copper. " * 20, "ttl_seconds": 1, "cache_salt": "a"}),
    ("/kv_importance/unpin", {"pin_id": "x"}),
    ("/kv_importance/find", {"messages": _CHAT, "cache_salt": "a"}),
    ("/kv_importance/why", {"messages": _CHAT, "extra_key": "a"}),
    ("/kv_importance/why", {"input_ids": [20, 30, 40] * 20, "cache_salt": "tenant a"}),
    ("/kv_importance/importance", {"keys": ["0" * 32]}),
    ("/kv_importance/prewarm", {"text": "Alice copper. " * 20, "max_seconds": 0.01}),
)
"""Of every route that takes a body and leaves the server as it is."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


class SpoiledBodies:
    """Makes them.

    Args:
        rng: seeded by the caller.
        largest: number of places that are spoiled at once, at most.
    """

    def __init__(self, rng: random.Random, largest: int = 3) -> None:
        self._rng = rng
        self._largest = largest

    def next(self) -> OddRequest:
        rng = self._rng
        path, good = rng.choice(BODIES)
        body = copy.deepcopy(good)
        odd = tuple(self._spoil(body) for _ in range(rng.randint(1, self._largest)))
        return OddRequest(path, body, odd)

    def _spoil(self, body: Any) -> str:
        rng = self._rng
        *way, last = rng.choice(list(_places(body)) or [("",)])
        holder = body
        for key in way:
            holder = holder[key]
        kind = rng.random()
        if kind < 0.15 and last in _keys(holder):
            del holder[last]
        elif kind < 0.25 and isinstance(holder, dict):
            _, other = rng.choice(BODIES)  # a field of another route, or of another place
            name = rng.choice(list(other))
            holder[name] = copy.deepcopy(other[name])
        elif last not in _keys(holder):  # of a body of which nothing is left
            holder[last] = value_of(rng)
        elif kind < 0.35:
            holder[last] = [holder[last]] * rng.randint(1, 3)
        elif kind < 0.4:
            holder[last] = {"type": "text", "text": holder[last]}
        else:
            holder[last] = value_of(rng)
        return ".".join(map(str, (*way, last)))


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))
