"""What the bodies of OpenAI's completions and chats may hold: ``entrypoints/openai/protocol.py``.

pydantic has read them: types are right, and numbers and texts are checked here under the names that clients
know. What becomes a prompt is checked as one, in ``GenerateReqInput``.
"""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields import generate_table as generate
from sglang_importance.http.requests.fields import sampling_table as sampling
from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.field import Field, Table, anything, rows, same, text_only
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
    **rows(Field(name), "model user session_id"),
    "frequency_penalty": Field(sampling.penalty),
    "presence_penalty": Field(sampling.penalty),
    **same(SAMPLING, "logit_bias stop_token_ids stop_regex custom_params"),
    "n": Field(sampling.samples),
    "seed": Field(sampling.seed),
    "stop": Field(sampling.stops),
    **rows(
        _passed_on,
        "stream stream_options return_cached_tokens_details return_spec_tokens_details return_token_ids "
        "no_stop_trim ignore_eos skip_special_tokens rid",
    ),
    "temperature": Field(sampling.temperature),
    "top_p": Field(sampling.top_p),
    "top_k": Field(top_k),
    "min_p": Field(sampling.min_p),
    "min_tokens": SAMPLING["min_new_tokens"],
    "return_hidden_states": Field(generate.hidden_states),
    **same(
        GENERATE,
        "return_routed_experts routed_experts_start_len lora_path session_params custom_logit_processor "
        "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank routed_dp_rank "
        "data_parallel_rank extra_key cache_salt",
    ),
    "regex": Field(grammar),
    "ebnf": Field(grammar),
    "repetition_penalty": Field(sampling.repetition_penalty),
    "response_format": Field(plain_levels),
    "images_config": Field(text_only),
    "mm_processor_kwargs": Field(text_only),
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
    **rows(
        _passed_on,
        "logprobs tool_choice parallel_tool_calls return_prompt_token_ids return_meta_info "
        "return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode "
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 reasoning_effort task "
        "continue_final_message separate_reasoning stream_reasoning",
    ),
    "top_logprobs": Field(top_logprobs),
    "max_tokens": Field(integer(1, INT64)),
    "max_completion_tokens": Field(integer(1, INT64)),
    "tools": Field(plain_levels),
    "thinking": Field(plain_levels),
    "chat_template_kwargs": Field(template_arguments),
    **rows(Field(text_only), "max_dynamic_patch min_dynamic_patch use_audio_in_video video_config"),
    "input_ids": Field(prompt_ids),
}
