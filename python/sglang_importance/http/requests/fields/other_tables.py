"""What the bodies of the other routes that compute may hold, read by pydantic as those of OpenAI's are."""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields import sampling_table as sampling
from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.embedding_rules import override_lists
from sglang_importance.http.requests.fields.field import Field, Table, anything, only_default, text_only
from sglang_importance.http.requests.fields.generate_table import CLIENT_ONLY_DEFAULT, GENERATE
from sglang_importance.http.requests.fields.number_rules import (
    INT32,
    INT64,
    integer,
    real,
    top_k,
    top_logprobs,
)
from sglang_importance.http.requests.fields.openai_tables import (
    completion_prompt,
    messages,
    plain_levels,
    template_arguments,
)
from sglang_importance.http.requests.fields.sampling_table import SAMPLING
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import name
from sglang_importance.http.requests.fields.token_rules import token_id, token_list

_passed_on = Field(anything)
_deep = Field(plain_levels)
_template = Field(template_arguments)


def base_model(value: Any, server: ServerFacts) -> str | None:
    """Of routes on which sglang reads no adapter out of ``base:adapter``, and computes without it."""
    if server.has_lora and isinstance(value, str) and ":" in value:
        return f"{shown(value)} names an adapter, and this route computes without: use /v1/chat/completions"
    return name(value, server)


RESPONSES: Table = {
    "background": _passed_on,
    "include": _passed_on,
    "input": Field(messages),
    "instructions": _passed_on,
    "max_output_tokens": Field(integer(3, INT64)),  # sglang keeps two for itself
    "max_tool_calls": Field(integer(0, INT32)),
    "metadata": _passed_on,
    "model": Field(base_model),
    "parallel_tool_calls": _passed_on,
    "previous_response_id": Field(name),
    "reasoning": _passed_on,
    "service_tier": _passed_on,
    "store": _passed_on,
    "stream": _passed_on,
    "temperature": Field(sampling.temperature),
    "text": _deep,
    "tool_choice": _deep,
    "tools": _deep,
    "top_logprobs": Field(top_logprobs),
    "top_p": Field(sampling.top_p),
    "truncation": _passed_on,
    "user": Field(name),
    "chat_template_kwargs": _template,
    "request_id": Field(name),
    "session_id": Field(name),
    "priority": GENERATE["priority"],
    "extra_key": Field(name),
    "cache_salt": Field(name),
    "bootstrap_host": GENERATE["bootstrap_host"],
    "bootstrap_port": GENERATE["bootstrap_port"],
    "bootstrap_room": GENERATE["bootstrap_room"],
    "routed_dp_rank": GENERATE["routed_dp_rank"],
    "disagg_prefill_dp_rank": GENERATE["disagg_prefill_dp_rank"],
    "data_parallel_rank": GENERATE["data_parallel_rank"],
    "frequency_penalty": Field(sampling.penalty),
    "presence_penalty": Field(sampling.penalty),
    "stop": Field(sampling.stops),
    "top_k": Field(top_k),
    "min_p": Field(sampling.min_p),
    "repetition_penalty": Field(sampling.repetition_penalty),
}

COUNT_TOKENS: Table = {
    "model": Field(name),
    "messages": Field(messages),
    "system": _deep,
    "thinking": _passed_on,
    "tool_choice": _passed_on,
    "tools": _deep,
    "output_config": _deep,
    "betas": _passed_on,
}

MESSAGES: Table = {
    **COUNT_TOKENS,
    "max_tokens": Field(integer(1, INT64)),
    "metadata": _passed_on,
    "stop_sequences": Field(sampling.stops),
    "stream": _passed_on,
    "temperature": Field(sampling.temperature),
    "top_k": Field(top_k),
    "top_p": Field(sampling.top_p),
    "bootstrap_host": GENERATE["bootstrap_host"],
    "bootstrap_port": GENERATE["bootstrap_port"],
    "bootstrap_room": GENERATE["bootstrap_room"],
    "routed_dp_rank": GENERATE["routed_dp_rank"],
    "disagg_prefill_dp_rank": GENERATE["disagg_prefill_dp_rank"],
}

EMBEDDINGS: Table = {
    "input": Field(completion_prompt),
    "model": Field(name),
    "encoding_format": Field(name),
    "dimensions": Field(integer(1, INT32)),
    "user": Field(name),
    "rid": _passed_on,
    "priority": GENERATE["priority"],
    "lora_path": GENERATE["lora_path"],
    "embed_override_token_id": Field(token_id),
    "embed_overrides": Field(override_lists),
}

CLASSIFY: Table = {field: EMBEDDINGS[field] for field in ("input", "model", "user", "rid", "priority")}


def labels(value: Any, server: ServerFacts) -> str | None:
    """Token ids whose probabilities are scores, of all items or of each."""
    lists = value if value and isinstance(value[0], list) else [value]
    return next((problem for each in lists if (problem := token_list(each, server))), None)


def token_list_or_text(value: Any, server: ServerFacts) -> str | None:
    """Part of a prompt: a text, or token ids, each of which the model has; or several of either."""
    if not isinstance(value, list) or not value or isinstance(value[0], str):
        return None
    return completion_prompt(value, server)


SCORE: Table = {
    "query": Field(token_list_or_text),
    "items": Field(token_list_or_text),
    "embed_override_token_id": Field(token_id),
    "query_embed_overrides": Field(override_lists),
    "item_embed_overrides": Field(override_lists),
    "label_token_ids": Field(labels),
    "apply_softmax": _passed_on,
    "temperature": Field(real(1e-6, 1e6)),
    "return_token_logprobs": _passed_on,
    "item_first": _passed_on,
    "return_pooled_hidden_states": _passed_on,
    "score_extraction_token": Field(name),
    "model": Field(base_model),
}

RERANK: Table = {
    "query": _deep,
    "documents": _deep,
    "instruct": _passed_on,
    "top_n": Field(integer(1, INT64)),
    "return_documents": _passed_on,
}

TOKENIZE: Table = {
    "model": Field(name),
    "prompt": _passed_on,
    "messages": Field(messages),
    "tools": _deep,
    "tool_choice": _passed_on,
    "reasoning_effort": _passed_on,
    "continue_final_message": _passed_on,
    "chat_template_kwargs": _template,
    "add_special_tokens": _passed_on,
    "add_generation_prompt": _passed_on,
}

DETOKENIZE: Table = {
    "model": Field(name),
    "tokens": Field(completion_prompt),
    "skip_special_tokens": _passed_on,
}

DECISION: Table = {
    "input": _passed_on,
    "questions": _deep,
    "images": _deep,
    "temperature": Field(real(1e-6, 1e6)),
    "chat_template_kwargs": _template,
    "prompt_format_version": Field(integer(-INT32, INT32)),
    "return_prompt_token_ids": _passed_on,
    "model": Field(name),
}

SYSTEM_ONE: Table = {
    "state": _deep,
    "images": _deep,
    "model": Field(name),
    "questions": _deep,
    "chat_template_kwargs": _template,
    # Refused by sglang, by name.
    "temperature": _passed_on,
    "prompt_format_version": _passed_on,
    "return_prompt_token_ids": _passed_on,
}

_OLLAMA_OPTIONS: Table = {
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "num_predict": SAMPLING["max_new_tokens"],
    "stop": SAMPLING["stop"],
    "presence_penalty": SAMPLING["presence_penalty"],
    "frequency_penalty": SAMPLING["frequency_penalty"],
    "seed": Field(only_default("sglang passes on under a name that its own sampling does not know")),
}
"""What sglang takes of them; it drops the others."""


def ollama_options(value: Any, server: ServerFacts) -> str | None:
    """Options of Ollama's, each of which becomes a sampling parameter."""
    for option, inner in value.items():
        row = _OLLAMA_OPTIONS.get(option)
        if row is not None and (problem := row.rule(inner, server)):
            return f"has {option}, which {problem}"
    return plain_levels(value, server)


OLLAMA_CHAT: Table = {
    "model": Field(name),
    "messages": Field(messages),
    "stream": _passed_on,
    "format": _deep,
    "options": Field(ollama_options),
    "keep_alive": _passed_on,
    "think": _passed_on,
}
OLLAMA_GENERATE: Table = {
    "model": Field(name),
    "prompt": _passed_on,
    "suffix": _passed_on,
    "system": _passed_on,
    "template": _passed_on,
    "context": _passed_on,
    "stream": _passed_on,
    "raw": _passed_on,
    "format": _deep,
    "options": Field(ollama_options),
    "keep_alive": _passed_on,
    "images": Field(text_only),
    "think": _passed_on,
}


def _parameters(value: Any, server: ServerFacts) -> str | None:
    """Fields of ``GenerateReqInput``, checked as such behind sglang's own reading."""
    if unknown := next((each for each in value if each not in GENERATE or each in CLIENT_ONLY_DEFAULT), None):
        return f"has {shown(unknown)}, which is no field of a request: leave it out"
    return None


VERTEX: Table = {
    "instances": _passed_on,
    "parameters": Field(_parameters),
    "rid": _passed_on,
    "http_worker_ipc": _passed_on,
}
