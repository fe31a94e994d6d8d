"""Disks that are slow or hang: what waits for them stays bounded, and the store goes on as far as it can."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from sgl_importance.background.daemon_pool import MOST_GIVEN_UP
from sgl_importance.storage import page_transfer
from sgl_importance.storage.page_record import MissReason, PageMiss
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.pages import Page, PageByPage
from sgl_importance.storage.store_counters import StoreCounters

PAGE_BYTES = 1 << 16
MODEL = bytes(32)


class HeldPages(PageByPage):
    """Pages whose writes wait until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.written: list[str] = []

    def exists(self, identity: bytes, key: str) -> bool:
        return False

    def read(self, identity: bytes, key: str, body: Page) -> None:
        raise PageMiss(MissReason.ABSENT)

    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        self.go_on.wait(60)
        self.written.append(key)
        return True

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None: ...


@pytest.fixture
def pages() -> Iterator[HeldPages]:
    held = HeldPages()
    yield held
    held.go_on.set()


def open_transfer(pages: PageByPage) -> PageTransfer:
    return PageTransfer(pages, page_bytes=PAGE_BYTES, timeout=0.01, counters=StoreCounters())


def test_a_hung_disk_does_not_hoard_what_was_to_be_written(
    pages: HeldPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_transfer, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(page_transfer, "HANG_SECONDS", 0.05)  # so that threads are given up, too
    transfer = open_transfer(pages)
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
