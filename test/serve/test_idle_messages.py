"""Weights change only while nothing runs: an update waits for that, or is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, UpdateWeightFromDiskReqInput
from sglang.utils import TypeBasedDispatcher

from sglang_importance.operations.idle_messages import NEEDING_IDLENESS, wait_for_idleness

UPDATE = UpdateWeightFromDiskReqInput(model_path="a")


class Scheduler(SimpleNamespace):
    """As much of sglang's as is looked at; it asserts what sglang's handlers assert."""

    def __init__(self) -> None:
        super().__init__(running=0, waiting=0, done=[], sent=[], flushes_looked_for=0, _engine_paused=False)
        self.server_args = SimpleNamespace(enable_dp_attention=False)
        channel = SimpleNamespace(send_output=lambda answer, request: self.sent.append((answer, request)))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=channel)
        self.flush_wrapper = SimpleNamespace(check_pending=self.look_for_a_flush)
        kinds = [getattr(io_struct, name) for name in NEEDING_IDLENESS]
        self._request_dispatcher = TypeBasedDispatcher([(kind, self.handle) for kind in kinds])
        wait_for_idleness(self)  # type: ignore[arg-type]

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        return not self.running and (ignore_waiting or not self.waiting)

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
