"""The wall clock goes back or forward: pins keep their time, what is used last is kept, nothing is lost."""

from __future__ import annotations

import time
from array import array
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.ledger.steady_time import steady_time
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.storage import page_transfer
from sgl_importance.storage.budget import delete_abandoned, scan
from sgl_importance.storage.inspect import collect, files_of, summarize
from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters

from support.page_files import page_file
from support.waiting import wait_until

PAGE_BYTES = 512
MODEL = bytes(32)
DAY = 86_400.0
JUMPS = pytest.mark.parametrize("seconds", [-30 * DAY, -2 * 3600.0, 2 * 3600.0, 30 * DAY])


class Jump:
    """The wall clock, as far as Python's callers see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        real, real_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real() + self.seconds)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(self.seconds * 1e9))


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Jump:
    return Jump(monkeypatch)


@JUMPS
def test_a_pin_keeps_its_time_and_its_row(
    tmp_path: Path, wall: Jump, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    for name in ("BATCH_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(ledger_writer, name, 0.01)
    before = steady_time()
    held = Pin("held", array("q", range(8)), expires_at=before + 600)
    evidence = ReuseEvidence.of(ReuseEstimator())
    ledger = Ledger(tmp_path / "l.sqlite", MODEL, page_size=4)
    writer = LedgerWriter(ledger, worth=lambda *_: 1.0, clock=0, evidence=evidence, budget_bytes=1 << 20)
    writer.keep_pins([held], 1)
    wait_until(lambda: writer.surviving_pins() == {"held"})
    wall.seconds = seconds
    assert before <= steady_time() < before + 60
    writer.keep_pins([held, Pin("new", array("q", range(4)))], 2)  # every write also forgets what has ended
    writer.put(Visit((), 3, None, None))
    writer.close()
    assert writer.kept_pins == {"held", "new"}
    with closing(Ledger(tmp_path / "l.sqlite", MODEL, page_size=4)) as again:
        assert {pin.pin_id for pin in again.pins.read(steady_time(), page_size=4)} == {"held", "new"}


@JUMPS
def test_what_is_used_after_the_jump_outlasts_what_was_used_before(
    tmp_path: Path, wall: Jump, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(page_transfer, "TOUCH_SECONDS", 60.0)
    size = HEADER_BYTES + PAGE_BYTES
    store = PageStore(tmp_path, budget_bytes=20 * size, counters=StoreCounters())
    transfer = PageTransfer(store, page_bytes=PAGE_BYTES, timeout=5, counters=store.counters)

    def write(*keys: str) -> None:
        assert transfer.write(MODEL, keys, lambda index, body: body.fill(0)) == [True] * len(keys)

    def present(name: str, pages: int) -> int:
        return sum(store.exists(MODEL, f"{name}{page}") for page in range(pages))

    write(*(f"old{page}" for page in range(10)))
    write(*(f"used{page}" for page in range(4)))
    wall.seconds = seconds
    transfer.touch(MODEL, [f"used{page}" for page in range(4)])
    write(*(f"new{page}" for page in range(8)))
    write(*(f"newer{page}" for page in range(6)))
    assert (present("used", 4), present("new", 8), present("newer", 6)) == (4, 8, 6)
    left = present("old", 10)
    assert left <= 2
    assert [store.exists(MODEL, f"old{page}") for page in range(10)] == [True] * left + [False] * (10 - left)
    # And once it is right again.
    wall.seconds = 0.0
    write(*(f"last{page}" for page in range(6)))
    assert present("last", 6) == 6
    assert sum(file.size for file in scan(store.pages)) <= 20 * size
    transfer.close()


@JUMPS
def test_what_a_killed_writer_left_goes_and_the_commands_go_on(
    tmp_path: Path, wall: Jump, seconds: float
) -> None:
    store = PageStore(tmp_path, budget_bytes=1 << 20, counters=StoreCounters())
    store.write(MODEL, "a", np.zeros(PAGE_BYTES, np.uint8), depth=0, moment=time.time_ns())
    page_file(store, MODEL, "a").with_name("left.tmp").write_bytes(b"x")
    wall.seconds = seconds
    assert [file.is_page for file in delete_abandoned(list(scan(store.pages)))] == [True]
    assert summarize(tmp_path)["pages"] == 1
    result = collect(tmp_path, files=files_of(tmp_path), limit=None, unused_days=7, advance=lambda size: None)
    assert result.unused_pages == (seconds == 30 * DAY), "an age is by the wall clock"
