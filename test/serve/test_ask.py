"""From many callers to one scheduler: each gets its own answer, none is refused, nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers.communicator import FanOutCommunicator

from sglang_importance.http import scheduler_client, server_state
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.http.scheduler_client import GONE, ask, validated
from sglang_importance.operations.job import Document
from sglang_importance.operations.messages import COMMUNICATOR, KvImportanceReq, KvImportanceReqOutput
from sglang_importance.operations.runner import MAX_JOBS, Desk, Reply

CALLERS = 100


class Scheduler:
    """Desks behind sglang's own communicator, one for each data-parallel rank; messages are answered a little
    later, in their order, and the last rank takes a slice more than the one before."""

    def __init__(self, ranks: int = 1) -> None:
        learning = SimpleNamespace(state=SimpleNamespace(faults=SimpleNamespace(fallback=None)))
        self.desks = [Desk(SimpleNamespace(importance=learning), {"count": count}) for _ in range(ranks)]
        self.received = 0
        self.most_jobs = 0
        communicator = FanOutCommunicator(self.receive, fan_out=ranks)
        self.manager = SimpleNamespace(auto_create_handle_loop=lambda: None)
        setattr(self.manager, f"{COMMUNICATOR}_communicator", communicator)
        self.reply = communicator.handle_recv

    def receive(self, message: KvImportanceReq) -> None:
        self.received += 1
        for rank, desk in enumerate(self.desks):
            if message.jobs is None:
                reply = desk.begin(message.operation, {"to": json.loads(message.arguments)["to"] + rank})
            elif rank in message.jobs:
                reply = desk.resume(message.jobs[rank])
            else:
                reply = Reply()
            self.most_jobs = max(self.most_jobs, len(desk._jobs))
            answer = KvImportanceReqOutput(**reply._asdict(), dp_rank=rank)
            delay = 0.001 * (len(self.desks) - rank)
            asyncio.get_running_loop().call_later(delay, self.reply, answer)


def count(_: object, arguments: Document) -> Generator[None, None, Document]:
    """Takes a slice for each number up to ``to``."""
    for _ in range(arguments["to"]):
        yield
    return {"counted": arguments["to"]}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Scheduler]:
    def start(ranks: int) -> Scheduler:
        scheduler = Scheduler(ranks)
        state = SimpleNamespace(tokenizer_manager=scheduler.manager)
        monkeypatch.setattr(server_state, "get_global_state", lambda: state)
        monkeypatch.setattr(scheduler_client, "_places", asyncio.Semaphore(MAX_JOBS))
        return scheduler

    return start


@pytest.fixture
def scheduler(start: Callable[[int], Scheduler]) -> Scheduler:
    return start(1)


def test_every_rank_answers_however_many_slices_it_takes(start: Callable[[int], Scheduler]):
    scheduler = start(3)
    assert asyncio.run(ask("count", {"to": 0})) == {"dp_ranks": [{"counted": rank} for rank in range(3)]}
    assert asyncio.run(ask("count", {"to": 0}, dp_rank=2)) == {"counted": 2}
    with pytest.raises(HTTPException, match="the last one is 2"):
        asyncio.run(ask("count", {"to": 0}, dp_rank=3))
    assert not any(desk._jobs for desk in scheduler.desks)


def test_a_rank_that_refuses_has_no_answer(start: Callable[[int], Scheduler]):
    scheduler = start(2)
    scheduler.desks[0].operations = {}
    scheduler.desks[0]._failed = lambda _: Reply(error="not here", status=404)
    assert asyncio.run(ask("count", {"to": 1})) == {"dp_ranks": [None, {"counted": 2}]}
    with pytest.raises(HTTPException, match="not here"):
        asyncio.run(ask("count", {"to": 1}, dp_rank=0))


def test_what_is_wrong_is_said_without_pydantic_s_own_words():
    with pytest.raises(HTTPException) as refused:
        validated(Prompt, {"text": "x", "input_ids": [1]})
    assert "give exactly one of" in refused.value.detail
    assert "Value error" not in refused.value.detail


def test_however_many_ask_at_once_all_are_answered(scheduler: Scheduler):
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(ask("count", {"to": 2 + number % 5}) for number in range(CALLERS)))

    answers = asyncio.run(all_at_once())
    assert [answer["counted"] for answer in answers] == [2 + number % 5 for number in range(CALLERS)]
    assert scheduler.most_jobs == MAX_JOBS, "several are under way at once, or nothing was tested"


def test_who_gives_up_leaves_nobody_his_answer_and_no_job(scheduler: Scheduler):
    """A pre-warm that is cancelled or out of time gives up in the middle of a question."""

    async def run() -> Document:
        gives_up = asyncio.create_task(ask("count", {"to": 3}))
        while not scheduler.received:
            await asyncio.sleep(0)
        gives_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gives_up
        answer = await ask("count", {"to": 1})
        while scheduler_client._under_way:
            await asyncio.sleep(0)
        return answer

    assert asyncio.run(run()) == {"counted": 1}
    assert not scheduler.desks[0]._jobs


class Caller:
    """As much of a request as a question needs."""

    has_gone = False

    async def is_disconnected(self) -> bool:
        return self.has_gone


def test_questions_of_callers_that_have_gone_are_not_asked(scheduler: Scheduler):
    """While the scheduler is busy callers run out of time, one after the other."""
    gone, stays = Caller(), Caller()

    async def run() -> list[Any]:
        busy = [asyncio.create_task(ask("count", {"to": 3})) for _ in range(MAX_JOBS)]
        questions = [ask("count", {"to": 0}, request=caller) for caller in (gone, stays, gone)]
        waiting = [asyncio.create_task(question) for question in questions]
        while scheduler.received < MAX_JOBS:
            await asyncio.sleep(0)
        gone.has_gone = True
        await asyncio.gather(*busy)
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert (first.status_code, third.status_code) == (GONE, GONE)
    assert second == {"counted": 0}
    assert scheduler.received == MAX_JOBS * 4 + 1, (
        "a message for each slice of the others, and one of who stays"
    )


def test_of_too_many_requests_the_last_are_refused_and_our_own_questions_are_not(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler_client, "MAX_WAITING", 2)

    async def run() -> list[Any]:
        asked = [ask("count", {"to": 1}, request=Caller()) for _ in range(MAX_JOBS + 4)]
        asked.append(ask("count", {"to": 1}))
        return await asyncio.gather(*asked, return_exceptions=True)

    *answers, ours = asyncio.run(run())
    assert [answer for answer in answers if isinstance(answer, dict)] == [{"counted": 1}] * (MAX_JOBS + 2)
    assert [answer.status_code for answer in answers[-2:]] == [503, 503]
    assert ours == {"counted": 1}
    assert scheduler.most_jobs == MAX_JOBS
