"""What sampling parameters may hold: sglang's ``SamplingParams`` (``sampling/sampling_params.py``).

The scheduler decodes them as written there: true for a number, or 1.0 for a whole one, ends it.
"""

from __future__ import annotations

from sglang_importance.http.requests.fields.field import Field, Table, needs, only_default, rows, yes_or_no
from sglang_importance.http.requests.fields.grammar_rules import grammar, json_grammar
from sglang_importance.http.requests.fields.number_rules import INT32, INT64, integer, real, top_k
from sglang_importance.http.requests.fields.object_rules import custom_params, fields_of
from sglang_importance.http.requests.fields.pattern_rules import stop_patterns
from sglang_importance.http.requests.fields.text_rules import text, texts
from sglang_importance.http.requests.fields.token_rules import biases, stop_tokens

MAX_STOPS, MAX_STOP_CHARACTERS = 32, 4096
MAX_SAMPLES = 1024

temperature = real(0, 1e6)
top_p = real(1e-37, 1)  # below, it is 0 in 32 bits, and no token is left
min_p = real(0, 1)
penalty = real(-2, 2)
repetition_penalty = real(0.01, 2)  # far below, logits divided by it overflow
max_new_tokens = integer(0, INT64)
stops = texts(MAX_STOPS, MAX_STOP_CHARACTERS)
samples = integer(1, MAX_SAMPLES)
seed = integer(-INT64, INT64)

watermark = needs(
    lambda server: server.has_watermark,
    "the server marks nothing (--enable-watermark)",
    fields_of(
        {
            "enabled": Field(yes_or_no),
            "key": Field(text(4096)),
            "context_window": Field(integer(1, INT32)),
        }
    ),
)
_internal = only_default("sglang sets it itself")

SAMPLING: Table = {
    "max_new_tokens": Field(max_new_tokens),
    "stop": Field(stops),
    "stop_token_ids": Field(stop_tokens),
    "stop_regex": Field(stop_patterns),
    "temperature": Field(temperature),
    "top_p": Field(top_p),
    "top_k": Field(top_k),
    "min_p": Field(min_p),
    "frequency_penalty": Field(penalty),
    "presence_penalty": Field(penalty),
    "repetition_penalty": Field(repetition_penalty),
    "min_new_tokens": Field(
        needs(
            lambda server: server.has_tokenizer,
            "the server has no tokenizer (--skip-tokenizer-init), whose end of text it would mask",
            integer(0, INT32),
        )
    ),
    "n": Field(samples),
    "beam_width": Field(integer(1, INT32)),
    "json_schema": Field(json_grammar),
    "regex": Field(grammar),
    "ebnf": Field(grammar),
    "structural_tag": Field(json_grammar),
    **rows(
        Field(yes_or_no),
        "ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim ebnf_full_assistant",
    ),
    "stream_interval": Field(integer(1, INT32)),
    "logit_bias": Field(biases),
    "sampling_seed": Field(seed),
    "custom_params": Field(custom_params),
    "watermark": Field(watermark),
    # Filled by sglang from the others; a client's would be believed (``is_normalized``).
    **rows(Field(_internal), "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized"),
}
