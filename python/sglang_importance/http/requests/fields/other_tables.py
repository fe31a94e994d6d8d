"""What the bodies of the other routes that compute may hold, read by pydantic as those of OpenAI's are."""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields import sampling_table as sampling
from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.embedding_rules import override_lists
from sglang_importance.http.requests.fields.field import (
    Field,
    Table,
    anything,
    only_default,
    rows,
    same,
    text_only,
)
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
    **rows(
        _passed_on,
        "background include instructions metadata parallel_tool_calls reasoning service_tier store stream "
        "truncation",
    ),
    "input": Field(messages),
    "max_output_tokens": Field(integer(3, INT64)),  # sglang keeps two for itself
    "max_tool_calls": Field(integer(0, INT32)),
    "model": Field(base_model),
    **rows(Field(name), "previous_response_id user request_id session_id extra_key cache_salt"),
    "temperature": Field(sampling.temperature),
    **rows(_deep, "text tool_choice tools"),
    "top_logprobs": Field(top_logprobs),
    "top_p": Field(sampling.top_p),
    "chat_template_kwargs": _template,
    **same(
        GENERATE,
        "priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank "
        "data_parallel_rank",
    ),
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
    **rows(_deep, "system tools output_config"),
    **rows(_passed_on, "thinking tool_choice betas"),
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
    **same(GENERATE, "bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank"),
}

EMBEDDINGS: Table = {
    "input": Field(completion_prompt),
    **rows(Field(name), "model encoding_format user"),
    "dimensions": Field(integer(1, INT32)),
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
    **rows(_passed_on, "apply_softmax return_token_logprobs item_first return_pooled_hidden_states"),
    "temperature": Field(real(1e-6, 1e6)),
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
    **rows(
        _passed_on,
        "prompt tool_choice reasoning_effort continue_final_message add_special_tokens add_generation_prompt",
    ),
    "messages": Field(messages),
    "tools": _deep,
    "chat_template_kwargs": _template,
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
    **rows(_deep, "state images questions"),
    "model": Field(name),
    "chat_template_kwargs": _template,
    # Refused by sglang, by name.
    **rows(_passed_on, "temperature prompt_format_version return_prompt_token_ids"),
}

_OLLAMA_OPTIONS: Table = {
    **same(SAMPLING, "temperature top_p top_k stop presence_penalty frequency_penalty"),
    "num_predict": SAMPLING["max_new_tokens"],
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
    **rows(_passed_on, "stream keep_alive think"),
    "format": _deep,
    "options": Field(ollama_options),
}
OLLAMA_GENERATE: Table = {
    "model": Field(name),
    **rows(_passed_on, "prompt suffix system template context stream raw keep_alive think"),
    "format": _deep,
    "options": Field(ollama_options),
    "images": Field(text_only),
}


def _parameters(value: Any, server: ServerFacts) -> str | None:
    """Fields of ``GenerateReqInput``, checked as such behind sglang's own reading."""
    if unknown := next((each for each in value if each not in GENERATE or each in CLIENT_ONLY_DEFAULT), None):
        return f"has {shown(unknown)}, which is no field of a request: leave it out"
    return None


VERTEX: Table = {
    **rows(_passed_on, "instances rid http_worker_ipc"),
    "parameters": Field(_parameters),
}
