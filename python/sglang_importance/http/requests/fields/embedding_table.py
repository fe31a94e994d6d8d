"""What a request for an embedding or a score may hold: sglang's ``EmbeddingReqInput``."""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields.embedding_rules import override_lists, overrides
from sglang_importance.http.requests.fields.field import Field, Table, yes_or_no
from sglang_importance.http.requests.fields.generate_table import GENERATE
from sglang_importance.http.requests.fields.number_rules import INT32, integer
from sglang_importance.http.requests.fields.refusal import shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import prompt_text
from sglang_importance.http.requests.fields.token_rules import positions, token_id

_SHARED = (
    *("rid", "input_ids", "input_embeds", "image_data", "video_data", "audio_data", "sampling_params"),
    *("log_metrics", "modalities", "lora_path", "lora_id", "routing_key", "http_worker_ipc", "background"),
    *("priority", "return_prompt_token_ids", "external_trace_header", "received_time"),
    *("multi_item_delimiter_indices", "token_indices_to_pool"),
)


def _text_or_pair(value: Any, server: ServerFacts) -> str | None:
    """A text, or a question and a document for a model that reads both."""
    if isinstance(value, list | tuple):
        if not value:
            return f"must be texts, not {shown(value)}"
        return next((problem for each in value if (problem := prompt_text(each, server))), None)
    return prompt_text(value, server)


EMBEDDING: Table = {
    **{name: GENERATE[name] for name in _SHARED},
    "text": Field(_text_or_pair, is_per_prompt=True),
    "embed_override_token_id": Field(token_id),
    "embed_overrides": Field(override_lists),
    "positional_embed_overrides": Field(overrides, is_per_prompt=True, is_null_in_lists=True),
    "is_cross_encoder_request": Field(yes_or_no),
    "dimensions": Field(integer(1, INT32)),
    "return_pooled_hidden_states": Field(yes_or_no),
    "decision_layout": Field(positions, is_per_prompt=True, is_list=True),
}
