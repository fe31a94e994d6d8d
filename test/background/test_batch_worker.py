"""The thread behind recordings, the ledger and the shadow caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.background.batch_worker import BatchWorker

from support.waiting import HANG_SECONDS, wait_until

LAST_WORDS = "nothing is counted any more"


class Book:
    """Notes what a worker is given; holds it up until told, and raises at an item of ``poison``."""

    def __init__(self, *, poison: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.refused = 0
        self.may_go_on = threading.Event()
        self.log: list[str] = []
        self._poison = poison

    def note(self, items: list[int], refused: int) -> None:
        assert self.may_go_on.wait(HANG_SECONDS)
        self.batches.append(items)
        self.refused += refused
        if self._poison in items:
            raise OSError("the disk is full")

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.log.append("open")
        try:
            yield
        except OSError:
            self.log.append("failed")
            raise
        finally:
            self.log.append("closed")

    @property
    def items(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


def started(book: Book, **more: object) -> BatchWorker[int]:
    worker = BatchWorker(
        "a-worker",
        book.note,
        **{"max_bytes": 1000, "last_words": LAST_WORDS, "resource": book.opened(), **more},
    )
    worker.start()
    return worker


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    max_bytes=st.integers(0, 100),
    batch_items=st.none() | st.integers(1, 4),
)
def test_what_fits_is_worked_on_once_in_order_and_the_rest_is_counted(
    sizes: list[int], max_bytes: int, batch_items: int | None
) -> None:
    book = Book()
    worker = BatchWorker("a-worker", book.note, max_bytes=max_bytes, last_words="", batch_items=batch_items)
    accepted, room = [], max_bytes
    for number, size in enumerate(sizes):  # nothing is taken out before the start
        fits = size <= room
        assert worker.offer(number, size) == fits
        if fits:
            accepted.append(number)
            room -= size
    assert worker.unfinished == len(accepted)
    book.may_go_on.set()
    worker.start()
    wait_until(lambda: not worker.unfinished, look_every=0.001)
    assert book.items == accepted
    assert worker.offer(len(sizes), max_bytes), "all room is free again"
    worker.close()
    assert book.items == [*accepted, len(sizes)]
    assert book.refused == worker.dropped == len(sizes) - len(accepted)
    assert worker.unfinished == 0
    assert not worker.has_failed
    assert all(len(batch) <= (batch_items or len(sizes) + 1) for batch in book.batches)


@settings(max_examples=30, deadline=None)
@given(
    per_thread=st.lists(st.integers(1, 60), min_size=2, max_size=4), batch_items=st.sampled_from([None, 1, 3])
)
def test_many_may_offer_and_each_sees_its_own_order(per_thread: list[int], batch_items: int | None) -> None:
    book = Book()
    book.may_go_on.set()
    worker = started(book, max_bytes=50, batch_items=batch_items)
    taken: list[list[int]] = [[] for _ in per_thread]

    def offer(which: int) -> None:
        for number in range(per_thread[which]):
            if worker.offer(1000 * which + number, 1):
                taken[which].append(1000 * which + number)

    threads = [threading.Thread(target=offer, args=(which,)) for which in range(len(per_thread))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.close()
    for which, mine in enumerate(taken):
        assert [item for item in book.items if item // 1000 == which] == mine
    assert len(book.items) + worker.dropped == sum(per_thread)


def test_all_that_waits_is_one_batch() -> None:
    book = Book()
    worker = started(book)
    worker.offer(0, 1)
    wait_until(lambda: worker.unfinished == 1)
    for number in range(1, 6):
        assert worker.offer(number, 1)
    book.may_go_on.set()
    worker.close()
    assert next(batch for batch in book.batches if 5 in batch)[-5:] == [1, 2, 3, 4, 5]


def test_close_waits_for_the_work_and_then_closes_the_resource() -> None:
    book = Book()
    worker = started(book)
    worker.offer(1, 1)
    closing = threading.Thread(target=worker.close)
    closing.start()
    wait_until(lambda: worker.is_closing)
    assert not worker.offer(2, 1)
    assert closing.is_alive()
    assert book.log in (["open"], [])
    book.may_go_on.set()
    closing.join(HANG_SECONDS)
    assert book.items == [1]
    assert book.refused == worker.dropped == 1
    assert book.log == ["open", "closed"]
    worker.close()


def test_an_exception_ends_it_with_one_line_and_refuses_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    book = Book(poison=2)
    worker = started(book, batch_items=1)
    for number in range(5):
        worker.offer(number, 1)
    book.may_go_on.set()
    wait_until(lambda: worker.has_failed)
    assert not worker.offer(9, 1)
    worker.close()
    assert book.items == [0, 1, 2]
    assert worker.dropped == 3
    assert book.log == ["open", "failed", "closed"]
    (line,) = caplog.records
    assert line.message == LAST_WORDS
    assert "the disk is full" in caplog.text


def test_a_resource_that_cannot_be_closed_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def unclosable() -> Iterator[None]:
        yield
        raise OSError("read-only file system")

    book = Book()
    book.may_go_on.set()
    worker = started(book, resource=unclosable())
    worker.offer(1, 1)
    worker.close()
    assert book.items == [1]
    assert worker.has_failed
    assert "read-only file system" in caplog.text


def test_an_idle_worker_looks_after_its_things_and_once_more_at_the_end() -> None:
    book = Book()
    book.may_go_on.set()
    worker = started(book, idle_seconds=0.01)
    wait_until(lambda: len(book.batches) > 3)
    worker.close()
    assert not book.items
    quiet = Book()
    quiet.may_go_on.set()
    started(quiet).close()
    assert quiet.batches == [[]]


def test_a_pause_gathers_items_and_a_close_ends_it() -> None:
    book = Book()
    book.may_go_on.set()
    worker = started(book, pause_seconds=10 * HANG_SECONDS)
    worker.offer(0, 1)
    wait_until(lambda: book.batches)
    for number in range(1, 4):
        worker.offer(number, 1)
    time.sleep(0.05)  # a worker that does not pause would have them
    assert book.items == [0]
    worker.close()
    assert book.batches[:2] == [[0], [1, 2, 3]]
