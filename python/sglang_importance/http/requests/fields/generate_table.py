"""What a request for an answer may hold: sglang's ``GenerateReqInput`` (``managers/io_struct.py``).

Every route that generates, and every engine, ends in one.
"""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.embedding_rules import embeddings, overrides
from sglang_importance.http.requests.fields.field import (
    Field,
    Rule,
    Table,
    anything,
    needs,
    one_of,
    only_default,
    rows,
    text_only,
    yes_or_no,
)
from sglang_importance.http.requests.fields.number_rules import (
    INT32,
    INT64,
    data_rank,
    integer,
    real,
    top_logprobs,
    within_context,
)
from sglang_importance.http.requests.fields.object_rules import fields_of, logit_processor
from sglang_importance.http.requests.fields.sampling_table import watermark
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import metric_labels, name, prompt_text, text_map
from sglang_importance.http.requests.fields.token_rules import positions, prompt_ids, token_list

NO_LORA = "the server has no adapters (--enable-lora)"
NO_EXPERTS = "the server keeps no routes of experts (--enable-return-routed-experts)"
NO_PARTS = "the server does not answer in parts (--disaggregation-mode)"
NO_PROCESSORS = "the server runs no such code (--enable-custom-logit-processor)"


def hidden_states(value: Any, server: ServerFacts) -> str | None:
    """Which hidden states an answer brings."""
    if value is False:
        return None
    if value is not True and value != "last":
        return f'must be true, false or "last", not {shown(value)}'
    if server.hidden_states == "full" or value == server.hidden_states:
        return None
    return "the server returns none such (--return-hidden-states-mode): leave it out"


def _in_parts(rule: Rule) -> Rule:
    return needs(lambda server: server.is_disaggregated, NO_PARTS, rule)


lora_path = needs(lambda server: server.has_lora, NO_LORA, name)
custom_logit_processor = needs(lambda server: server.has_custom_processors, NO_PROCESSORS, logit_processor)
return_routed_experts = needs(lambda server: server.returns_experts, NO_EXPERTS, yes_or_no)
routed_experts_start_len = needs(lambda server: server.returns_experts, NO_EXPERTS, within_context(0))
priority = integer(-INT64, INT64)
logprobs_mode = one_of("selected", "support")
session_params = fields_of(
    {
        "id": Field(name),
        "rid": Field(name),
        "offset": Field(within_context(0)),
        "replace": Field(yes_or_no),
        "drop_previous_output": Field(yes_or_no),
    }
)
bootstrap_host = _in_parts(name)
bootstrap_port = _in_parts(integer(0, 65_535))
bootstrap_room = _in_parts(integer(0, INT64))
bootstrap_rank = _in_parts(integer(0, INT32))
scored_positions = needs(
    lambda server: server.has_multi_item_scoring,
    "the server does not score several items at once (--enable-mis)",
    positions,
)
_not_from_requests = only_default("sglang sets it itself")

GENERATE: Table = {
    "rid": Field(anything),  # of one prompt, of a batch, of samples: request_names.py
    **rows(Field(name), "session_id routing_key conversation_id"),
    "text": Field(prompt_text, is_per_prompt=True),
    "input_ids": Field(prompt_ids, is_per_prompt=True, is_list=True),
    "input_embeds": Field(embeddings, is_per_prompt=True, is_list=True),
    **rows(
        Field(text_only),
        "image_data video_data audio_data mm_hashes mm_content_hashes mm_processor_kwargs use_audio_in_video "
        "video_config modalities max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
        "video_max_dynamic_patch images_config",
    ),
    "sampling_params": Field(anything),  # a table of its own
    "return_logprob": Field(yes_or_no, is_per_prompt=True),
    "logprob_start_len": Field(within_context(-1), is_per_prompt=True),
    "top_logprobs_num": Field(top_logprobs, is_per_prompt=True),
    "token_ids_logprob": Field(token_list, is_per_prompt=True, is_list=True),
    "return_sampling_mask": Field(yes_or_no, is_per_prompt=True),
    "sampling_logprobs_mode": Field(logprobs_mode, is_per_prompt=True, is_null_in_lists=True),
    **rows(
        Field(yes_or_no),
        "return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 "
        "return_flat_raw_output_top_logprobs stream log_metrics background require_reasoning no_logs "
        "return_bytes return_entropy return_prompt_token_ids",
    ),
    "return_hidden_states": Field(hidden_states, is_per_prompt=True),
    "return_routed_experts": Field(return_routed_experts),
    "routed_experts_start_len": Field(routed_experts_start_len),
    "return_indexer_topk": Field(
        needs(
            lambda server: server.returns_indexer,
            "the server keeps none (--enable-return-indexer-topk)",
            yes_or_no,
        )
    ),
    "session_params": Field(session_params),
    "lora_path": Field(lora_path, is_per_prompt=True, is_null_in_lists=True),
    "lora_id": Field(only_default("sglang finds it by lora_path")),
    "custom_logit_processor": Field(custom_logit_processor, is_per_prompt=True, is_null_in_lists=True),
    "positional_embed_overrides": Field(overrides, is_per_prompt=True, is_null_in_lists=True),
    "bootstrap_host": Field(bootstrap_host, is_per_prompt=True, is_null_in_lists=True),
    "bootstrap_port": Field(bootstrap_port, is_per_prompt=True, is_null_in_lists=True),
    "bootstrap_room": Field(bootstrap_room, is_per_prompt=True, is_null_in_lists=True),
    "bootstrap_pair_key": Field(_in_parts(name), is_per_prompt=True, is_null_in_lists=True),
    "decode_tp_size": Field(bootstrap_rank, is_per_prompt=True, is_null_in_lists=True),
    "disagg_prefill_dp_rank": Field(bootstrap_rank),
    "routed_dp_rank": Field(data_rank),
    "data_parallel_rank": Field(data_rank),
    **rows(
        Field(_not_from_requests),
        "http_worker_ipc need_wait_for_mm_inputs num_items_assigned encoder_urls",
    ),
    "max_thinking_tokens": Field(
        needs(
            lambda server: server.has_strict_thinking,
            "the server does not count them (--enable-strict-thinking)",
            integer(0, INT32),
        )
    ),
    "priority": Field(priority),
    "extra_key": Field(name, is_per_prompt=True),
    "cache_salt": Field(name, is_per_prompt=True),
    "kv_hints": Field(anything),  # hints/hints.py
    "custom_labels": Field(metric_labels),
    "external_trace_header": Field(
        needs(lambda server: server.is_traced, "the server is not traced (--enable-trace)", text_map)
    ),
    "received_time": Field(real(0, 1e12)),
    "multi_item_delimiter_indices": Field(scored_positions, is_per_prompt=True, is_list=True),
    "token_indices_to_pool": Field(positions, is_per_prompt=True, is_list=True),
    "watermark": Field(watermark),
}

CLIENT_ONLY_DEFAULT = frozenset(
    {"received_time", "multi_item_delimiter_indices", "token_indices_to_pool", "external_trace_header"}
)
"""What sglang's own routes and engines send through, and a request body must not set."""
