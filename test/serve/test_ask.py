"""From many callers to one scheduler: each gets its own answer, none is refused, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator

from sglang_importance.http import scheduler_client, server_state
from sglang_importance.http.scheduler_client import ask
from sglang_importance.operations.job import Document
from sglang_importance.operations.messages import COMMUNICATOR, KvImportanceReq, KvImportanceReqOutput
from sglang_importance.operations.runner import MAX_JOBS, Desk

CALLERS = 100


class Scheduler:
    """A desk behind sglang's own communicator; messages are answered a little later, in their order."""

    def __init__(self) -> None:
        learning = SimpleNamespace(state=SimpleNamespace(faults=SimpleNamespace(fallback=None)))
        self.desk = Desk(SimpleNamespace(importance=learning), {"count": count})
        self.received = 0
        self.most_jobs = 0
        communicator = FanOutCommunicator(self.receive, fan_out=1)
        self.manager = SimpleNamespace(auto_create_handle_loop=lambda: None)
        setattr(self.manager, f"{COMMUNICATOR}_communicator", communicator)
        self.reply = communicator.handle_recv

    def receive(self, message: KvImportanceReq) -> None:
        if message.job is not None:
            reply = self.desk.resume(message.job)
        else:
            reply = self.desk.begin(message.operation, {"to": int(message.arguments.split(":")[1][:-1])})
        self.received += 1
        self.most_jobs = max(self.most_jobs, len(self.desk._jobs))
        answer = KvImportanceReqOutput(**reply._asdict())
        asyncio.get_running_loop().call_later(0.001, self.reply, answer)


def count(_: object, arguments: Document) -> Generator[None, None, Document]:
    """Takes a slice for each number up to ``to``."""
    for _ in range(arguments["to"]):
        yield
    return {"counted": arguments["to"]}


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    scheduler = Scheduler()
    state = SimpleNamespace(tokenizer_manager=scheduler.manager)
    monkeypatch.setattr(server_state, "get_global_state", lambda: state)
    monkeypatch.setattr(scheduler_client, "_places", asyncio.Semaphore(MAX_JOBS))
    return scheduler


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
    assert not scheduler.desk._jobs
