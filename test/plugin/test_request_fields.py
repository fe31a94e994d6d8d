"""What each field of a request may hold, what is refused, and that every field of the release has a row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_importance.http.requests.fields.bad_field import BadField, shown
from sglang_importance.http.requests.fields.body_check import TABLES, check_body
from sglang_importance.http.requests.fields.field import Field, anything, yes_or_no
from sglang_importance.http.requests.fields.generate_table import GENERATE
from sglang_importance.http.requests.fields.pattern_rules import stop_patterns
from sglang_importance.http.requests.fields.request_check import check_request
from sglang_importance.http.requests.fields.sampling_table import SAMPLING
from sglang_importance.http.requests.fields.server_facts import ServerFacts, facts_of
from sglang_importance.http.requests.fields.table_check import check_values, defaults_of
from sglang_importance.http.requests.fields.token_rules import unknown_token

SIZE = 100
SERVER = ServerFacts(vocabulary=SIZE, context_length=2048, hidden_size=2, chunk_tokens=512)
ids = st.lists(st.integers(-SIZE, 2 * SIZE), min_size=1)


def check(server: ServerFacts = SERVER, in_flight: tuple[str, ...] = (), **fields: Any) -> None:
    prompt = {} if {"text", "input_ids", "input_embeds"} & fields.keys() else {"input_ids": [1, 2]}
    check_request(GenerateReqInput(**prompt, **fields), server, in_flight)


def problem(server: ServerFacts = SERVER, **fields: Any) -> str:
    with pytest.raises(BadField) as caught:
        check(server, **fields)
    (line,) = str(caught.value).splitlines()
    return line


# ---- tables and classes ----


@pytest.mark.parametrize("name", TABLES)
def test_every_field_of_sglangs_class_has_a_row(name: str):
    kind = getattr(http_server, name, None)
    if kind is None:
        pytest.skip("this release has no such class")
    assert set(defaults_of(kind)) <= set(TABLES[name])


def test_every_sampling_parameter_has_a_row():
    assert set(defaults_of(SamplingParams)) <= set(SAMPLING)


def test_every_route_that_takes_such_a_request_is_known():
    """A class that a release adds, and that becomes a request to compute, must be looked at by somebody."""
    known = set(TABLES) | NOT_COMPUTED
    seen = {
        body.field_info.annotation.__name__
        for route in http_server.app.router.routes
        for body in getattr(getattr(route, "dependant", None), "body_params", ())
        if hasattr(body.field_info.annotation, "__name__")
    }
    assert {name for name in seen if re.search("Req|Request|Input", name)} <= known


NOT_COMPUTED = {
    *("PauseGenerationReqInput", "ContinueGenerationReqInput", "LoadLoRAAdapterReqInput"),
    *("LoadLoRAAdapterFromTensorsReqInput", "UnloadLoRAAdapterReqInput"),
    *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput", "CheckWeightsReqInput"),
    *("UpdateWeightsFromIPCReqInput", "GetWeightsByNameReqInput", "InitWeightsUpdateGroupReqInput"),
    *("DestroyWeightsUpdateGroupReqInput", "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"),
    *("InitWeightsSendGroupForRemoteInstanceReqInput", "SendWeightsToRemoteInstanceReqInput"),
    *("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput", "PdRoleSwitchReqInput"),
    *("AttachHiCacheStorageReqInput", "OllamaShowRequest"),
}


def test_a_field_that_nobody_knows_passes_as_sglangs_default_only():
    check_values([("new", 5), ("no_field", 1)], {}, {"new": 5}, SERVER)
    with pytest.raises(BadField, match=r"^new: is new in sglang, and not known here yet: leave it out$"):
        check_values([("new", 6)], {}, {"new": 5}, SERVER)
    with pytest.raises(BadField, match=r"^new: "):
        check_values([("new", True)], {}, {"new": 1}, SERVER)


def test_sglangs_own_defaults_pass():
    check(text="a")
    check_request(EmbeddingReqInput(text="a"), SERVER)
    check(sampling_params=dict(defaults_of(SamplingParams)))


# ---- what is refused ----

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"bootstrap_host": "2.2.2.2"},
        "bootstrap_host: the server does not answer in parts",
    ),
    ({"bootstrap_room": 0}, "bootstrap_room: the server does not"),
    ({"positional_embed_overrides": {}}, "positional_embed_overrides: the server shares KV by token ids"),
    ({"logprob_start_len": -7}, "logprob_start_len: must be a whole number from -1 to 2048"),
    ({"rid": ["a", "b"]}, "rid: is a list beside a single prompt"),
    ({"rid": ""}, "rid: must not be empty"),
    ({"rid": "x" * 5000}, "rid: has 5000 characters"),
    ({"text": ["a", "b"], "rid": ["a", "a"]}, "rid: names two prompts alike"),
    ({"text": ["a", "b"], "rid": ["a"]}, "rid: is a list of 1 for 2 prompts"),
    ({"lora_id": "x"}, "lora_id: sglang finds it by lora_path"),
    ({"lora_path": "x"}, "lora_path: the server has no adapters"),
    ({"http_worker_ipc": "ipc://x"}, "http_worker_ipc: sglang sets it itself"),
    ({"custom_labels": {"tenant": "a"}}, "custom_labels: the server's metrics have no label 'tenant'"),
    ({"input_embeds": [[0.1, 0.2]]}, "input_embeds: the server shares KV by token ids"),
    ({"image_data": "x"}, "image_data: the model reads text only"),
    ({"routed_dp_rank": 1}, "routed_dp_rank: must be a whole number from 0 to 0"),
    ({"priority": 2**70}, "priority: must be a whole number"),
    ({"priority": False}, "priority: must be a whole number"),
    ({"session_params": {"id": 5}}, "session_params: has id, which must be a text"),
    ({"session_params": {"name": "a"}}, "session_params: has the unknown field 'name'"),
    ({"text": ["a"], "session_params": {"id": "a"}}, "session_params: a session takes one prompt"),
    ({"return_hidden_states": True}, "return_hidden_states: the server returns none such"),
    ({"return_routed_experts": True}, "return_routed_experts: the server keeps no routes"),
    ({"top_logprobs_num": -1}, "top_logprobs_num: must be a whole number from 0 to 100"),
    ({"top_logprobs_num": [1]}, "top_logprobs_num: is a list beside a single prompt"),
    ({"text": ["a", "b"], "logprob_start_len": [None, 1]}, "logprob_start_len.0: must be a whole number"),
    ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num: is a list of 1 for 2 prompts"),
    ({"token_ids_logprob": [100]}, "token_ids_logprob: token id 100 is beyond"),
    ({"text": ["a", "b"], "token_ids_logprob": [[1], ["x"]]}, "token_ids_logprob.1: must be a list"),
    ({"text": []}, "text: is empty"),
    ({"text": ""}, "text: must not be empty"),
    ({"text": "\ud800"}, "text: holds half a surrogate pair"),
    ({"text": "a", "input_ids": [[1]]}, "input_ids: "),
    ({"input_ids": [[1], []]}, "input_ids.1: a prompt without tokens"),
    ({"input_ids": [0, 100]}, "input_ids: token id 100 is beyond the model's vocabulary of 100"),
    ({"input_ids": [[1], [2, 10**12]]}, "input_ids.1: token id 1000000000000 is beyond"),
    ({"extra_key": ["a", "b"]}, "extra_key: is a list beside a single prompt"),
    ({"sampling_params": [{}]}, "sampling_params: is a list beside a single prompt"),
    ({"text": ["a"], "sampling_params": [None]}, "sampling_params.0: must be an object"),
)


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[str(fields)[:60] for fields, _ in REFUSED])
def test_what_a_server_cannot_take_is_one_line_that_names_the_field(fields: dict[str, Any], said: str):
    assert problem(**fields).startswith(said)


SAMPLING_REFUSED: tuple[tuple[str, Any], ...] = (
    *(("top_k", value) for value in (0, -5, 10**12, 1.0, True, "5")),
    *(("temperature", value) for value in (-1, float("nan"), float("inf"), 1e300, "hot", True)),
    *(("top_p", value) for value in (0, 1.1, 1e-300, float("nan"))),
    *(("repetition_penalty", value) for value in (0, 1e-300, 2.5)),
    *(("stream_interval", value) for value in (0, -1, 2**70)),
    *(("max_new_tokens", value) for value in (-1, 2**70, 1.0, True)),
    *(("n", value) for value in (0, -1, 1.0, 10**9, None, True)),
    *(("stop", value) for value in (5, [5], ["a"] * 33, "a" * 5000, "\ud800")),
    *(("stop_regex", value) for value in ("((", "(a+)+", "(a|aa)*b", ".*.*.*x", "a" * 300, [5])),
    *(("stop_token_ids", value) for value in (5, ["a"], [1.5], [2**70])),
    *(("logit_bias", value) for value in ({"100": 1}, {"x": 1}, {"1": 1e300}, {1: 1}, {"-1": 1}, [1])),
    *(("json_schema", value) for value in ({"type": "object"}, "[", "[" * 200, '{"maxLength": 1000000}')),
    (
        "json_schema",
        json.dumps({"properties": {f"p{place}": {} for place in range(100)}, "minProperties": 1}),
    ),
    *(("regex", value) for value in ("(" * 100, "a{1000000}", 5, "\x00")),
    *(("custom_params", value) for value in ({"a": {"b": {}}}, {"a": 2**70}, {"__req__": 1}, [1])),
    *((name, 1) for name in ("is_normalized", "stop_strs", "stop_str_max_len", "stop_regex_max_len")),
    *(("ignore_eos", value) for value in (1, "yes")),
    *(("sampling_seed", value) for value in (2**70, 1.5, True)),
    ("use_beam_search", True),
)


@pytest.mark.parametrize(("name", "value"), SAMPLING_REFUSED, ids=str)
def test_sampling_parameters_that_would_end_the_scheduler_are_refused(name: str, value: Any):
    assert problem(sampling_params={name: value}).startswith(f"sampling_params.{name}: ")
    said = problem(text=["a", "b"], sampling_params=[{}, {name: value}])
    assert said.startswith(f"sampling_params.1.{name}: ")


def test_a_stop_token_counts_where_it_is_masked():
    check(sampling_params={"stop_token_ids": [10**12, None]})
    said = problem(sampling_params={"stop_token_ids": [10**12], "min_new_tokens": 1})
    assert said.startswith("sampling_params.stop_token_ids: token id 1000000000000 is beyond")


def test_an_id_in_flight_is_refused_before_anything_is_entered():
    with pytest.raises(BadField, match=r"^rid: 'a' is the id of a request that is not answered"):
        check(rid="a", in_flight=("a",))
    with pytest.raises(BadField, match=r"^rid: 'a_1'"):
        check(rid="a", text=["x", "y"], in_flight=("a_1",))
    with pytest.raises(BadField, match=r"^rid: 'b'"):
        check(rid=["a", "b"], text=["x", "y"], in_flight=("b",))
    check(rid="a", in_flight=("b",))


def test_more_log_probabilities_than_memory_are_refused():
    server = ServerFacts(vocabulary=200_000, context_length=200_000)
    asked = {"return_logprob": True, "logprob_start_len": 0, "input_ids": [1] * 1000}
    check(server, **asked, top_logprobs_num=100)
    assert problem(server, **asked, top_logprobs_num=100_000).startswith(
        "logprob_start_len: asks for up to 100000000"
    )


# ---- what passes where a server can do it ----


@pytest.mark.parametrize(
    ("server", "fields"),
    [
        (
            {"is_disaggregated": True},
            {"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 2**63 - 1},
        ),
        ({"is_disaggregated": True, "chunk_tokens": 512}, {"bootstrap_host": "2.2.2.2"}),
        ({"has_lora": True}, {"lora_path": "a"}),
        ({"has_lora": True}, {"text": ["a", "b"], "lora_path": ["a", None]}),
        ({"hidden_states": "last"}, {"return_hidden_states": "last"}),
        ({"returns_experts": True}, {"return_routed_experts": True}),
        ({"has_radix_cache": False, "hidden_size": 2}, {"input_embeds": [[0.1, 0.2], [0.3, 0.4]]}),
        ({"data_ranks": 4}, {"routed_dp_rank": 3}),
        ({"metric_labels": frozenset({"tenant"})}, {"custom_labels": {"tenant": "a"}}),
        ({}, {"session_params": {"id": "a", "offset": 3, "replace": None}}),
        ({}, {"text": ["a", "b"], "top_logprobs_num": [0, 5], "extra_key": ["x", "y"]}),
        ({}, {"text": ["a", "b"], "token_ids_logprob": [1, 2]}),
        ({}, {"sampling_params": {"stop_regex": ["[0-9]+", "foo|bar"], "logit_bias": {"1": -100}}}),
        ({}, {"image_data": [None, []], "modalities": []}),
    ],
    ids=str,
)
def test_what_a_server_can_do_passes(server: dict[str, Any], fields: dict[str, Any]):
    check(ServerFacts(**{"vocabulary": SIZE, **server}), **fields)


def test_a_warm_up_with_a_prompt_of_several_chunks_is_refused_in_every_mode():
    server = ServerFacts(SIZE, is_disaggregated=True, chunk_tokens=512)
    assert problem(server, bootstrap_host="2.2.2.2", input_ids=[1] * 512).startswith(
        "bootstrap_host: 2.2.2.2 marks"
    )


def test_flags_of_a_server_are_read_once():
    arguments = SimpleNamespace(
        enable_lora=True, dp_size=2, disaggregation_mode="decode", chunked_prefill_size=-1
    )
    manager = SimpleNamespace(
        server_args=arguments, model_config=SimpleNamespace(vocab_size=7, context_len=9, hidden_size=3)
    )
    facts = facts_of(manager)
    assert (facts.vocabulary, facts.context_length, facts.hidden_size, facts.data_ranks) == (7, 9, 3, 2)
    assert facts.has_lora
    assert facts.is_disaggregated
    assert facts.chunk_tokens is None
    assert facts_of(manager) is facts


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("SlowDownReqInput", {"forward_sleep_time": float("nan")}),
        ("SlowDownReqInput", {"forward_sleep_time": 1e9}),
        ("OpenSessionReqInput", {"capacity_of_str_len": 1, "timeout": -1.0}),
        ("OpenSessionReqInput", {"capacity_of_str_len": -1}),
        ("AbortReq", {"rid": ["a"]}),
        ("AbortReq", {"finished_reason": {"type": "abort"}}),
        ("SetInternalStateReq", {"server_args": {"pp_max_micro_batch_size": 1.5}}),
        ("SetInternalStateReq", {"server_args": {"model_path": 1}}),
        ("ConfigureLoggingReq", {"log_level": "loud"}),
        ("ConfigureLoggingReq", {"log_requests_level": 99}),
        ("ProfileReq", {"num_steps": -1}),
        ("UpdateWeightFromDiskReqInput", {"model_path": "a", "load_format": "nope"}),
        ("SeparateReasoningReqInput", {"text": "a", "reasoning_parser": ""}),
    ],
)
def test_messages_of_the_operator_are_looked_at_like_requests(name: str, fields: dict[str, Any]):
    *_, odd = fields
    with pytest.raises(BadField, match=f"^{odd}"):
        check_body(getattr(http_server, name)(**fields), SERVER)


def test_messages_that_the_operator_sends_pass(tmp_path: Path):
    for name, fields in {
        "SlowDownReqInput": {"forward_sleep_time": 0.5},
        "OpenSessionReqInput": {"capacity_of_str_len": 1000, "session_id": "a", "timeout": 60.0},
        "AbortReq": {"rid": "HEALTH_CHECK_1"},
        "ConfigureLoggingReq": {"log_level": "debug", "log_requests_level": 2},
        "ProfileReq": {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"]},
        "UpdateWeightFromDiskReqInput": {"model_path": "a", "load_format": "safetensors"},
    }.items():
        check_body(getattr(http_server, name)(**fields), SERVER)


def test_what_sglang_sends_itself_is_refused_from_clients():
    for fields in ({"received_time": 1.0}, {"token_indices_to_pool": [0]}, {"rid": "HEALTH_CHECK_1"}):
        (name,) = fields
        with pytest.raises(BadField, match=f"^{name}: "):
            check_body(GenerateReqInput(text="a", **fields), SERVER)
        check(text="a", **fields)


# ---- rules ----


@given(ids)
def test_a_prompt_passes_exactly_if_all_its_ids_are_known(prompt: list[int]):
    assert (unknown_token(prompt, SIZE) is None) == all(0 <= token < SIZE for token in prompt)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GENERATE)), json_values)
def test_no_rule_stumbles_over_a_value(name: str, value: Any):
    if name == "kv_hints" or name not in defaults_of(GenerateReqInput):
        return
    said = ""
    try:
        check(**{"input_ids": [1], name: value})
    except BadField as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert len(said) < 300


@given(st.sampled_from(sorted(SAMPLING)), json_values)
def test_no_rule_of_sampling_stumbles_over_a_value(name: str, value: Any):
    said = "sampling_params."
    try:
        check(sampling_params={name: value})
    except BadField as error:
        said = str(error)
    assert said.startswith("sampling_params.")


@pytest.mark.parametrize("pattern", ["a", "[0-9]{1,3}", "foo|bar", r"\d+\s*x", "a{3}", "(?i)end", "colou?r"])
def test_ordinary_patterns_pass(pattern: str):
    assert stop_patterns(pattern, SERVER) is None


def test_a_value_is_shown_in_a_few_words():
    assert len(shown("a" * 10**6)) < 80
    assert len(shown([1] * 10**6)) < 80
    assert shown(2**2000) == "a number of 2001 bits"


def test_a_row_is_as_plain_as_its_rule():
    assert Field(anything).rule(object(), SERVER) is None
    assert yes_or_no(1, SERVER) == "must be true or false"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "options: has seed, which sglang passes on under a name"),
        ({"top_k": 0}, "options: has top_k, which must be a whole number"),
        ({"stop": [1]}, "options: has stop, which must be a text"),
    ],
)
def test_options_of_ollama_are_checked_before_they_are_sampling_parameters(
    options: dict[str, Any], said: str
):
    body = http_server.OllamaGenerateRequest(model="default", prompt="a", options=options)
    with pytest.raises(BadField, match=re.escape(said)):
        check_body(body, SERVER)


def test_options_of_ollama_that_sglang_drops_pass():
    options = {"temperature": 0.5, "num_predict": 3, "num_ctx": 4096, "repeat_penalty": 1.1}
    check_body(http_server.OllamaGenerateRequest(model="default", prompt="a", options=options), SERVER)


@pytest.mark.parametrize("ids", [[5, 1e-300], [5, "a"], [5, 2**70]])
def test_a_prompt_holds_whole_numbers_only(ids: list[Any]):
    assert problem(input_ids=ids).startswith("input_ids: ")
