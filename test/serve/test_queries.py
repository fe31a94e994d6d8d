"""A query string that a route cannot read is its caller's error, also in a router that the app includes."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from sglang_importance.http.requests import checked_routes


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(checked_routes, "_is_ours", lambda: True)
    app, router = FastAPI(), APIRouter()

    @router.get("/loads")
    async def loads(include: str = "") -> str:
        if include != "all":
            raise ValueError(f"Invalid include sections: {include}")
        return include

    @app.post("/responses")
    async def respond(request: Request) -> str:
        return str(request.app.state.handler_that_sglang_could_not_import)

    @app.exception_handler(HTTPException)
    async def answer(request: object, error: HTTPException) -> PlainTextResponse:
        return PlainTextResponse(error.detail, error.status_code)

    app.include_router(router)
    checked_routes.check_routes(app)
    return TestClient(app, raise_server_exceptions=False)


def test_it_is_refused_by_its_own_words(client: TestClient):
    answer = client.get("/loads?include=nothing")
    assert (answer.status_code, answer.text) == (400, "Invalid include sections: nothing")
    assert client.get("/loads?include=all").status_code == 200


def test_without_a_query_it_is_the_server_s_error(client: TestClient):
    assert client.get("/loads").status_code == 500


def test_what_sglang_has_not_loaded_is_not_the_client_s_error(client: TestClient):
    answer = client.post("/responses", json={})
    assert (answer.status_code, answer.text.partition(":")[0]) == (
        501,
        "sglang has not loaded what answers this route",
    )
