"""Weights change only while nothing runs: an update waits for that, or is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, UpdateWeightFromDiskReqInput
from sglang.utils import TypeBasedDispatcher

from sgl_importance.embedded_model import checkpoint_path
from sglang_importance.scheduler.idle_messages import COPIES, NEEDING_IDLENESS, wait_for_idleness

from support.served import script_server

UPDATE = UpdateWeightFromDiskReqInput(model_path="a")


class Scheduler(SimpleNamespace):
    """As much of sglang's as is looked at; it asserts what sglang's handlers assert."""

    def __init__(self) -> None:
        super().__init__(running=0, waiting=0, done=[], sent=[], flushes_looked_for=0, _engine_paused=False)
        self.enable_hierarchical_cache, self.tree_cache, self.waiting_queue = False, None, []
        self.server_args = SimpleNamespace(enable_dp_attention=False)
        channel = SimpleNamespace(send_output=lambda answer, request: self.sent.append((answer, request)))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=channel)
        self.flush_wrapper = SimpleNamespace(check_pending=self.look_for_a_flush)
        kinds = [getattr(io_struct, name) for name in NEEDING_IDLENESS]
        self._request_dispatcher = TypeBasedDispatcher([(kind, self.handle) for kind in kinds])
        wait_for_idleness(self)  # type: ignore[arg-type]

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        is_copying = self.tree_cache is not None and self.tree_cache.is_copying()
        return not self.running and not is_copying and (ignore_waiting or not self.waiting)

    def look_for_a_flush(self) -> None:
        self.flushes_looked_for += 1

    def handle(self, request: Any) -> str:
        assert not getattr(request, "flush_cache", True) or self.is_fully_idle(
            ignore_waiting=self._engine_paused
        ), "Cache flush failed after updating weights"
        self.done.append(request)
        return "done"


@pytest.mark.parametrize("message", [UPDATE, ReleaseMemoryOccupationReqInput()])
def test_it_waits_for_what_still_runs(message: Any) -> None:
    scheduler = Scheduler()
    assert scheduler._request_dispatcher(message) == "done"
    scheduler.running = 1
    assert scheduler._request_dispatcher(message) is None
    scheduler.flush_wrapper.check_pending()
    assert scheduler.sent == []
    scheduler.running = 0
    assert scheduler._request_dispatcher(UPDATE) is None, "it would pass the one that waits"
    scheduler.flush_wrapper.check_pending()
    assert scheduler.sent == [("done", message), ("done", UPDATE)]
    assert scheduler.flushes_looked_for == 2
    scheduler.flush_wrapper.check_pending()
    assert len(scheduler.done) == 3


def test_what_a_pause_holds_is_not_waited_for() -> None:
    scheduler = Scheduler()
    scheduler.running, scheduler._engine_paused = 1, True
    answer = scheduler._request_dispatcher(UPDATE)
    assert not answer.success
    assert "flush_cache: false" in answer.message
    kept = UpdateWeightFromDiskReqInput(model_path="a", flush_cache=False)
    assert scheduler._request_dispatcher(kept) == "done"
    scheduler.running, scheduler.waiting = 0, 1  # as behind a pause that retracts
    assert scheduler._request_dispatcher(UPDATE) == "done"
    assert scheduler.done == [kept, UPDATE]


class CopyingCache(SimpleNamespace):
    """The books of a cache with a host tier, a step of which is followed at each look."""

    def __init__(self, **ongoing: int) -> None:
        super().__init__(buffer_pipeline=None, looks=0, stopped=[])
        vars(self).update({name: dict.fromkeys(range(ongoing.get(name, 0))) for name in COPIES})

    def is_copying(self) -> bool:
        return any(getattr(self, name) for name in COPIES)

    def stop_prefetching(self, request: Any) -> None:
        self.stopped.append(request)
        self.ongoing_prefetch.clear()

    def check_hicache_events(self) -> None:
        self.looks += 1
        for name in COPIES:
            if name != "ongoing_prefetch" and (books := getattr(self, name)):
                books.popitem()


def test_copies_of_a_host_tier_end_while_the_server_is_paused() -> None:
    scheduler = Scheduler()
    scheduler.enable_hierarchical_cache = scheduler._engine_paused = True
    scheduler.waiting, scheduler.waiting_queue = 1, [SimpleNamespace(cache_request_handle="waits")]
    cache = scheduler.tree_cache = CopyingCache(ongoing_write_through=2, ongoing_backup=1, ongoing_prefetch=1)
    scheduler.flush_wrapper.check_pending()
    assert cache.looks == 0, "nothing wants them ended"
    assert scheduler._request_dispatcher(UPDATE) is None
    scheduler.flush_wrapper.check_pending()
    assert scheduler.sent == []
    scheduler.flush_wrapper.check_pending()
    assert scheduler.sent == [("done", UPDATE)]
    assert (cache.looks, cache.stopped) == (2, ["waits", "waits"])
    scheduler.running = 1
    assert not scheduler._request_dispatcher(UPDATE).success


@pytest.mark.server
@pytest.mark.nightly
def test_weights_change_when_nothing_runs_any_more() -> None:
    """sglang cannot flush the cache below a request, and ends: a client has left, or a pause holds one."""
    update = {"model_path": str(checkpoint_path())}
    body = {
        "input_ids": list(range(100, 140)),
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        "stream": True,
    }
    with (
        script_server("--kv-policy", "importance", model=checkpoint_path()) as server,
        httpx.Client(base_url=server.base_url, trust_env=False, timeout=120) as client,
    ):
        for number in range(4):  # the abort of who has left and the update are under way together
            with client.stream("POST", "/generate", json=body) as left:
                for _ in zip(range(number + 1), left.iter_lines(), strict=False):
                    pass
            answer = client.post("/update_weights_from_disk", json=update)
            assert answer.status_code == 200, answer.text
        with client.stream("POST", "/generate", json=body) as held:
            lines = held.iter_lines()
            next(lines)
            client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
            try:
                answer = client.post("/update_weights_from_disk", json=update)
                kept = client.post("/update_weights_from_disk", json={**update, "flush_cache": False})
            finally:
                client.post("/continue_generation", json={}).raise_for_status()
            assert (answer.status_code, kept.status_code) == (400, 200), answer.text
            assert "pause with mode retract or abort" in answer.text
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.generate([5, 6], max_new_tokens=1)
