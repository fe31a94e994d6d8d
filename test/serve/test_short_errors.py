"""Bodies that sglang's models refuse are answered at a bounded length."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.requests import short_errors
from sglang_importance.upstream.server_options import attach_options


class Body(BaseModel):
    input: str | list[str | list[str]]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def tell_all(request: Request, error: RequestValidationError) -> PlainTextResponse:
        return PlainTextResponse(f"{error.errors()}", status_code=400)

    @app.post("/ask")
    async def ask(body: Body) -> str:
        return "answered"

    arguments = SimpleNamespace()
    attach_options(arguments, ImportanceOptions(policy="observe"))
    monkeypatch.setattr(short_errors, "tokenizer_manager", lambda: SimpleNamespace(server_args=arguments))
    short_errors.shorten_errors(app)
    return TestClient(app)


@pytest.mark.parametrize("wrong", [list(range(20_000)), {"a": "x" * 100_000}, [["y" * 100_000, 5]] * 100])
def test_an_answer_is_short_however_long_the_body(client: TestClient, wrong: object) -> None:
    answer = client.post("/ask", json={"input": wrong})
    assert answer.status_code == 400
    assert len(answer.text) < 8000
    assert "input" in answer.text


def test_a_right_body_is_answered(client: TestClient) -> None:
    assert client.post("/ask", json={"input": ["a"]}).json() == "answered"
