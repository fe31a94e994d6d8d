"""Threads of upstream's own controller that die: each prefetch gives its host pages back, once."""

from __future__ import annotations

import threading
import time
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  # first: with it come the shims
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchAck

from sglang_importance.storage import guards
from sglang_importance.storage.weights import WATCH

from support.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("watch")


class DyingQueue(Queue):
    """Ends the thread that puts into it or takes out of it, once, where it is told to."""

    dies_at = ""

    def _die(self, place: str) -> None:
        if self.dies_at == place:
            self.dies_at = ""
            raise SystemExit

    def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
        self._die("put")
        super().put(item, *args, **kwargs)
        self._die("put done")

    def get(self, *args: Any, **kwargs: Any) -> Any:
        item = super().get(*args, **kwargs)
        self._die("get")
        return item


class Controller(SimpleNamespace):
    """As much of a controller as its loops of prefetches use."""

    def __init__(self) -> None:
        super().__init__(
            storage_stop_event=threading.Event(),
            prefetch_buffer=DyingQueue(),
            prefetch_sync_queue=DyingQueue(),
            ack_prefetch_queue=Queue(),
            transferred=[],
        )
        self.threads = [
            threading.Thread(target=target, daemon=True) for target in (self._transfer_loop, self._sync_loop)
        ]
        for thread in self.threads:
            thread.start()

    def _transfer_loop(self) -> None:
        guards._around_prefetch_io_loop(HiCacheController.prefetch_io_aux_func, self)

    def _sync_loop(self) -> None:
        HiCacheController.prefetch_sync_thread_func(self)

    def _page_transfer(self, operation: Any) -> None:
        guards._around_page_transfer(
            lambda self, operation: self.transferred.append(operation), self, operation
        )

    def _reduce_prefetch_ack(self, ack: PrefetchAck) -> None:
        guards._around_reduce_ack(lambda controller, ack: None, self, ack)

    def completed(self, expected: int = 1) -> list[Any]:
        """Operations whose last acknowledgement reaches the scheduler: as many, and what follows at once."""
        found: list[Any] = []

        def are_there() -> bool:
            acks = [self.ack_prefetch_queue.get() for _ in range(self.ack_prefetch_queue.qsize())]
            found.extend(ack.operation for ack in acks if ack.completed_req)
            return len(found) >= expected

        wait_until(are_there)
        time.sleep(0.3)
        are_there()
        return found

    def stop(self) -> None:
        self.storage_stop_event.set()
        for thread in self.threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("queue", "place"),
    [("prefetch_sync_queue", "put"), ("prefetch_sync_queue", "put done"), ("prefetch_buffer", "none")],
)
def test_a_prefetch_whose_thread_dies_gives_its_pages_back_once(queue: str, place: str) -> None:
    controller = Controller()
    operations = [SimpleNamespace(request_id=str(number)) for number in range(3)]
    controller.prefetch_buffer.put(operations[0])
    assert controller.completed() == operations[:1]
    getattr(controller, queue).dies_at = place
    controller.prefetch_buffer.put(operations[1])
    assert controller.completed() == operations[1:2]
    controller.prefetch_buffer.put(operations[2])
    assert controller.completed() == operations[2:]
    assert controller.transferred == operations
    assert WATCH.counters["thread_faults"] == (place != "none")
    controller.stop()


def test_a_thread_that_dies_between_prefetches_acknowledges_none_again() -> None:
    controller = Controller()
    operation = SimpleNamespace(request_id="a")
    controller.prefetch_buffer.put(operation)
    assert controller.completed() == [operation]
    controller.prefetch_buffer.dies_at = "get"
    controller.prefetch_buffer.put(None)
    wait_until(lambda: WATCH.counters["thread_faults"])
    assert controller.completed(0) == []
    assert WATCH.counters["thread_faults"] == 1
    controller.stop()


@pytest.mark.parametrize("error", [OSError("the disk is gone"), SystemExit()], ids=["error", "exit"])
@pytest.mark.parametrize(
    ("step", "nothing"),
    [
        ("_storage_hit_query", ([], 0)),
        ("_page_transfer_kv_batch", 0),
        ("_page_transfer", None),
        ("_page_backup", None),
    ],
)
def test_a_step_that_fails_has_found_nothing_and_its_thread_goes_on(
    step: str, nothing: Any, error: BaseException
) -> None:
    around, _ = guards.HOOKS[f"{guards._HYBRID}.{step}"]

    def fail(controller: Any, operation: Any) -> None:
        raise error

    assert around(fail, SimpleNamespace(host_memory_mode="cache"), SimpleNamespace()) == nothing
    assert WATCH.counters["thread_faults"] == 1


def test_below_tiered_pages_no_hit_is_longer_than_the_staging_buffer() -> None:
    around, _ = guards.HOOKS[f"{guards._HYBRID}._storage_hit_query"]
    hashes = [str(page) for page in range(10)]

    def found(mode: str) -> tuple[list[str], int]:
        controller = SimpleNamespace(host_memory_mode=mode, prefetch_capacity_limit=100, page_size=16)
        answer: tuple[list[str], int] = around(lambda *_: (hashes, 160), controller, SimpleNamespace())
        return answer

    assert found("cache") == (hashes, 160)
    assert found("buffer_only") == (hashes[:6], 96)
