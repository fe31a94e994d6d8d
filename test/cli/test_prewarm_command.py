"""`sgl-importance prewarm`: follows a job to its end, cancels it on an interrupt, says what became of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sgl_importance.cli import prewarm_command as command
from sgl_importance.cli import server_client as client

JOB = {
    "job_id": "abc",
    "origin": "prompt",
    "state": "running",
    "detail": "",
    "total_tokens": 4000,
    "done_tokens": 1000,
    "hit_tokens": {"device": 0, "host": 0, "storage": 3200},
    "computed_tokens": 800,
    "refused_tokens": 0,
    "seconds": 1.25,
    "max_seconds": 60.0,
}
DONE = {**JOB, "state": "done", "done_tokens": 4000}


class Routes:
    """Answers as the server does; ``states`` are those of the job, one for each look at it."""

    def __init__(self, *states: dict[str, Any] | BaseException) -> None:
        self.states = list(states)
        self.seen: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.seen.append((request.method, request.url.path, body))
        if request.method == "POST":
            return httpx.Response(200, json={"job_id": "abc", "tokens": 4000})
        if request.method == "DELETE":
            return httpx.Response(200, json={**JOB, "state": "cancelled"})
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return httpx.Response(200, json=state)


def run(monkeypatch: pytest.MonkeyPatch, routes: Routes, *arguments: str):
    made = client.Server.__init__

    def with_routes(self, url: str, api_key: str | None = None, **_: Any) -> None:
        made(self, url, api_key, transport=httpx.MockTransport(routes))

    monkeypatch.setattr(client.Server, "__init__", with_routes)
    monkeypatch.setattr(command, "POLL_SECONDS", 0.0)
    return CliRunner().invoke(command.app, list(arguments), env={"COLUMNS": "200"})


def test_a_job_is_followed_to_its_end(monkeypatch):
    routes = Routes(JOB, DONE)
    result = run(monkeypatch, routes, "--text", "some text", "--max-seconds", "5", "--cache-salt", "tenant")
    assert result.exit_code == 0, result.output
    assert "done: 4,000 of 4,000 tokens in 1.2 s (3,200 from storage, 800 computed)" in result.output
    post, *looks = routes.seen
    body = {"text": "some text", "max_seconds": 5.0, "cache_salt": "tenant"}
    assert post == ("POST", "/kv_importance/prewarm", body)
    assert looks == [("GET", "/kv_importance/prewarm/abc", None)] * 2


def test_without_a_prompt_the_ledger_chooses(monkeypatch):
    routes = Routes()
    result = run(monkeypatch, routes, "--no-wait")
    assert result.output == "abc\n"
    assert routes.seen == [("POST", "/kv_importance/prewarm", {})]


def test_an_interrupt_cancels_the_job(monkeypatch):
    routes = Routes(JOB, KeyboardInterrupt())
    result = run(monkeypatch, routes, "--text", "a")
    assert routes.seen[-1] == ("DELETE", "/kv_importance/prewarm/abc", None)
    assert "cancelled: 1,000 of 4,000 tokens" in result.output


def test_a_failed_job_is_an_error(monkeypatch):
    result = run(
        monkeypatch, Routes({**JOB, "state": "failed", "detail": "RuntimeError: gone"}), "--text", "a"
    )
    assert result.exit_code == 2
    assert "error: RuntimeError: gone" in result.output


REFUSED = {**DONE, "done_tokens": 1000, "refused_tokens": 3000, "detail": "too long"}


def test_a_prompt_that_the_server_refuses_is_an_error(monkeypatch):
    result = run(monkeypatch, Routes(REFUSED), "--text", "a")
    assert result.exit_code == 2
    told = "done: 1,000 of 4,000 tokens in 1.2 s (3,200 from storage, 800 computed, 3,000 refused)"
    assert told in result.output
    assert "error: too long" in result.output


def test_what_the_server_takes_of_the_ledger_s_choice_is_done(monkeypatch):
    assert run(monkeypatch, Routes(REFUSED)).exit_code == 0


def test_json_is_the_job(monkeypatch):
    result = run(monkeypatch, Routes(DONE), "--text", "a", "--json")
    assert json.loads(result.stdout) == DONE


def test_two_forms_are_refused(monkeypatch):
    result = run(monkeypatch, Routes(), "--text", "a", "--input-ids", "-")
    assert result.exit_code == 2
    assert "exactly one of" in result.output
