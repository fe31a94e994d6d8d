"""``--kv-importance-prewarm idle``: begun when users' requests came and then stayed away, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http import prewarm_route
from sglang_importance.http.prewarm_route import IDLE_SECONDS
from sglang_importance.http.requests import user_requests
from sglang_importance.http.requests.request_hints import _around_generate_request
from sglang_importance.placement.prewarm_request import new_rid
from sglang_importance.upstream.server_options import attach_options

STEP_SECONDS = 0.25
LONG_SECONDS = 5 * IDLE_SECONDS
Sleep = Callable[[float], Awaitable[None]]


class Server:
    """A tokenizer manager that answers at once, and the origins of the pre-warms that were begun beside it.

    Attributes:
        now: its clock, which moves only when somebody sleeps.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.begun: list[str] = []
        self.server_status = ServerStatus.Up
        self.server_args = SimpleNamespace()
        options = {"policy": "importance", "prewarm.at": "idle", "ledger.place": "/ledger"}
        attach_options(self.server_args, ImportanceOptions.of(options))
        self.model_config = SimpleNamespace(vocab_size=100)
        self.rid_to_state: dict[str, Any] = {}
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.last_receive_tstamp = self.now

    def begin(self, origin: str) -> SimpleNamespace:
        """As ``Jobs.begin``, of a job that has ended already."""
        self.begun.append(origin)
        return SimpleNamespace(task=None)

    def answer_control(self) -> None:
        """Any answer of the scheduler, to ``/kv_importance/tree`` say."""
        self.last_receive_tstamp = self.now

    async def generate(self, _: object, obj: Any, request: object) -> AsyncGenerator[dict[str, Any], None]:
        rid = obj.rid or "of a user"
        self.rid_to_state[rid] = SimpleNamespace(dispatched=True, finished=False)
        try:
            await self.may_end.wait()
            self.answer_control()
            yield {}
        finally:
            del self.rid_to_state[rid]

    async def request(self, rid: str | None) -> None:
        obj = GenerateReqInput(rid=rid, sampling_params={}, input_ids=[1])
        async for _ in _around_generate_request(self.generate, self, obj):
            pass


def begun(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Server, Sleep], Awaitable[None]]) -> list[str]:
    """Origins of the pre-warms that began while the scene was played."""
    yield_once = asyncio.sleep

    async def play() -> list[str]:
        server = Server()

        async def sleep(seconds: float) -> None:
            """Lets the clock go on, and whoever looks for idleness look several times at each moment."""
            for _ in range(int(seconds / STEP_SECONDS)):
                server.now += STEP_SECONDS
                for _ in range(10):
                    await yield_once(0)

        async def look_again(seconds: float) -> None:
            await yield_once(0)

        monkeypatch.setattr(user_requests, "time", SimpleNamespace(monotonic=lambda: server.now))
        monkeypatch.setattr(prewarm_route, "tokenizer_manager", lambda: server)
        monkeypatch.setattr(prewarm_route.asyncio, "sleep", look_again)
        unasked = asyncio.create_task(prewarm_route._prewarm_unasked(server, again=True))
        await scene(server, sleep)
        unasked.cancel()
        return server.begun

    return asyncio.run(play())


def test_a_request_is_followed_by_one_pre_warm(monkeypatch: pytest.MonkeyPatch):
    async def scene(server: Server, sleep: Sleep) -> None:
        await sleep(LONG_SECONDS)
        assert server.begun == ["start"]
        await server.request(None)
        await sleep(IDLE_SECONDS - STEP_SECONDS)
        assert server.begun == ["start"]
        await sleep(LONG_SECONDS)

    assert begun(monkeypatch, scene) == ["start", "idle"]


def test_control_answers_health_checks_and_pre_warms_begin_none(monkeypatch: pytest.MonkeyPatch):
    async def scene(server: Server, sleep: Sleep) -> None:
        await sleep(STEP_SECONDS)
        for _ in range(5):
            server.answer_control()
            await server.request("HEALTH_CHECK_1")
            await server.request(new_rid())
            await sleep(2 * IDLE_SECONDS)

    assert begun(monkeypatch, scene) == ["start"]


def test_control_answers_and_health_checks_keep_none_from_beginning(monkeypatch: pytest.MonkeyPatch):
    async def scene(server: Server, sleep: Sleep) -> None:
        await sleep(STEP_SECONDS)
        await server.request(None)
        for _ in range(int(LONG_SECONDS / STEP_SECONDS)):
            server.answer_control()
            await server.request("HEALTH_CHECK_1")
            await sleep(STEP_SECONDS)

    assert begun(monkeypatch, scene) == ["start", "idle"]


def test_requests_in_a_row_and_one_that_runs_long_keep_it_from_beginning(monkeypatch: pytest.MonkeyPatch):
    async def scene(server: Server, sleep: Sleep) -> None:
        await sleep(STEP_SECONDS)
        for _ in range(int(LONG_SECONDS)):
            await server.request(None)
            await sleep(1.0)
        server.may_end.clear()
        running = asyncio.create_task(server.request(None))
        await sleep(LONG_SECONDS)
        server.may_end.set()
        await running
        await sleep(IDLE_SECONDS - STEP_SECONDS)
        assert server.begun == ["start"], "two seconds are counted from its end"
        await sleep(IDLE_SECONDS)

    assert begun(monkeypatch, scene) == ["start", "idle"]


def test_a_request_that_breaks_off_has_ended(monkeypatch: pytest.MonkeyPatch):
    async def scene(server: Server, sleep: Sleep) -> None:
        server.may_end.clear()
        running = asyncio.create_task(server.request("named by its user"))
        await sleep(LONG_SECONDS)
        running.cancel()
        await asyncio.wait([running])
        await sleep(IDLE_SECONDS - STEP_SECONDS)
        assert server.begun == ["start"]
        await sleep(IDLE_SECONDS)

    assert begun(monkeypatch, scene) == ["start", "idle"]
