"""What ``/generate`` refuses before it begins to answer; behind it stands a route that answers everything."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.http_server import ORJSONRoute
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.placement.hints.hints import BadHint, Hints
from sglang_importance.http import server_state
from sglang_importance.http.requests.checked_routes import check_routes
from sglang_importance.http.requests.request_hints import _attach_native
from sglang_importance.http.requests.route_families import CARRYING, NATIVE
from sglang_importance.http.requests.route_guards import guard_routes
from sglang_importance.upstream.server_options import attach_options

VOCABULARY = 1000
ENVELOPE: dict[str, Any] = {"protocol_version": "1", "message_id": "m", "actions": []}


def generate_client(monkeypatch: pytest.MonkeyPatch, policy: str) -> TestClient:
    app = FastAPI()
    app.router.route_class = ORJSONRoute

    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate_request(obj: GenerateReqInput, request: Request) -> StreamingResponse:
        return StreamingResponse(iter(["data: [DONE]\n\n"]))

    for name in list(CARRYING):
        monkeypatch.delitem(CARRYING, name)
    monkeypatch.delitem(NATIVE, "vertex_generate", raising=False)
    guard_routes(app)
    check_routes(app)
    arguments = SimpleNamespace(dp_size=1)
    attach_options(arguments, ImportanceOptions(policy=policy))
    manager = SimpleNamespace(server_args=arguments, model_config=SimpleNamespace(vocab_size=VOCABULARY))
    monkeypatch.setattr(server_state, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    return TestClient(app, raise_server_exceptions=False)


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """With a prompt where it has none."""
    prompt = {} if "input_ids" in body else {"text": "a"}
    return {**prompt, "stream": True, **body}


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input_ids": [1, VOCABULARY]}, "input_ids: token id 1000 is beyond the model's vocabulary of 1000"),
        ({"input_ids": [[1], [-1]]}, "input_ids.1: token id -1 is beyond the model's vocabulary of 1000"),
        ({"input_ids": [[], [VOCABULARY]]}, "input_ids.0: a prompt without tokens"),
        (
            {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [-5]}},
            "sampling_params.stop_token_ids: token id -5 is beyond the model's vocabulary of 1000",
        ),
        ({"top_logprobs_num": 1001}, "top_logprobs_num: 1001 is more than the model's vocabulary of 1000"),
        ({"text": ["a", "b"], "top_logprobs_num": [1000, 1001]}, "top_logprobs_num.1: 1001 is more than"),
        ({"kv_hints": {"pin": True}}, "kv_hints.pin: unknown hint 'pin'"),
        ({"kv_hints": {"actions": []}}, "kv_hints.protocol_version: is missing beside actions"),
        # Complete but for what FastAPI drops when it reads the envelope.
        ({"kv_hints": {**ENVELOPE, "report": True}}, "kv_hints.report: would be ignored beside"),
        ({"kv_hints": [ENVELOPE]}, "kv_hints: is a list of 1 for a single prompt"),
        ({"text": ["a", "b"], "kv_hints": [ENVELOPE]}, "kv_hints: is a list of 1 for 2 prompts"),
        ({"text": ["a", "b"], "kv_hints": [None, {"prefetch": 1}]}, "kv_hints.prefetch: "),
        ({"text": ["a", "b"], "kv_hints": [None, {"prefetch": True}]}, "kv_hints.prefetch: give it to every"),
    ],
)
def test_what_is_wrong_is_refused_before_the_stream(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], problem: str, method: str
):
    client = generate_client(monkeypatch, "importance")
    answer = client.request(method, "/generate", json=streamed(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["detail"].startswith(problem)
    stock = generate_client(monkeypatch, "default")
    assert stock.request(method, "/generate", json=streamed(body)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"input_ids": [0, VOCABULARY - 1]},
        {"text": "a", "top_logprobs_num": VOCABULARY},
        {"text": ["a", "b"], "top_logprobs_num": [0, 5]},
        {"input_ids": [[0], [1]], "kv_hints": [None, {"report": True}]},
        {"input_ids": [[0], [1]], "kv_hints": {"report": True}},
        {"text": "a", "kv_hints": ENVELOPE},
        {"text": "a", "kv_hints": {}},
        {"text": ["a"], "kv_hints": [{"report": True}]},
    ],
)
def test_what_is_right_passes(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]):
    assert generate_client(monkeypatch, "observe").post("/generate", json=body).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"7", b'"input_ids"', b"null", b"[" * 2000])
@pytest.mark.parametrize("sent_as", ["application/json", "text/plain", None])
def test_what_is_no_request_is_left_to_sglang(
    monkeypatch: pytest.MonkeyPatch, content: bytes, sent_as: str | None
):
    headers = {"content-type": sent_as} if sent_as else {}
    answer = generate_client(monkeypatch, "importance").post("/generate", content=content, headers=headers)
    assert answer.status_code in (400, 422)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
some = st.sampled_from
actions = st.fixed_dictionaries(
    {},
    optional={
        "action_id": st.text(max_size=2) | json_values,
        "action_type": some(["sgl_importance.report", "sgl_importance.retain", "other"]) | json_values,
        "action_version": some(["1", "2"]) | json_values,
        "payload": some([{"value": True}, {"ttl_seconds": 1}, {}]) | json_values,
        "more": json_values,
    },
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "protocol_version": st.just("1") | json_values,
        "message_id": st.just("m") | json_values,
        "actions": st.lists(actions, max_size=2) | json_values,
        "more": json_values,
    },
)


@given(envelopes)
def test_sglang_takes_every_envelope_that_we_take(value: dict[str, Any]):
    try:
        hints = Hints.parse(value)
    except BadHint:
        return
    taken = decode_kv_hints_envelope(json.loads(json.dumps(hints.envelope(value))))
    assert Hints.of_actions(taken.actions) == hints
    request = SimpleNamespace(kv_hints=taken, sampling_params={})
    _attach_native(request)  # FastAPI has read it, and so has sglang's engine
    again = decode_kv_hints_envelope(request.kv_hints)
    assert again == taken
