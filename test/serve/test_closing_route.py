"""``/close_session`` reaches sglang's own handler, whatever became of our question to the scheduler."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import scheduler_client, server_state
from sglang_importance.http.requests.session_route import closing
from sglang_importance.operations.messages import KvImportanceReqOutput
from sglang_importance.operations.runner import MAX_JOBS
from sglang_importance.upstream.server_options import attach_options

OPENED = '{"session_id": "a", "was_open": false, "is_opened": true}'


class GoneClient:
    """A request whose client hung up once it was sent."""

    async def json(self) -> dict[str, Any]:
        return {"session_id": "a"}

    async def is_disconnected(self) -> bool:
        return True


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sessions that sglang's handler was told of, by a route whose scheduler knows the session."""
    arguments = SimpleNamespace(dp_size=1)
    attach_options(arguments, ImportanceOptions(policy="importance"))
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=arguments))
    monkeypatch.setattr(server_state, "get_global_state", lambda: state)
    monkeypatch.setattr(scheduler_client, "_places", asyncio.Semaphore(MAX_JOBS))
    answers(monkeypatch, KvImportanceReqOutput(document=OPENED))
    return []


def answers(monkeypatch: pytest.MonkeyPatch, reply: KvImportanceReqOutput) -> None:
    async def ask_schedulers(*_: Any) -> list[KvImportanceReqOutput]:
        return [reply]

    monkeypatch.setattr(scheduler_client, "ask_schedulers", ask_schedulers)


def close(closed: list[str]) -> Any:
    async def close_session(obj: Any, request: Any) -> None:
        closed.append(obj.session_id)

    return asyncio.run(closing(close_session)(SimpleNamespace(session_id="a"), GoneClient()))


def test_a_client_that_has_hung_up_has_closed_its_session(closed: list[str]) -> None:
    assert close(closed) == {"session_id": "a", "was_open": False}
    assert closed == ["a"]


def test_a_session_is_closed_while_many_questions_wait(
    closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "MAX_WAITING", -MAX_JOBS)
    close(closed)
    assert closed == ["a"]


def test_a_fault_of_ours_keeps_no_session_open(closed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, KvImportanceReqOutput(error="broken", status=500))
    with pytest.raises(HTTPException, match="broken"):
        close(closed)
    assert closed == ["a"]
