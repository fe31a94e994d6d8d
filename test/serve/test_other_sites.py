"""What a browser can be made to ask by a page of another site, with and without a key of the server's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import pins_route, same_origin
from sglang_importance.http.routes import install_routes

READS = ("", "/pins", "/tree", "/node/1", "/node/1/prompt", "/events", "/why", "/prewarm", "/prewarm/x")
ACTS = ("/pin", "/unpin", "/find", "/why", "/importance", "/prewarm")


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    install_routes(app, ImportanceOptions(policy="importance"))
    # Without a scheduler what is let through fails in another way.
    return TestClient(app, base_url="http://server:30000", raise_server_exceptions=False)


def statuses(client: TestClient, headers: dict[str, str]) -> dict[str, int]:
    """By method and path, of every route."""
    answers = {f"GET {path}": client.get(f"/kv_importance{path}", headers=headers) for path in READS}
    for path in ACTS:
        answers[f"POST {path}"] = client.post(f"/kv_importance{path}", headers=headers, json={"x": 1})
    answers["DELETE"] = client.delete("/kv_importance/prewarm/x", headers=headers)
    return {name: answer.status_code for name, answer in answers.items()}


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "http://server"},
    {"origin": "http://server:8080"},
    {"origin": "null"},
    {"origin": "http://["},
    {"origin": "http://[v1.x]evil"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://server:30000"},
    {"origin": "http://evil.example", "authorization": "Bearer made-up"},
]
OWN = [
    {},
    {"origin": "http://server:30000"},
    {"origin": "http://SERVER:30000"},
    {"sec-fetch-site": "same-origin", "origin": "https://name.of.the.proxy"},
    {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_no_route_answers_a_page_of_another_site(client: TestClient, headers: dict[str, str]):
    assert set(statuses(client, headers).values()) == {403}


def test_every_route_is_tried(client: TestClient):
    paths = {path for path in client.app.openapi()["paths"] if path.startswith("/kv_importance")}
    tried = {f"/kv_importance{path}" for path in (*READS, *ACTS)}
    tried = {path.replace("/node/1", "/node/{node_id}").replace("/x", "/{job_id}") for path in tried}
    assert paths == tried


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_server_s_own_page_and_programs_are_answered(client: TestClient, headers: dict[str, str]):
    assert 403 not in statuses(client, headers).values()


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_where_the_server_has_a_key_its_owner_decides(client: TestClient, monkeypatch, name: str):
    arguments = SimpleNamespace(api_key=None, admin_api_key=None)
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=arguments))
    monkeypatch.setattr(same_origin, "get_global_state", lambda: state)
    foreign = {"origin": "http://dashboard.example"}
    assert set(statuses(client, foreign).values()) == {403}
    setattr(arguments, name, "k")
    assert 403 not in statuses(client, foreign).values()


@pytest.mark.parametrize("sent_as", ["text/plain", "application/x-www-form-urlencoded", None])
@pytest.mark.parametrize("path", ACTS)
def test_a_body_must_be_sent_as_json(client: TestClient, path: str, sent_as: str | None):
    headers = {"content-type": sent_as} if sent_as else {}
    answer = client.post(f"/kv_importance{path}", headers=headers, content=b'{"pin_id": "p"}')
    assert answer.status_code == 415
    assert answer.json()["detail"] == (
        f"Content-Type: application/json is wanted, not {sent_as or 'nothing'}"
    )


def test_json_with_a_charset_is_json(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    asked = []

    async def ask(operation: str, arguments: object, **_: object) -> dict[str, str]:
        asked.append(operation)
        return {}

    monkeypatch.setattr(pins_route, "ask", ask)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = client.post("/kv_importance/unpin", headers=headers, content=b'{"pin_id": "p"}')
    assert (answer.status_code, asked) == (200, ["unpin"])


@pytest.mark.parametrize("path", ACTS)
def test_what_is_no_json_is_the_caller_s_error(client: TestClient, path: str):
    headers = {"content-type": "application/json"}
    answer = client.post(f"/kv_importance{path}", headers=headers, content=b"{")
    assert (answer.status_code, answer.json()["detail"]) == (400, "the body is not JSON")
