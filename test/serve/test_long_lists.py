"""Lists of a hundred thousand elements are refused before sglang's models try every one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.http_server import ORJSONRoute
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import server_state
from sglang_importance.http.requests import long_lists
from sglang_importance.http.requests.checked_routes import check_routes
from sglang_importance.http.requests.long_lists import LONG
from sglang_importance.upstream.server_options import attach_options

MANY = 100_000
CONTEXT = 50_000
MODELS = {
    "/v1/responses": ResponsesRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/api/chat": OllamaChatRequest,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that have read a body so far."""
    return []


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, read: list[str]) -> TestClient:
    app = FastAPI()
    app.router.route_class = ORJSONRoute
    for path, model in MODELS.items():

        async def answer(request: Any) -> str:
            read.append(type(request).__name__)
            return "answered"

        answer.__annotations__["request"] = model
        app.post(path)(answer)
    check_routes(app)
    arguments = SimpleNamespace()
    attach_options(arguments, ImportanceOptions(policy="importance"))
    model_config = SimpleNamespace(vocab_size=1000, context_len=CONTEXT)
    manager = SimpleNamespace(server_args=arguments, model_config=model_config)
    monkeypatch.setattr(server_state, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    return TestClient(app, raise_server_exceptions=False)


def message(content: Any = "a") -> dict[str, Any]:
    return {"role": "user", "content": content}


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": [7] * MANY}, "input.0: must be an object, not 7"),
    (
        "/v1/responses",
        {"input": [message()] * MANY},
        f"input: {MANY} messages, parts and tools are more than the {CONTEXT} tok",
    ),
    ("/v1/chat/completions", {"messages": ["a"] * MANY}, "messages.0: must be an object, not 'a'"),
    ("/v1/chat/completions", {"messages": [message([7] * MANY)]}, "messages.0.content.0: must be an object"),
    ("/v1/messages", {"messages": [7] * MANY, "max_tokens": 1}, "messages.0: must be an object, not 7"),
    ("/api/chat", {"messages": [message()] * MANY}, f"messages: {MANY} messages, parts and t"),
    ("/v1/responses", {"input": [message([{}] * LONG)] * 100}, "input.50.content: 50100 messages, parts and"),
    ("/v1/completions", {"prompt": ["a"] * LONG + [7] * MANY}, f"prompt.{LONG}: must be a text, not 7"),
]


@pytest.mark.parametrize(("path", "body", "problem"), BODIES)
def test_a_long_list_is_refused_before_any_model_reads_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr(long_lists, "_count_errors", lambda *given: pytest.fail("a model has read it"))
    answer = client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(problem)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{}] * (LONG + 1)}),
        ("/v1/chat/completions", {"messages": [message([{}] * (LONG + 1))]}),
        ("/v1/chat/completions", {"messages": [message([{}] * LONG)] * 20}),
        ("/v1/messages", {"messages": [message([{}] * LONG)] * 20, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "stop": [7] * (LONG + 1)}),
        ("/v1/chat/completions", {"messages": [], "stop": [7] * (LONG + 1)}),
    ],
)
def test_errors_of_every_element_are_not_written_down(
    client: TestClient, read: list[str], path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    assert answer.json()["detail"].endswith("Request cannot read")
    assert not read


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [message()] * (LONG + 1)}),
        ("/v1/chat/completions", {"messages": [message(), message("b")] * LONG}),
        ("/v1/chat/completions", {"messages": [message([{"type": "text", "text": "a"}] * 250)] * 8}),
        ("/v1/completions", {"prompt": ["a"] * 2 * CONTEXT}),
        ("/v1/completions", {"prompt": [7] * MANY}),
    ],
)
def test_long_lists_that_a_server_can_take_are_read(
    client: TestClient, read: list[str], path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, json={"model": "m", **body}).json() == "answered"
    assert len(read) == 1


def test_what_is_read_in_pieces_is_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of an agent with many tools: the tools are read with each piece, so pieces have to be few."""
    read: list[int] = []
    validate = ChatCompletionRequest.model_validate
    monkeypatch.setattr(
        ChatCompletionRequest,
        "model_validate",
        lambda piece: read.append(sum(len(each["content"]) for each in piece["messages"])) or validate(piece),
    )
    texts = [{"type": "text", "text": "a"}] * 2
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    body = {"model": "m", "messages": [message(texts)] * 2 * LONG, "tools": [tool] * 128}
    long_lists.check_long_lists(body, ChatCompletionRequest, CONTEXT)
    assert sum(read) == 2 * 2 * LONG
    assert len(read) <= 3 * 2 * LONG / long_lists.PIECE
