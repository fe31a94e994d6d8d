"""sglang's routes by what becomes of ``cache_salt``, ``extra_key`` and ``kv_hints`` in their bodies.

By the names of their functions in ``srt/entrypoints/http_server.py``: environment variables may change paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from sglang_importance.http.requests.answer_places import ANTHROPIC, OLLAMA, OPENAI, RESPONSES, AnswerPlace
from sglang_importance.http.requests.kv_fields import METADATA, TOP
from sglang_importance.http.requests.prompt_messages import (
    PromptMessages,
    anthropic_messages,
    chat_messages,
    no_messages,
)


@dataclass(frozen=True)
class Family:
    """Routes that compute, and keep the fields.

    Attributes:
        answer: where reports stand in their answers.
        places: where the fields stand in their bodies, as in ``kv_fields.PLACES``.
        messages: of a request, those that hints may name.
        has_breakpoints: whether ``cache_control`` says how long a prompt is to be kept.
        takes_lists: whether there may be a namespace for each prompt.
    """

    answer: AnswerPlace
    places: tuple[str, ...] = (TOP, METADATA)
    messages: Callable[[Any, Request], PromptMessages] = no_messages
    takes_lists: bool = False
    has_breakpoints: bool = False

    @property
    def has_messages(self) -> bool:
        return self.messages is not no_messages


CHAT = Family(OPENAI, messages=chat_messages)
COMPLETIONS = Family(OPENAI, takes_lists=True)
SCORES = Family(OPENAI)
MESSAGES = Family(ANTHROPIC, messages=anthropic_messages, has_breakpoints=True)
CARRYING: dict[str, Family] = {
    "openai_v1_chat_completions": CHAT,
    "sagemaker_chat_completions": CHAT,
    "openai_v1_completions": COMPLETIONS,
    "v1_responses_request": Family(RESPONSES),
    "anthropic_v1_messages": MESSAGES,
    "ollama_chat": Family(OLLAMA, (TOP, "options")),
    "ollama_generate": Family(OLLAMA, (TOP, "options")),
    "v1_score_request": SCORES,
}
"""They take the fields through us."""

UNHANDLED = frozenset({"ollama_chat", "ollama_generate", "v1_responses_request"})
"""sglang's handlers of these let errors through: 500, or a stream that is cut off behind its 200."""

NATIVE: dict[str, str] = {"generate_request": TOP, "vertex_generate": "parameters"}
"""Their fields are those of ``GenerateReqInput``, at this place; reports stand in ``meta_info``."""

REFUSING: dict[str, str] = {
    "encode_request": "/generate",
    "classify_request": "/generate",
    "openai_v1_embeddings": "/v1/completions",
    "openai_v1_classify": "/v1/completions",
    "v1_rerank_request": "/v1/score",
    "v1_decisions_request": "/v1/score",
    "systemone_decisions": "/v1/score",
    "openai_v1_audio_transcriptions": "/v1/chat/completions",
}
"""They compute KV that others may be served from, and cannot keep a namespace.

sglang's requests for embeddings have none; its model of decisions forbids fields that it does not know, and
``/v1/systemone``, which scores in the same way, goes with it. By what to use instead.
"""

CLOSING = "close_session"
"""It names a session, and may name the namespace of its requests."""

NOT_COMPUTING = frozenset(
    {
        # Tokens, without their KV.
        *("openai_v1_tokenize", "openai_v1_detokenize", "anthropic_v1_count_tokens"),
        *("parse_function_call_request", "separate_reasoning_request"),
        # Answers and sessions that there are.
        *("v1_cancel_responses", "abort_request", "open_session", "ollama_show"),
        # The server itself.
        *("flush_cache", "set_internal_state", "slow_down", "pd_role_switch", "scale_elastic_ep"),
        *(
            "pause_generation",
            "continue_generation",
            "configure_logging",
            "set_trace_level",
            "freeze_gc_async",
        ),
        *("start_profile_async", "stop_profile_async", "_dumper_control_handler"),
        *("start_expert_distribution_record_async", "stop_expert_distribution_record_async"),
        "dump_expert_distribution_record_async",
        *("clear_hicache_storage_backend", "attach_hicache_storage_backend"),
        *("add_external_corpus", "remove_external_corpus"),
        # Weights and adapters.
        *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed"),
        *("update_weights_from_ipc", "update_weight_version", "begin_weight_update", "end_weight_update"),
        *("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance"),
        *(
            "init_weights_update_group",
            "destroy_weights_update_group",
            "get_weights_by_name",
            "check_weights",
        ),
        *("release_memory_occupation", "resume_memory_occupation"),
        *("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"),
    }
)
"""Whatever stands in their bodies, no KV comes of it. Routes without a body are not listed."""
