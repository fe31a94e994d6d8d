"""What is refused for more than one field's sake, or by the way on which a request comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.body_check import check_body
from sglang_importance.http.requests.fields.request_check import check_request
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.request_hints import GENERATE_TARGET, HOOKS
from sglang_importance.upstream.server_options import attach_options

SERVER = ServerFacts(vocabulary=100)
LARGE_SERVER = ServerFacts(vocabulary=200_000, context_length=200_000)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"logprob_start_len": 0, "sampling_params": {"n": 200}},
            "logprob_start_len: asks for up to 20000000 ",
        ),
        ({"sampling_params": {"max_new_tokens": 50_000}}, "top_logprobs_num: asks for up to 50000000 "),
        ({"sampling_params": {"max_new_tokens": None}}, "top_logprobs_num: asks for up to 200000000 "),
        ({"sampling_params": {"n": 200}}, "top_logprobs_num: asks for up to 25600000 "),
        (
            {"logprob_start_len": 0, "session_params": {"id": "a"}},
            "logprob_start_len: asks for up to 200000000 ",
        ),
    ],
)
def test_samples_answers_and_sessions_count_among_log_probabilities(fields: dict[str, Any], said: str):
    asked = {"return_logprob": True, "top_logprobs_num": 1000, "input_ids": [1] * 100, **fields}
    with pytest.raises(BadField, match=f"^{said}"):
        check_request(GenerateReqInput(**asked), LARGE_SERVER)
    check_request(GenerateReqInput(**{**asked, "top_logprobs_num": 20}), LARGE_SERVER)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_reserved_ids_are_refused_on_whatever_way_they_come(path: str):
    """A header or a field of another name may give them; sglang's own health checks have them."""
    manager = SimpleNamespace(
        server_args=SimpleNamespace(),
        model_config=SimpleNamespace(vocab_size=SERVER.vocabulary),
        rid_to_state={},
    )
    attach_options(manager.server_args, ImportanceOptions(policy="importance"))
    around, _ = HOOKS[GENERATE_TARGET]

    def asked(path: str) -> Any:
        request = SimpleNamespace(url=SimpleNamespace(path=path), state=None)
        return around(
            lambda *args: "taken", manager, GenerateReqInput(text="a", rid="HEALTH_CHECK_1"), request
        )

    with pytest.raises(BadField, match=r"^rid: begins as ids of the server's own"):
        asked(path)
    asked("/health_generate")


def test_a_route_that_reads_no_adapter_refuses_one():
    server = ServerFacts(vocabulary=SERVER.vocabulary, has_lora=True)
    for name, body in (
        ("ResponsesRequest", {"input": "a"}),
        ("ScoringRequest", {"query": "a", "items": ["b"]}),
    ):
        named = getattr(http_server, name)(model="base:adapter", **body)
        with pytest.raises(BadField, match=r"^model: 'base:adapter' names an adapter"):
            check_body(named, server)
        check_body(named, SERVER)
