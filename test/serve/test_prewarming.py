"""The executor: one step at a time, behind every request, accounted by tier, ended when it should be."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from sgl_importance.placement.prewarm.ledger_plan import WarmPath
from sglang_importance.http.prewarming import (
    STEP_SECONDS,
    Job,
    Prewarmer,
    State,
    StepSize,
    requests_under_way,
)
from sglang_importance.placement.prewarm_request import is_prewarm, new_rid

from support.waiting import HANG_SECONDS

PAGE = 16
STEP = 64


@dataclass
class Manager:
    """Answers like a tokenizer manager whose server holds ``tiers`` and computes the rest."""

    tiers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    refuse_above: int = 10**9
    rid_to_state: dict = field(default_factory=dict)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    overlapping: int = 0
    gracefully_exit: bool = False
    enable_lora: bool = False

    async def generate_request(self, request, _):
        assert is_prewarm(request.rid)
        assert request.sampling_params["max_new_tokens"] == 1
        if len(request.input_ids) > self.refuse_above:
            raise ValueError("too long")
        assert not self.overlapping
        waiting = (rid for rid, state in self.rid_to_state.items() if not state.time_stats.first_token_time)
        assert all(map(is_prewarm, waiting))
        self.overlapping += 1
        self.steps.append((request.cache_salt, *request.input_ids))
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.overlapping -= 1
        on_device = max((len(step) - 2 for step in self.steps[:-1]), default=0)
        found = {"device": min(on_device, len(request.input_ids) - 1)}
        left = len(request.input_ids) - 1 - found["device"]
        for tier in ("host", "storage"):
            found[tier] = min(max(self.tiers.get(tier, 0), 0), left)
            self.tiers[tier] = self.tiers.get(tier, 0) - found[tier]
            left -= found[tier]
        yield {"meta_info": {"finish_reason": {"type": "length"}, "cached_tokens_details": found}}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


async def plenty(_: int) -> dict:
    return {"free_tokens": 10**6, "total_tokens": 10**6}


def job(**settings) -> Job:
    return Job("id", "ledger", **{"asked_for": False, "max_seconds": 60.0, **settings})


def path(tokens: int, *ends: int, start: int = 0) -> WarmPath:
    return WarmPath((None, "salt"), array("q", range(tokens)), start, ends or (tokens,))


def run(manager: Manager, the_job: Job, *paths: WarmPath, room=plenty, page: int = PAGE) -> None:
    prewarmer = Prewarmer(manager, room, page_size=page, min_step_tokens=STEP)
    asyncio.run(prewarmer.run(the_job, [paths]))


def test_steps_end_where_nodes_end_and_every_token_is_counted_once():
    manager, the_job = Manager(), job()
    run(manager, the_job, path(400, 80, 96, 300, 400))
    assert [len(step) - 2 for step in manager.steps][-1] == 400
    assert {80, 300} <= {len(step) - 2 for step in manager.steps}
    assert the_job.state is State.DONE
    assert the_job.total_tokens == the_job.done_tokens == the_job.computed_tokens == 400
    assert manager.steps[0][0] == "salt"
    # One token more than the pages, so that the last page is hit whole.
    assert manager.steps[-1][1:] == (*range(400), 399)


def test_hits_are_told_by_tier():
    manager, the_job = Manager(tiers={"host": 100, "storage": 60}), job()
    run(manager, the_job, path(400))
    assert the_job.hit_tokens == {"device": 0, "host": 100, "storage": 60}
    assert the_job.computed_tokens == 240
    again = job()
    prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
    asyncio.run(prewarmer.run(again, [[path(400)]]))
    assert (again.hit_tokens["device"], again.computed_tokens) == (400, 0)


def test_at_a_page_size_of_one_no_token_is_added():
    manager = Manager()
    run(manager, job(), path(70), page=1)
    assert manager.steps[-1][1:] == tuple(range(70))


def test_what_earlier_paths_brought_is_not_counted_again():
    manager, the_job = Manager(), job()
    run(manager, the_job, path(160), path(240, start=160))
    assert the_job.total_tokens == the_job.done_tokens == 240


def test_steps_follow_the_time_that_they_take():
    steps = StepSize(64)
    for _ in range(20):
        steps.took(STEP_SECONDS / 10)
    assert steps.tokens == 8192
    steps.took(STEP_SECONDS * 0.7)
    assert steps.tokens == 8192
    for _ in range(20):
        steps.took(STEP_SECONDS * 3)
    assert steps.tokens == 64


def state(first_token_time: float = 0.0, finished: bool = False, dispatched: bool = True) -> SimpleNamespace:
    times = SimpleNamespace(first_token_time=first_token_time)
    return SimpleNamespace(finished=finished, dispatched=dispatched, time_stats=times)


@pytest.mark.parametrize("asked_for", [True, False])
def test_no_step_begins_while_a_request_waits(asked_for: bool):
    """``Manager.generate_request`` fails the test where one does."""
    manager, the_job = Manager(seconds=0.005), job(asked_for=asked_for)

    async def users() -> None:
        prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
        running = asyncio.create_task(prewarmer.run(the_job, [[path(4000)]]))
        for number in range(5):
            while manager.overlapping:
                await asyncio.sleep(0)
            steps = len(manager.steps)
            manager.rid_to_state[f"user {number}"] = state()
            await asyncio.sleep(0.05)
            assert len(manager.steps) == steps
            manager.rid_to_state.clear()
            await asyncio.sleep(0.02)
        await running

    asyncio.run(users())
    assert the_job.done_tokens == 4000


def test_only_what_was_asked_for_runs_beside_decoding_requests():
    async def is_busy(asked_for: bool, known: SimpleNamespace) -> bool:
        manager = Manager(rid_to_state={"user": known})
        prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
        return prewarmer._is_busy(any_request=not asked_for)

    decoding = state(first_token_time=1.0)
    assert asyncio.run(is_busy(True, decoding)) is False
    assert asyncio.run(is_busy(False, decoding)) is True
    assert asyncio.run(is_busy(False, state(finished=True))) is False


def test_what_was_asked_for_does_not_wait_for_what_waits_for_an_idle_server():
    manager = Manager(rid_to_state={"user": state(first_token_time=1.0)})
    unasked, asked_for = job(), job(asked_for=True)

    async def both() -> None:
        prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
        waiting = asyncio.create_task(prewarmer.run(unasked, [[path(200)]]))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(HANG_SECONDS):
            await prewarmer.run(asked_for, [[path(400)]])
            assert (asked_for.done_tokens, unasked.done_tokens) == (400, 0)
            manager.rid_to_state.clear()
            await waiting

    asyncio.run(both())
    assert unasked.done_tokens == 200


def test_a_job_looks_for_requests_again_when_its_turn_comes():
    """``Manager.generate_request`` fails the job that begins a step while a request waits."""
    manager, jobs = Manager(seconds=0.05), [job(asked_for=True), job(asked_for=True)]

    async def both() -> None:
        prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
        running = [asyncio.create_task(prewarmer.run(each, [[path(STEP)]])) for each in jobs]
        while not manager.overlapping:
            await asyncio.sleep(0)
        manager.rid_to_state["user"] = state()
        while manager.overlapping:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert len(manager.steps) == 1
        manager.rid_to_state.clear()
        await asyncio.gather(*running)

    asyncio.run(both())
    assert [each.state for each in jobs] == [State.DONE, State.DONE]


def test_what_no_user_waits_for_is_not_waited_for():
    """As upstream leaves it behind of a streamed request with n > 1: entered, never sent, never finished.

    Nor is a health check, which upstream sends and drops where anything runs.
    """
    left_behind = {"prompt": state(dispatched=False), new_rid(): state(), "HEALTH_CHECK_1": state()}
    manager = Manager()
    prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
    manager.rid_to_state = left_behind
    assert not any(requests_under_way(manager))
    for any_request in (True, False):
        assert prewarmer._is_busy(any_request=any_request) is False
    manager.rid_to_state = {**left_behind, "sample": state()}
    assert len(list(requests_under_way(manager))) == 1


def test_what_nobody_asked_for_ends_with_the_free_room():
    async def room(_: int) -> dict:
        return {"free_tokens": 1000 - sum(len(step) for step in manager.steps), "total_tokens": 1000}

    manager, the_job = Manager(), job()
    run(manager, the_job, path(64), path(5000), room=room)
    assert the_job.detail == "no free room is left"
    assert 0 < the_job.done_tokens < 900
    manager, the_job = Manager(), job(asked_for=True)
    run(manager, the_job, path(5000), room=room)
    assert the_job.done_tokens == 5000


@pytest.mark.parametrize(("short_of", "done"), [(0, STEP), (1, 0)])
def test_what_nobody_asked_for_leaves_a_tenth_of_the_device_free(short_of: int, done: int):
    async def room(_: int) -> dict:
        return {"free_tokens": 100 + STEP - short_of, "total_tokens": 1000}

    the_job = job()
    run(Manager(), the_job, path(STEP), room=room)
    assert the_job.done_tokens == done


def test_time_ends_a_job():
    class Slowing(Manager):
        """Its first step ends at once; the second does not."""

        async def generate_request(self, request, _):
            async for answer in super().generate_request(request, _):
                yield answer
            self.seconds = 3600.0

    manager, the_job = Slowing(), job(max_seconds=0.3)
    run(manager, the_job, path(10_000))
    assert the_job.state is State.DONE
    assert "0.3 seconds were over" in the_job.detail
    assert 0 < the_job.done_tokens < 10_000
    assert len(manager.aborted) == 1


def test_a_cancelled_job_aborts_its_step():
    manager, the_job = Manager(seconds=3600.0), job(max_seconds=3600.0)

    async def cancel() -> None:
        prewarmer = Prewarmer(manager, plenty, page_size=PAGE, min_step_tokens=STEP)
        running = asyncio.create_task(prewarmer.run(the_job, [[path(1000)]]))
        while not manager.overlapping:
            await asyncio.sleep(0)
        running.cancel()
        await running

    asyncio.run(cancel())
    assert the_job.state is State.CANCELLED
    assert len(manager.aborted) == 1


def test_a_path_that_the_server_refuses_does_not_end_the_others():
    manager, the_job = Manager(refuse_above=500), job()
    run(manager, the_job, path(64), path(1000, start=640), path(160, start=64))
    assert the_job.state is State.DONE
    assert (the_job.refused_tokens, the_job.done_tokens) == (360, 160)


def test_a_path_that_is_refused_midway_says_why_and_counts_what_is_left_of_it():
    manager, the_job = Manager(refuse_above=200), job(asked_for=True)
    run(manager, the_job, path(400))
    assert the_job.done_tokens > 0
    assert the_job.done_tokens + the_job.refused_tokens == 400
    assert (the_job.state, the_job.detail) == (State.DONE, "too long")


def test_a_stopping_server_is_not_kept():
    manager, the_job = Manager(gracefully_exit=True), job()
    run(manager, the_job, path(64))
    assert (the_job.detail, manager.steps) == ("the server is stopping", [])


def test_an_error_is_the_job_s_end_and_its_detail():
    class Broken(Manager):
        async def generate_request(self, request, _):
            raise RuntimeError("gone")
            yield

    the_job = job()
    run(Broken(), the_job, path(64))
    assert (the_job.state, the_job.detail) == (State.FAILED, "RuntimeError: gone")
