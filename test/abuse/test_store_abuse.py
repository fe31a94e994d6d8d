"""Pages that are no files, disks that hang, directories that cannot be written, clocks that jump."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance.background import daemon_pool
from sgl_importance.storage import page_transfer as transfer_module
from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.pages import Page, PageByPage
from sgl_importance.storage.store import IDENTITY_FILE, PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.store_command import app

from support.page_files import page_file
from support.waiting import HANG_SECONDS, wait_until

PAGE_BYTES = 512
MODEL = bytes(32)


def body_of(key: str) -> Page:
    return np.frombuffer(key.encode().ljust(PAGE_BYTES, b"."), np.uint8).copy()


def open_store(folder: Path, pages: int = 1000) -> PageStore:
    budget = pages * (HEADER_BYTES + PAGE_BYTES)
    return PageStore(folder, budget_bytes=budget, counters=StoreCounters())


def open_transfer(pages: object, counters: StoreCounters, timeout: float = 5.0) -> PageTransfer:
    return PageTransfer(pages, page_bytes=PAGE_BYTES, timeout=timeout, counters=counters)  # type: ignore[arg-type]


def write(transfer: PageTransfer, keys: list[str]) -> list[bool]:
    def copy_page(index: int, body: Page) -> None:
        body[:] = body_of(keys[index])

    return transfer.write(MODEL, keys, copy_page)


def read(transfer: PageTransfer, keys: list[str]) -> int:
    """How many of the keys came back; what comes back is right."""
    right = [
        (page == body_of(key)).all() for key, page in zip(keys, transfer.read(MODEL, keys), strict=False)
    ]
    assert all(right)
    return len(right)


# ---- what is no file ----


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{path.name[:20]}")
    os.rename(path.with_name(path.name[:20]), path)
    os.close(folder)


STAND_INS = [a_pipe, a_folder, a_device, a_link, a_socket]


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_a_page_that_is_no_file_is_set_aside_and_holds_no_thread(
    tmp_path: Path, stand_in: Callable[[Path], None]
) -> None:
    store = open_store(tmp_path)
    transfer = open_transfer(store, store.counters)
    keys = [f"key{number}" for number in range(40)]
    assert all(write(transfer, keys))
    path = page_file(store, MODEL, keys[20])
    path.unlink()
    stand_in(path)
    assert read(transfer, keys) == 20
    values = store.counters.values()
    assert values["missed_pages", "io"] == values["quarantined_pages", None] == 1
    # Every thread is still there, and the page can be stored again.
    assert all(write(transfer, keys[20:21]))
    assert [read(transfer, keys) for _ in range(5)] == [40] * 5
    assert store.counters["replaced_threads"] == 0
    transfer.close()


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_the_command_names_it_and_goes_on(tmp_path: Path, stand_in: Callable[[Path], None]) -> None:
    store = open_store(tmp_path)
    for key in "abc":
        store.write(MODEL, key, body_of(key), depth=0, moment=time.time_ns())
    path = page_file(store, MODEL, "b")
    path.unlink()
    stand_in(path)
    os.mkfifo(path.with_name(IDENTITY_FILE))

    def run(*arguments: str) -> tuple[int, dict]:
        # In a thread that may be left behind: nothing else ends a command that waits for a pipe.
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        invoke = partial(CliRunner().invoke, app, [*arguments, "--json"])
        threading.Thread(target=lambda: results.put(invoke()), daemon=True).start()
        result = results.get(timeout=HANG_SECONDS)
        assert result.stderr == ""
        return result.exit_code, json.loads(result.stdout)

    expected = 2 if stand_in is a_folder else 3  # a folder of pages, as far as anybody can tell
    code, found = run("verify", str(tmp_path))
    assert found["pages"] == expected
    assert (code, found["damaged"]) == ((0, {}) if stand_in is a_folder else (1, {"io": 1}))
    assert run("stat", str(tmp_path))[1]["models"][0]["facts"] is None
    code, found = run("verify", str(tmp_path), "--quarantine")
    assert found["set_aside"] == expected - 2
    assert run("verify", str(tmp_path))[0] == 0
    store.describe(MODEL, "{}")
    assert run("stat", str(tmp_path))[1]["models"][0]["facts"] == {}


# ---- disks that hang ----

PATIENCE_SECONDS = 0.3
"""Of who reads: a page that does not hang must come in it, also where much else runs."""


class HungPages(PageByPage):
    """Pages of which some are never read, or the whole disk does nothing, until they are let go."""

    def __init__(self, hung: set[str], *, whole_disk: bool = False) -> None:
        self.hung = hung
        self.whole_disk = whole_disk
        self.go_on = threading.Event()

    def _wait(self, key: str) -> None:
        if key in self.hung or self.whole_disk:
            self.go_on.wait(HANG_SECONDS)

    def exists(self, identity: bytes, key: str) -> bool:
        if self.whole_disk:
            self.go_on.wait(HANG_SECONDS)
        return True

    def read(self, identity: bytes, key: str, body: Page) -> None:
        self._wait(key)
        body[:] = body_of(key)

    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        self._wait(key)
        return True

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None: ...


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "HANG_SECONDS", 4 * PATIENCE_SECONDS)
    monkeypatch.setattr(transfer_module, "WRITE_SECONDS", 2 * PATIENCE_SECONDS)


@pytest.fixture
def threads() -> Iterator[Callable[[], int]]:
    """Storage threads that were started since; all have ended when the test ends."""
    before = set(threading.enumerate())

    def started() -> int:
        new = set(threading.enumerate()) - before
        return sum(thread.name.startswith("kv-importance-") for thread in new)

    yield started
    wait_until(lambda: started() == 0)


@pytest.mark.usefixtures("_impatient")
def test_pages_that_hang_do_not_stop_the_others(
    threads: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    """As many pages as there are reader threads, and then more: at last none of them is tried again."""
    hung = {f"hung{number}" for number in range(6)}
    pages, counters = HungPages(hung), StoreCounters()
    transfer = open_transfer(pages, counters, timeout=PATIENCE_SECONDS)
    lanes = pages.lanes(PAGE_BYTES)
    assert threads() == lanes.look + lanes.read + lanes.write + 1
    good = [f"good{number}" for number in range(50)]
    for page in sorted(hung):
        assert read(transfer, ["first", page, "behind"]) == 1
    time.sleep(6 * PATIENCE_SECONDS)
    wait_until(lambda: read(transfer, good) == 50)
    for _ in range(20):
        for page in sorted(hung):
            assert read(transfer, ["first", page, "behind"]) == 1
        time.sleep(0.02)
    assert read(transfer, good) == 50
    replaced = counters.values()["replaced_threads", "read"]
    assert 1 <= replaced <= len(hung)
    assert sum("hung for" in record.message for record in caplog.records) == 1
    pages.go_on.set()
    wait_until(lambda: threads() == lanes.look + lanes.read + lanes.write + 1)
    assert read(transfer, ["first", *sorted(hung), *good]) == 57
    transfer.close()


@pytest.mark.usefixtures("_impatient")
def test_a_disk_that_hangs_takes_a_bounded_number_of_threads_and_comes_back(
    threads: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    pages, counters = HungPages(set(), whole_disk=True), StoreCounters()
    transfer = open_transfer(pages, counters, timeout=0.01)
    for attempt in range(60):
        assert transfer.count_present(MODEL, [f"{attempt}"]) == 0
        assert read(transfer, [f"{attempt}"]) == 0
        assert attempt % 10 or write(transfer, [f"{attempt}"]) == [False]
        time.sleep(0.02)
    lanes = pages.lanes(PAGE_BYTES)
    usual = lanes.look + lanes.read + lanes.write + 1
    assert threads() <= usual + 3 * daemon_pool.MOST_GIVEN_UP
    values = counters.values()
    for what in ("look", "read", "write"):
        assert 1 <= values["replaced_threads", what] <= daemon_pool.MOST_GIVEN_UP, what
    assert sum("hung for" in record.message for record in caplog.records) == 3
    pages.go_on.set()
    wait_until(lambda: threads() == usual)
    wait_until(lambda: transfer.count_present(MODEL, ["a"]) == 1)
    wait_until(lambda: read(transfer, ["a", "b"]) == 2)
    wait_until(lambda: write(transfer, ["a"]) == [True])
    transfer.close()


@pytest.mark.usefixtures("_impatient")
def test_a_slow_page_is_late_once_and_no_thread_is_given_up(threads: Callable[[], int]) -> None:
    pages, counters = HungPages({"slow"}), StoreCounters()
    transfer = open_transfer(pages, counters, timeout=PATIENCE_SECONDS)
    assert read(transfer, ["slow"]) == 0
    pages.go_on.set()
    time.sleep(6 * PATIENCE_SECONDS)
    assert read(transfer, ["slow", "good"]) == 2
    assert counters["replaced_threads"] == 0
    transfer.close()
