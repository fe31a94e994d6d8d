"""Disks that are slow or hang: what waits for them stays bounded, and the store goes on as far as it can."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from sgl_importance.background.daemon_pool import MOST_GIVEN_UP, Call, DaemonPool
from sgl_importance.storage import page_transfer
from sgl_importance.storage.late_call import LateCall
from sgl_importance.storage.page_record import MissReason, PageMiss
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.pages import Page, PageByPage
from sgl_importance.storage.store_counters import StoreCounters

from support.waiting import HANG_SECONDS, wait_until

PAGE_BYTES = 1 << 16
MODEL = bytes(32)


class HeldPages(PageByPage):
    """Pages whose writes or touches wait until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.holds_writes = True
        self.holds_touches = False
        self.holds_looks = False
        self.written: list[str] = []
        self.moments: list[int] = []
        self.touched: list[str] = []
        """Last page of each sequence that was touched."""
        self.order: list[str] = []

    def exists(self, identity: bytes, key: str) -> bool:
        if self.holds_looks:
            self.go_on.wait(60)
        return False

    def read(self, identity: bytes, key: str, body: Page) -> None:
        raise PageMiss(MissReason.ABSENT)

    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        if self.holds_writes:
            self.go_on.wait(60)
        self.written.append(key)
        self.moments.append(moment)
        self.order.append("write")
        return True

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        if self.holds_touches:
            self.go_on.wait(60)
        self.touched.append(keys[-1])
        self.moments.append(moment)
        self.order.append("touch")


@pytest.fixture
def pages() -> Iterator[HeldPages]:
    held = HeldPages()
    yield held
    held.go_on.set()


def open_transfer(pages: PageByPage, timeout: float = HANG_SECONDS) -> PageTransfer:
    return PageTransfer(pages, page_bytes=PAGE_BYTES, timeout=timeout, counters=StoreCounters())


def nothing(index: int, body: Page) -> None: ...


def test_a_hung_disk_does_not_hoard_what_was_to_be_written(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_transfer, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(page_transfer, "HANG_SECONDS", 0.05)  # so that threads are given up, too
    monkeypatch.setattr(LateCall, "hangs", lambda late: False)  # as if each came a while later
    transfer = open_transfer(pages, timeout=0.01)
    run = pages.run_pages(PAGE_BYTES)
    batch = 4 * run
    bodies: list[weakref.ref[np.ndarray]] = []

    def copy_page(index: int, body: Page) -> None:
        bodies.append(weakref.ref(body))

    for number in range(50):
        keys = [f"{number}-{index}" for index in range(batch)]
        assert transfer.write(MODEL, keys, copy_page) == [False] * batch
    assert len(bodies) >= 50 * run
    alive = sum(body() is not None for body in bodies)
    assert alive <= (pages.lanes(PAGE_BYTES).write + MOST_GIVEN_UP) * run
    assert transfer.counters.values()["unwritten_pages", "timeout"] == 50 * batch
    pages.go_on.set()
    monkeypatch.setattr(page_transfer, "WRITE_SECONDS", 60.0)
    # What was given up before its turn came is not written late; what comes now is written as ever.
    assert transfer.write(MODEL, ["new"], copy_page) == [True]
    written = list(pages.written)
    assert len(written) == len(set(written)) <= alive + 1
    transfer.close()


class Keys(list[str]):
    """Of a prompt; a plain list takes no weak reference."""


def test_a_hung_disk_does_not_hoard_what_was_asked_for(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_transfer, "HANG_SECONDS", 0.05)  # so that threads are given up, too
    monkeypatch.setattr(LateCall, "hangs", lambda late: False)  # as if each came a while later
    pages.holds_looks = True
    transfer = open_transfer(pages, timeout=0.01)
    asked: list[weakref.ref[Keys]] = []
    for number in range(50):
        keys = Keys([str(number)])
        asked.append(weakref.ref(keys))
        assert transfer.count_present(MODEL, keys) == 0
    del keys
    alive = sum(keys() is not None for keys in asked)
    assert alive <= pages.lanes(PAGE_BYTES).look + MOST_GIVEN_UP
    pages.go_on.set()
    transfer.close()


def test_while_a_look_or_a_write_hangs_the_next_do_not_wait(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for its whole limit; those that come while it hangs ask no disk, and start no thread."""
    monkeypatch.setattr(page_transfer, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(page_transfer, "HANG_SECONDS", HANG_SECONDS)
    pages.holds_looks = True
    transfer = open_transfer(pages, timeout=0.01)
    looks, writes = calls_of(transfer._lookers, monkeypatch), calls_of(transfer._writers, monkeypatch)
    for _ in range(20):
        assert transfer.count_present(MODEL, ["a"]) == 0
        assert transfer.write(MODEL, ["a"], nothing) == [False]
    assert (len(looks), len(writes)) == (1, 1)
    counted = transfer.counters.values()
    assert counted["missed_pages", "timeout"] == counted["unwritten_pages", "timeout"] == 20
    # The disk is mended.
    monkeypatch.setattr(page_transfer, "WRITE_SECONDS", HANG_SECONDS)
    pages.holds_looks = False
    pages.go_on.set()
    wait_until(lambda: not transfer._late_look.hangs() and not transfer._late_write.hangs())
    assert transfer.write(MODEL, ["b"], nothing) == [True]
    transfer.count_present(MODEL, ["b"])
    assert (len(looks), len(writes)) == (2, 2)
    transfer.close()


def test_a_disk_that_hangs_is_tried_once_in_a_while(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pages.holds_looks = True
    transfer = open_transfer(pages, timeout=0.01)
    looks = calls_of(transfer._lookers, monkeypatch)
    for tries in range(1, 4):
        for _ in range(5):
            assert transfer.count_present(MODEL, ["a"]) == 0
        assert len(looks) == tries
        now += page_transfer.HANG_SECONDS
    transfer.close()


def calls_of(pool: DaemonPool, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What is submitted to it from now on."""
    calls: list[Call] = []
    submit = pool.submit

    def counted(call: Call) -> None:
        calls.append(call)
        submit(call)

    monkeypatch.setattr(pool, "submit", counted)
    return calls


# ---- what nobody waits for ----


def test_touches_that_hang_keep_no_write_back_and_do_not_pile_up(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_transfer, "TOUCH_SECONDS", 0.001)
    monkeypatch.setattr(page_transfer, "HANG_SECONDS", HANG_SECONDS)  # no other thread takes over
    pages.holds_writes, pages.holds_touches = False, True
    transfer = open_transfer(pages, timeout=0.01)
    turns = 3 * page_transfer.MOST_AT_LEISURE
    for turn in range(turns):
        assert transfer.write(MODEL, [f"new{turn}"], nothing, prefix=["document", f"turn{turn}"]) == [True]
    assert pages.touched == []
    pages.go_on.set()
    wait_until(lambda: f"turn{turns - 1}" in pages.touched)
    # The one that hung, and as many as may wait: the newest.
    assert 1 < len(pages.touched) <= 1 + page_transfer.MOST_AT_LEISURE
    assert pages.touched[1:] == [
        f"turn{turns - len(pages.touched) + 1 + n}" for n in range(len(pages.touched) - 1)
    ]
    transfer.close()


def test_what_was_used_before_a_write_is_dated_before_it(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may evict, and must not evict what was used a moment ago."""
    monkeypatch.setattr(page_transfer, "TOUCH_SECONDS", HANG_SECONDS)
    pages.holds_writes, pages.holds_touches = False, True
    transfer = open_transfer(pages)
    threading.Timer(0.1, pages.go_on.set).start()
    transfer.touch(MODEL, ["other"])
    assert transfer.write(MODEL, ["new"], nothing, prefix=["prompt"]) == [True]
    assert pages.order == ["touch", "touch", "write"]
    transfer.close()


def test_a_sequence_is_dated_once_in_a_while(pages: HeldPages, monkeypatch: pytest.MonkeyPatch) -> None:
    now = start = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    monkeypatch.setattr(page_transfer, "TOUCH_SECONDS", HANG_SECONDS)
    pages.holds_writes = False
    transfer = open_transfer(pages)
    for turn in range(20):
        transfer.touch(MODEL, ["document", "question"])
        key = [f"turn{turn}"]
        assert transfer.write(MODEL, key, nothing, prefix=["document", "question"]) == [True]
        # What has been written counts as dated, too.
        assert transfer.write(MODEL, ["behind"], nothing, prefix=["document", "question", *key]) == [True]
        now += 10**9
    # A page is never newer than those in front of it.
    assert (pages.touched, set(pages.moments)) == (["question"], {start})
    transfer.touch(bytes(range(32)), ["document", "question"])
    transfer.touch(MODEL, ["document"])
    for now in (start + 30 * 10**9, start - 5 * 10**9):  # later, and by a clock that was set back
        transfer.touch(MODEL, ["document", "question"])
        assert transfer.write(MODEL, ["answer"], nothing) == [True]  # waits for the touches
        assert pages.moments[-2:] == [now, now]
    assert pages.touched == ["question", "question", "document", "question", "question"]
    transfer.close()


def test_a_place_that_learns_from_each_use_hears_of_each(pages: HeldPages) -> None:
    pages.touch_holds_seconds = 0.0
    transfer = open_transfer(pages)
    for _ in range(10):
        transfer.touch(MODEL, ["document"])
    wait_until(lambda: pages.touched == ["document"] * 10)
    transfer.close()
