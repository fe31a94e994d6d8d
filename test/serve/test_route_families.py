"""Every route of sglang's app is in one list: none may drop a salt, a key or a hint that nobody knew of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
)

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import server_state
from sglang_importance.http.requests.answer_places import OPENAI
from sglang_importance.http.requests.carried_fields import carried_by
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.kv_fields import read_fields
from sglang_importance.http.requests.route_families import (
    CARRYING,
    CLOSING,
    NATIVE,
    NOT_COMPUTING,
    REFUSING,
)
from sglang_importance.http.requests.route_guards import guard_routes
from sglang_importance.upstream.server_options import attach_options

LISTS = {
    "carrying": CARRYING.keys(),
    "closing": {CLOSING},
    "native": NATIVE.keys(),
    "refusing": REFUSING.keys(),
    # It computes what its socket sends, with models that hear: such a model is refused at launch.
    "without a body": {"openai_v1_realtime_transcription"},
    "not computing": NOT_COMPUTING,
}


def all_routes(routes: Sequence[Any]) -> Iterator[Any]:
    for route in routes:
        included = getattr(route, "original_router", None)  # as newer releases of FastAPI keep a router
        if included is not None:
            yield from all_routes(included.routes)
        elif hasattr(route, "endpoint"):
            yield route


def takes_input(route: Any) -> bool:
    """Whether a request has a body, or a socket sends what a body would."""
    methods = getattr(route, "methods", None)
    return methods is None or bool({"POST", "PUT", "PATCH"} & methods)


@pytest.mark.parametrize("route", all_routes(http_server.app.router.routes), ids=lambda route: route.path)
def test_every_route_that_takes_input_is_in_one_list(route: Any) -> None:
    if not takes_input(route):
        return
    lists = [name for name, names in LISTS.items() if route.endpoint.__name__ in names]
    assert len(lists) == 1, f"{route.path} ({route.endpoint.__name__}) is in {lists or 'no list'}"


def test_what_is_guarded_is_in_the_app() -> None:
    names = {route.endpoint.__name__ for route in all_routes(http_server.app.router.routes)}
    assert names >= CARRYING.keys() | NATIVE.keys() | REFUSING.keys()


def test_the_app_is_what_it_was_but_for_the_look_in_front() -> None:
    app = FastAPI()
    app.router.routes[:] = http_server.app.router.routes
    guard_routes(app)
    for before, after in zip(http_server.app.router.routes, app.router.routes, strict=True):
        kept = ("path", "methods", "name", "response_class", "include_in_schema", "response_model")
        assert type(before) is type(after)
        assert [getattr(before, each, None) for each in kept] == [getattr(after, each, None) for each in kept]
        if not isinstance(before, APIRoute):
            continue
        assert set(before.dependencies) <= set(after.dependencies)
        names = [list(signature(each.endpoint).parameters) for each in (before, after)]
        assert names[0] == names[1]
        guarded = after is not before
        known = before.endpoint.__name__ in {CLOSING, *CARRYING, *NATIVE, *REFUSING}
        assert guarded == known


# ---- behind stand-ins that tell what they were given ----


def guarded_client(monkeypatch: pytest.MonkeyPatch, policy: str = "importance") -> TestClient:
    app = FastAPI(exception_handlers=http_server.app.exception_handlers)
    app.router.route_class = http_server.ORJSONRoute

    def told(raw_request: Request) -> dict[str, Any]:
        carried = carried_by(raw_request)
        if carried is None:
            return {}
        carried.rounds.append({0: {"prompt_tokens": 3}})
        return {name: getattr(carried.fields, name) for name in ("cache_salt", "extra_key")}

    @app.post("/v1/chat/completions")
    async def openai_v1_chat_completions(request: ChatCompletionRequest, raw_request: Request) -> Any:
        return {"usage": {"n": 1}, **told(raw_request)}

    @app.post("/v1/completions")
    async def openai_v1_completions(request: CompletionRequest, raw_request: Request) -> Any:
        told(raw_request)
        if request.stream:
            events = (
                'data: {"choices":[{"text":"\\"choices\\":[]"}]}\n\n',
                'data: {"choices":[],"usage":{"n":1}}\n\n',
            )
            return StreamingResponse(iter(events))
        return {"usage": {"n": 1}, **told(raw_request)}

    @app.post("/v1/responses")
    async def v1_responses_request(request: ResponsesRequest, raw_request: Request) -> Any:
        return {"usage": {"n": 1}, **told(raw_request)}

    @app.post("/v1/embeddings")
    async def openai_v1_embeddings(request: EmbeddingRequest, raw_request: Request) -> Any:
        return {}

    @app.post("/v2/thoughts")
    async def of_a_later_release(body: dict[str, Any]) -> Any:
        return {}

    @app.post("/flush_cache")
    async def flush_cache(body: dict[str, Any]) -> Any:
        return {}

    arguments = SimpleNamespace(dp_size=1)
    attach_options(arguments, ImportanceOptions(policy=policy))
    manager = SimpleNamespace(server_args=arguments)
    monkeypatch.setattr(server_state, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    here = {"openai_v1_chat_completions", "openai_v1_completions", "v1_responses_request"}
    for name in CARRYING.keys() - here:
        monkeypatch.delitem(CARRYING, name)
    for name in list(NATIVE):
        monkeypatch.delitem(NATIVE, name)
    guard_routes(app)
    return TestClient(app, raise_server_exceptions=False)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
ADAPTER_END = "tenant+lora:" + "0a" * 16


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("place", ["top", "metadata"])
def test_a_namespace_is_carried_from_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, place: str, field: str
) -> None:
    given = {field: "x"} if place == "top" else {"metadata": {field: "x"}}
    answer = guarded_client(monkeypatch).post("/v1/chat/completions", json=CHAT | given).json()
    assert answer[field] == "x"
    stock = guarded_client(monkeypatch, "default").post("/v1/chat/completions", json=CHAT | given)
    assert stock.json() == {"usage": {"n": 1}}


def test_a_list_of_namespaces_goes_with_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "m", "prompt": ["a", "b"], "cache_salt": ["x", "y"]}
    assert guarded_client(monkeypatch).post("/v1/completions", json=body).json()["cache_salt"] == ["x", "y"]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (
            "/v1/chat/completions",
            {"extra_body": {"cache_salt": "x"}},
            "extra_body.cache_salt: is not read there",
        ),
        ("/v1/chat/completions", {"options": {"extra_key": "x"}}, "options.extra_key: is not read there"),
        (
            "/v1/chat/completions",
            {"metadata": {"cache_salt": 7}},
            "metadata.cache_salt: must be a text, not 7",
        ),
        (
            "/v1/chat/completions",
            {"metadata": {"cache_salt": "x" * 4097}},
            "metadata.cache_salt: has 4097 characters: give at most 4096",
        ),
        ("/v1/responses", {"extra_key": "x" * 4097}, "extra_key: has 4097 characters: give at most 4096"),
        ("/v1/responses", {"session_id": "x" * 4097}, "session_id: has 4097 characters: give at most 4096"),
        (
            "/v1/chat/completions",
            {"cache_salt": "x", "metadata": {"cache_salt": "y"}},
            "metadata.cache_salt: is not what cache_salt says: give it once",
        ),
        ("/v1/chat/completions", {"extra_key": ADAPTER_END}, "extra_key: '+lora:' and an id"),
        ("/v1/chat/completions", {"kv_hints": {"keep": True}}, "kv_hints.keep: unknown hint"),
        ("/v1/responses", {"kv_hints": {"keep": True}}, "kv_hints.keep: unknown hint"),
        (
            "/v1/responses",
            {"kv_hints": {"block_types": [{"type": "user", "messages": 0}]}},
            "kv_hints.block_types.0.messages: only a chat request has messages",
        ),
        (
            "/v1/responses",
            {"background": True, "kv_hints": {"report": True}},
            "kv_hints.report: an answer in the",
        ),
        (
            "/v1/responses",
            {"lora_path": "x"},
            "lora_path: is not read here, and the model would answer without",
        ),
        (
            "/v1/embeddings",
            {"cache_salt": "x"},
            "cache_salt: /v1/embeddings cannot keep it: use /v1/completions, or leave it out",
        ),
        ("/v1/embeddings", {"kv_hints": {"report": True}}, "kv_hints: /v1/embeddings cannot keep it"),
        (
            "/v1/embeddings",
            {"metadata": {"extra_key": "x"}},
            "metadata.extra_key: /v1/embeddings cannot keep it",
        ),
        (
            "/v2/thoughts",
            {"extra_key": "x"},
            "extra_key: /v2/thoughts cannot keep it: use /v1/chat/completions",
        ),
        (
            "/v2/thoughts",
            {"instances": [{}, {"cache_salt": "x"}]},
            "instances.1.cache_salt: /v2/thoughts cannot",
        ),
    ],
)
def test_what_would_be_dropped_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], problem: str
) -> None:
    needed = CHAT | {"input": "a"}
    answer = guarded_client(monkeypatch).post(path, json=needed | body)
    assert answer.status_code == 400, answer.text
    document = answer.json()
    message = (document.get("error") or document)["message"]
    assert message.startswith(problem)
    assert "\n" not in message
    assert guarded_client(monkeypatch, "default").post(path, json=needed | body).status_code == 200


@pytest.mark.parametrize("takes_lists", [True, False])
@pytest.mark.parametrize("place", ["", "metadata", "options"])
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_namespace_is_a_name_wherever_it_stands(field: str, place: str, takes_lists: bool) -> None:
    """A parser of JSON that is laxer than sglang's also brings half a surrogate pair."""
    read = partial(read_fields, places=("", "metadata", "options"), takes_lists=takes_lists)
    path = f"{place}.{field}".lstrip(".")
    for value, problem in (("x" * 4097, "has 4097 characters"), ("\ud800", "holds half a surrogate pair")):
        given = [({field: value}, path)]
        if takes_lists and not place:
            given.append(({field: ["x", value]}, f"{path}.1"))
        for fields, named in given:
            with pytest.raises(BadField, match=rf"^{re.escape(named)}: {problem}"):
                read({place: fields} if place else fields)
    assert getattr(read({place: {field: "x" * 4096}} if place else {field: "x" * 4096}), field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"cache_salt": "", "extra_key": None, "kv_hints": {}}),
        ("/flush_cache", {"cache_salt": "x"}),
        ("/v2/thoughts", {"metadata": {"other": "x"}}),
    ],
)
def test_what_says_nothing_or_computes_nothing_passes(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    assert guarded_client(monkeypatch).post(path, json=CHAT | {"input": "a"} | body).status_code == 200


def test_only_the_event_that_ends_a_stream_takes_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "m", "prompt": "a", "stream": True, "kv_hints": {"report": True}}
    text = guarded_client(monkeypatch).post("/v1/completions", json=body).text
    first, last = text.strip().split("\n\n")
    assert "kv_importance" not in first
    assert '"kv_importance": {"prompt_tokens": 3}' in last


def test_a_report_stands_beside_a_log_probability_of_minus_infinity() -> None:
    answer = OPENAI.with_reports({"usage": {"n": 1}, "logprob": float("-inf")}, lambda: {"prompt_tokens": 3})
    assert json.loads(answer.body) == {
        "usage": {"n": 1, "kv_importance": {"prompt_tokens": 3}},
        "logprob": None,
    }


def test_an_app_without_a_route_that_carries_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"sglang has no route .*ollama_chat"):
        guard_routes(FastAPI())
