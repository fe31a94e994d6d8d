"""What the bodies of OpenAI's completions and chats may hold: ``entrypoints/openai/protocol.py``.

pydantic has read them: types are right, and numbers and texts are checked here under the names that clients
know. What becomes a prompt is checked as one, in ``GenerateReqInput``.
"""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields import generate_table as generate
from sglang_importance.http.requests.fields import sampling_table as sampling
from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.field import Field, Table, anything, text_only
from sglang_importance.http.requests.fields.generate_table import GENERATE
from sglang_importance.http.requests.fields.grammar_rules import grammar, json_grammar
from sglang_importance.http.requests.fields.number_rules import INT32, INT64, integer, top_k, top_logprobs
from sglang_importance.http.requests.fields.sampling_table import SAMPLING
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import name
from sglang_importance.http.requests.fields.token_rules import prompt_ids

MAX_LEVELS = 64

_passed_on = Field(anything)


def plain_levels(value: Any, server: ServerFacts) -> str | None:
    """JSON that templates and compilers walk through by recursion."""
    if _levels(value, MAX_LEVELS):
        return None
    return f"is more than {MAX_LEVELS} levels deep: give a flatter one"


def _levels(value: Any, left: int) -> bool:
    if left == 0:
        return False
    if hasattr(value, "__pydantic_fields__"):
        value = vars(value)
    if isinstance(value, dict):
        return all(_levels(each, left - 1) for each in value.values())
    if isinstance(value, list):
        return all(_levels(each, left - 1) for each in value)
    return True


_NO_TEMPLATES = frozenset({"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"})
"""Where sglang renders and encodes at once, a prompt could be padded to any length."""


def template_arguments(value: Any, server: ServerFacts) -> str | None:
    """What a chat template is given. A template in it would be code: one loop in another ends everybody's."""
    if isinstance(value, dict) and "chat_template" in value and not server.trusts_templates:
        return "has chat_template, which the server does not run (--trust-request-chat-template)"
    if isinstance(value, dict) and (tokenizers := sorted(_NO_TEMPLATES & value.keys())):
        return f"has {tokenizers[0]}, which is the tokenizer's and no template's: leave it out"
    return plain_levels(value, server)


def completion_prompt(value: Any, server: ServerFacts) -> str | None:
    """One prompt, or several, each a text or token ids."""
    if value in ([], ""):
        return "is empty: give a text or token ids"
    if not isinstance(value, list) or isinstance(value[0], str):
        return None  # texts: checked as such behind sglang's template
    if not isinstance(value[0], list):
        return prompt_ids(value, server)
    return next(
        (f"prompt {place}: {said}" for place, each in enumerate(value) if (said := prompt_ids(each, server))),
        None,
    )


_SHARED: Table = {
    "model": Field(name),
    "frequency_penalty": Field(sampling.penalty),
    "presence_penalty": Field(sampling.penalty),
    "logit_bias": SAMPLING["logit_bias"],
    "n": Field(sampling.samples),
    "seed": Field(sampling.seed),
    "stop": Field(sampling.stops),
    "stream": _passed_on,
    "stream_options": _passed_on,
    "temperature": Field(sampling.temperature),
    "top_p": Field(sampling.top_p),
    "top_k": Field(top_k),
    "min_p": Field(sampling.min_p),
    "min_tokens": SAMPLING["min_new_tokens"],
    "user": Field(name),
    "return_hidden_states": Field(generate.hidden_states),
    "return_routed_experts": GENERATE["return_routed_experts"],
    "routed_experts_start_len": GENERATE["routed_experts_start_len"],
    "return_cached_tokens_details": _passed_on,
    "return_spec_tokens_details": _passed_on,
    "return_token_ids": _passed_on,
    "regex": Field(grammar),
    "ebnf": Field(grammar),
    "repetition_penalty": Field(sampling.repetition_penalty),
    "stop_token_ids": SAMPLING["stop_token_ids"],
    "stop_regex": SAMPLING["stop_regex"],
    "no_stop_trim": _passed_on,
    "ignore_eos": _passed_on,
    "skip_special_tokens": _passed_on,
    "lora_path": GENERATE["lora_path"],
    "session_id": Field(name),
    "session_params": GENERATE["session_params"],
    "response_format": Field(plain_levels),
    "custom_params": SAMPLING["custom_params"],
    "custom_logit_processor": GENERATE["custom_logit_processor"],
    "images_config": Field(text_only),
    "mm_processor_kwargs": Field(text_only),
    "bootstrap_host": GENERATE["bootstrap_host"],
    "bootstrap_port": GENERATE["bootstrap_port"],
    "bootstrap_room": GENERATE["bootstrap_room"],
    "disagg_prefill_dp_rank": GENERATE["disagg_prefill_dp_rank"],
    "routed_dp_rank": GENERATE["routed_dp_rank"],
    "data_parallel_rank": GENERATE["data_parallel_rank"],
    "rid": _passed_on,
    "extra_key": GENERATE["extra_key"],
    "cache_salt": GENERATE["cache_salt"],
    "priority": Field(generate.priority),
    "watermark": Field(sampling.watermark),
}

COMPLETION: Table = {
    **_SHARED,
    "prompt": Field(completion_prompt),
    "best_of": Field(integer(1, INT32)),
    "echo": _passed_on,
    "logprobs": Field(top_logprobs),
    "max_tokens": Field(integer(1, INT64)),
    "suffix": Field(name),
    "json_schema": Field(json_grammar),
    # sglang takes labels from a header, and drops these.
    "custom_labels": _passed_on,
}


def messages(value: Any, server: ServerFacts) -> str | None:
    """A conversation."""
    return plain_levels(value, server) if value else f"must hold a message, not {shown(value)}"


CHAT: Table = {
    **_SHARED,
    "messages": Field(messages),
    "logprobs": _passed_on,
    "top_logprobs": Field(top_logprobs),
    "max_tokens": Field(integer(1, INT64)),
    "max_completion_tokens": Field(integer(1, INT64)),
    "tools": Field(plain_levels),
    "tool_choice": _passed_on,
    "parallel_tool_calls": _passed_on,
    "return_prompt_token_ids": _passed_on,
    "return_meta_info": _passed_on,
    "return_input_ids_in_sglext": _passed_on,
    "return_output_ids_in_sglext": _passed_on,
    "return_sampling_mask": _passed_on,
    "sampling_logprobs_mode": _passed_on,
    "return_flat_raw_output_top_logprobs": _passed_on,
    "return_flat_raw_top_logprobs_b64": _passed_on,
    "reasoning_effort": _passed_on,
    "task": _passed_on,
    "thinking": Field(plain_levels),
    "continue_final_message": _passed_on,
    "separate_reasoning": _passed_on,
    "stream_reasoning": _passed_on,
    "chat_template_kwargs": Field(template_arguments),
    "max_dynamic_patch": Field(text_only),
    "min_dynamic_patch": Field(text_only),
    "use_audio_in_video": Field(text_only),
    "video_config": Field(text_only),
    "input_ids": Field(prompt_ids),
}
