"""The jobs of ``/kv_importance/prewarm``: every one ends, and its seconds with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import HTTPException

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import prewarm_route
from sglang_importance.http.prewarm_route import MAX_RUNNING, Jobs
from sglang_importance.http.prewarming import Job, State

PAGE = 16
Ask = Callable[[str, dict[str, Any]], Awaitable[list[Any]]]


async def refused(operation: str, arguments: dict[str, Any]) -> list[Any]:
    raise HTTPException(status_code=503, detail="the scheduler is busy")


async def broken(operation: str, arguments: dict[str, Any]) -> list[Any]:
    raise KeyError("ledger")


async def never(operation: str, arguments: dict[str, Any]) -> list[Any]:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("ask", "state", "detail"),
    [
        (refused, State.FAILED, "the scheduler is busy"),
        (broken, State.FAILED, "KeyError: 'ledger'"),
        (never, State.CANCELLED, ""),
    ],
)
def test_a_job_that_ends_early_takes_no_more_time(
    monkeypatch: pytest.MonkeyPatch, ask: Ask, state: State, detail: str
):
    monkeypatch.setattr(prewarm_route, "ask_each", ask)

    async def end_one() -> Job:
        jobs = Jobs(ImportanceOptions(policy="importance"))
        job = jobs.begin("ledger")
        await asyncio.sleep(0)
        if state is State.CANCELLED:
            await jobs.cancel(job)
        assert job.task is not None
        await job.task
        return job

    job = asyncio.run(end_one())
    assert (job.state, job.detail) == (state, detail)
    assert job.ended is not None
    assert job.describe()["seconds"] == round(job.ended - job.began, 3)


def test_a_caller_begins_no_more_than_a_few_dozen_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prewarm_route, "ask_each", never)

    async def begin_many() -> None:
        jobs = Jobs(ImportanceOptions(policy="importance"))
        begun = [jobs.begin("prompt") for _ in range(MAX_RUNNING)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match=r"^503: 64 pre-warms have not ended: wait for one of them"):
            jobs.begin("ledger")
        assert jobs.begin("idle").state is State.RUNNING, "the server's own waits for nobody's"
        assert len(jobs.describe()) == MAX_RUNNING + 1
        for job in begun[:2]:
            await jobs.cancel(job)
        assert jobs.begin("ledger").state is State.RUNNING

    asyncio.run(begin_many())


@pytest.mark.parametrize("free_tokens", [0, 100 + PAGE - 1])
def test_without_room_the_ledger_is_not_read(monkeypatch: pytest.MonkeyPatch, free_tokens: int):
    monkeypatch.setattr(prewarm_route, "Ledger", lambda *given, **named: pytest.fail("opened"))
    facts = {"ledger": "/nowhere", "model": "00", "free_tokens": free_tokens, "total_tokens": 1000}
    assert prewarm_route._plan({**facts, "page_size": PAGE}, 60.0) == []
