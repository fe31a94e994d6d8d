"""What a request for an answer may hold: sglang's ``GenerateReqInput`` (``managers/io_struct.py``).

Every route that generates, and every engine, ends in one.
"""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields.embedding_rules import embeddings, overrides
from sglang_importance.http.requests.fields.field import (
    Field,
    Rule,
    Table,
    anything,
    needs,
    one_of,
    only_default,
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
from sglang_importance.http.requests.fields.refusal import shown
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
    "session_id": Field(name),
    "text": Field(prompt_text, is_per_prompt=True),
    "input_ids": Field(prompt_ids, is_per_prompt=True, is_list=True),
    "input_embeds": Field(embeddings, is_per_prompt=True, is_list=True),
    "image_data": Field(text_only),
    "video_data": Field(text_only),
    "audio_data": Field(text_only),
    "mm_hashes": Field(text_only),
    "mm_content_hashes": Field(text_only),
    "mm_processor_kwargs": Field(text_only),
    "use_audio_in_video": Field(text_only),
    "video_config": Field(text_only),
    "modalities": Field(text_only),
    "max_dynamic_patch": Field(text_only),
    "min_dynamic_patch": Field(text_only),
    "image_max_dynamic_patch": Field(text_only),
    "video_max_dynamic_patch": Field(text_only),
    "images_config": Field(text_only),
    "sampling_params": Field(anything),  # a table of its own
    "return_logprob": Field(yes_or_no, is_per_prompt=True),
    "logprob_start_len": Field(within_context(-1), is_per_prompt=True),
    "top_logprobs_num": Field(top_logprobs, is_per_prompt=True),
    "token_ids_logprob": Field(token_list, is_per_prompt=True, is_list=True),
    "return_sampling_mask": Field(yes_or_no, is_per_prompt=True),
    "sampling_logprobs_mode": Field(logprobs_mode, is_per_prompt=True, is_null_in_lists=True),
    "return_text_in_logprobs": Field(yes_or_no),
    "return_flat_raw_top_logprobs": Field(yes_or_no),
    "return_flat_raw_top_logprobs_b64": Field(yes_or_no),
    "return_flat_raw_output_top_logprobs": Field(yes_or_no),
    "stream": Field(yes_or_no),
    "log_metrics": Field(yes_or_no),
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
    "routing_key": Field(name),
    "conversation_id": Field(name),
    "http_worker_ipc": Field(_not_from_requests),
    "background": Field(yes_or_no),
    "require_reasoning": Field(yes_or_no),
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
    "no_logs": Field(yes_or_no),
    "custom_labels": Field(metric_labels),
    "return_bytes": Field(yes_or_no),
    "return_entropy": Field(yes_or_no),
    "return_prompt_token_ids": Field(yes_or_no),
    "external_trace_header": Field(
        needs(lambda server: server.is_traced, "the server is not traced (--enable-trace)", text_map)
    ),
    "received_time": Field(real(0, 1e12)),
    "need_wait_for_mm_inputs": Field(_not_from_requests),
    "num_items_assigned": Field(_not_from_requests),
    "encoder_urls": Field(_not_from_requests),
    "multi_item_delimiter_indices": Field(scored_positions, is_per_prompt=True, is_list=True),
    "token_indices_to_pool": Field(positions, is_per_prompt=True, is_list=True),
    "watermark": Field(watermark),
}

CLIENT_ONLY_DEFAULT = frozenset(
    {"received_time", "multi_item_delimiter_indices", "token_indices_to_pool", "external_trace_header"}
)
"""What sglang's own routes and engines send through, and a request body must not set."""
