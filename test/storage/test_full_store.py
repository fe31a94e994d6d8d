"""A full store in which files cannot be deleted: the others go, and nobody scans for nothing."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance.storage import budget
from sgl_importance.storage.budget import RETRY_SECONDS, Budget, StoredFile, most_bytes, scan
from sgl_importance.storage.inspect import collect, files_of
from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.pages import write_reason
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.store_command import app

from support.page_files import page_file

PAGE_BYTES = 512
RECORD_BYTES = HEADER_BYTES + PAGE_BYTES
PAGES = 20
OURS, THEIRS = bytes(32), bytes(range(32))
BODY = np.zeros(PAGE_BYTES, np.uint8)


class Denied:
    """Files that cannot be deleted, as those of another user, for root too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = errno.EACCES
        self.denies: Callable[[Path], bool] = lambda path: False
        real = Path.unlink

        def unlink(path: Path, missing_ok: bool = False) -> None:
            if self.denies(path):
                raise OSError(self.code, os.strerror(self.code), str(path))
            real(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Denied:
    return Denied(monkeypatch)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A folder for each scan of it."""
    made: list[Path] = []

    def counted(folder: Path) -> Iterator[StoredFile]:
        made.append(folder)
        return scan(folder)

    monkeypatch.setattr(budget, "scan", counted)
    return made


def full_store(folder: Path, foreign: int) -> PageStore:
    """Of ``PAGES`` pages, of which the ``foreign`` oldest are somebody else's."""
    store = PageStore(folder, budget_bytes=PAGES * RECORD_BYTES, counters=StoreCounters())
    for number in range(PAGES):
        identity = THEIRS if number < foreign else OURS
        store.write(identity, f"old{number}", BODY, depth=0, moment=10**18 + number * 10**9)
    return store


def bytes_of(store: PageStore) -> int:
    return sum(file.size for file in scan(store.pages))


def test_our_own_pages_go_where_a_foreign_one_cannot(
    tmp_path: Path, denied: Denied, caplog: pytest.LogCaptureFixture
) -> None:
    store = full_store(tmp_path, foreign=3)
    left = page_file(store, THEIRS, "old0").with_name("left.tmp")
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    denied.denies = lambda path: path.parent.name == THEIRS.hex()
    for number in range(50):
        assert store.write(OURS, f"new{number}", BODY, depth=0, moment=time.time_ns() + number)
        assert bytes_of(store) <= PAGES * RECORD_BYTES
    assert left.exists()
    assert all(store.exists(THEIRS, f"old{number}") for number in range(3))
    assert not any(store.exists(OURS, f"old{number}") for number in range(3, PAGES))
    assert store.exists(OURS, "new49")
    assert store.counters["evicted_pages"] == PAGES + 50 - sum(file.is_page for file in scan(store.pages))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(store.pages / THEIRS.hex()) in record.message


def test_a_full_store_that_cannot_evict_scans_once_in_a_while(
    tmp_path: Path,
    denied: Denied,
    scans: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = full_store(tmp_path, foreign=0)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept = Budget(store.pages, store_bytes := PAGES * RECORD_BYTES)
    denied.code, denied.denies = errno.EROFS, lambda path: True
    scans.clear()
    for attempt in range(5):
        for _ in range(20):
            with pytest.raises(OSError, match="cannot be deleted") as refused:
                kept.admit(RECORD_BYTES)
            assert write_reason(refused.value) == "read_only"
        assert len(scans) == attempt + 1
        now += RETRY_SECONDS
    assert len(caplog.records) == 1
    # What a page gave back is used meanwhile; and once the disk takes deletions again, all goes on.
    kept.release(RECORD_BYTES)
    now -= 1
    assert kept.admit(RECORD_BYTES) == 0
    with pytest.raises(OSError, match="cannot be deleted"):
        kept.admit(RECORD_BYTES)
    assert len(scans) == 5
    denied.denies = lambda path: False
    now += 1
    assert kept.admit(RECORD_BYTES) == PAGES - int(PAGES * budget.LOW_WATERMARK)
    assert len(scans) == 6
    assert bytes_of(store) <= store_bytes * budget.LOW_WATERMARK


def test_a_store_without_room_counts_why_and_what_went(tmp_path: Path, denied: Denied) -> None:
    """Everything of ours went and it is not enough: what went is counted with the next page that fits."""
    store = full_store(tmp_path, foreign=PAGES - 1)
    denied.denies = lambda path: path.parent.name == THEIRS.hex()
    big = np.zeros(2 * RECORD_BYTES, np.uint8)
    with pytest.raises(OSError, match="cannot be deleted"):
        store.write(OURS, "big", big, depth=0, moment=time.time_ns())
    assert store.write(OURS, "new", BODY, depth=0, moment=time.time_ns())
    assert store.counters["evicted_pages"] == 1
    assert bytes_of(store) == PAGES * RECORD_BYTES


def test_files_that_are_being_written_take_the_budget(tmp_path: Path, scans: list[Path]) -> None:
    folder = tmp_path / "pages" / OURS.hex()
    folder.mkdir(parents=True)
    (folder / "new.tmp").write_bytes(bytes(2 * RECORD_BYTES))
    kept = Budget(tmp_path / "pages", 2 * RECORD_BYTES)
    for _ in range(3):
        with pytest.raises(OSError, match="being written") as refused:
            kept.admit(RECORD_BYTES)
        assert write_reason(refused.value) == "budget"
    assert len(scans) == 1


def test_what_others_filled_meanwhile_is_no_room(tmp_path: Path, denied: Denied) -> None:
    """Seen by the scan that is due after a while, not by one for want of room."""
    kept = Budget(tmp_path / "pages", PAGES * RECORD_BYTES)
    assert [kept.admit(RECORD_BYTES) for _ in range(2)] == [0, 0]
    full_store(tmp_path, foreign=PAGES)
    denied.denies = lambda path: True
    with pytest.raises(OSError, match="cannot be deleted"):
        kept.admit(RECORD_BYTES)


def test_an_eviction_scans_once(tmp_path: Path, scans: list[Path]) -> None:
    store = full_store(tmp_path, foreign=0)
    scans.clear()
    assert store.write(OURS, "new", BODY, depth=0, moment=time.time_ns())
    assert len(scans) == 1
    assert store.counters["evicted_pages"] > 0


@pytest.mark.parametrize("burst", [1, 7, 60])
def test_ranks_of_a_server_together_keep_the_bound(tmp_path: Path, burst: int) -> None:
    """Each sees what the others wrote only when it looks; the longer it is silent, the less it knows."""
    ranks, limit = 8, 160 * RECORD_BYTES
    stores = [
        PageStore(tmp_path, budget_bytes=limit, ranks=ranks, counters=StoreCounters()) for _ in range(ranks)
    ]
    most = 0
    for turn in range(960 // burst):
        rank = turn % ranks
        for number in range(burst):
            body = np.full(PAGE_BYTES, rank, np.uint8)
            assert stores[rank].write(bytes([rank]) * 32, f"{turn} {number}", body, depth=0, moment=turn)
            most = max(most, bytes_of(stores[0]))
    assert 0.9 * limit < most <= limit


def test_a_page_for_each_rank_is_the_least_bound(tmp_path: Path) -> None:
    limit = 4 * RECORD_BYTES
    assert Budget(tmp_path, limit, ranks=4).admit(RECORD_BYTES) == 0
    assert Budget(tmp_path, limit, ranks=5).admit(RECORD_BYTES) is None


def test_what_is_on_its_way_takes_room(tmp_path: Path) -> None:
    """Two threads write: what one has reserved is not on the disk when the other looks."""
    kept = Budget(tmp_path / "pages", 2 * RECORD_BYTES)
    assert kept.admit(RECORD_BYTES) == kept.admit(RECORD_BYTES) == 0
    with pytest.raises(OSError, match="being written"):
        kept.admit(RECORD_BYTES)


def test_counting_is_exact_for_pages_of_a_size_and_never_too_little(tmp_path: Path) -> None:
    """A page that a power failure has emptied stands for no other."""
    store = full_store(tmp_path, foreign=5)
    assert most_bytes(store.pages) == PAGES * RECORD_BYTES
    os.truncate(page_file(store, OURS, "old7"), 0)
    os.truncate(page_file(store, THEIRS, "old0"), 7)
    page_file(store, OURS, "old7").with_name("new.tmp").write_bytes(b"xyz")
    assert most_bytes(store.pages) == PAGES * RECORD_BYTES + 3
    assert most_bytes(tmp_path / "none") == 0


def test_a_look_reads_few_sizes(tmp_path: Path, scans: list[Path]) -> None:
    """Every sixteenth of the bound a server looks what is there: of each page only when some must go."""
    store = full_store(tmp_path, foreign=0)
    scans.clear()
    kept = Budget(store.pages, 2 * PAGES * RECORD_BYTES)
    for _ in range(PAGES):
        assert kept.admit(RECORD_BYTES) == 0
        kept.release(RECORD_BYTES)
    assert scans == []


def test_folders_of_models_without_pages_go(tmp_path: Path) -> None:
    store = full_store(tmp_path, foreign=5)
    for identity in (OURS, THEIRS):
        store.describe(identity, '{"weights": "w"}')
    ours, theirs = (store.pages / identity.hex() for identity in (OURS, THEIRS))
    for number in range(PAGES):
        assert store.write(OURS, f"new{number}", BODY, depth=0, moment=time.time_ns() + number)
    assert not theirs.exists()
    # Whoever stores a page again says again what it is of.
    assert store.write(THEIRS, "again", BODY, depth=0, moment=time.time_ns())
    assert (theirs / "identity.json").read_text() == '{"weights": "w"}\n'
    for file in ours.glob("*.page"):
        file.unlink()
    collect(tmp_path, files=files_of(tmp_path), limit=None, unused_days=None, advance=lambda size: None)
    assert (ours.exists(), theirs.exists()) == (False, True)


def test_gc_goes_on_and_says_what_stayed(tmp_path: Path, denied: Denied) -> None:
    store = full_store(tmp_path, foreign=3)
    left = page_file(store, THEIRS, "old0").with_name("left.tmp")
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    denied.denies = lambda path: path.parent.name == THEIRS.hex()

    def gc(limit: int | None, unused_days: float | None) -> tuple[int, ...]:
        advance: Callable[[int], None] = lambda size: None  # noqa: E731
        files = files_of(tmp_path)
        found = collect(tmp_path, files=files, limit=limit, unused_days=unused_days, advance=advance)
        return found.unfinished, found.unused_pages, found.evicted_pages, found.undeletable, found.bytes_left

    assert gc(10 * RECORD_BYTES, None) == (0, 0, 11, 4, 9 * RECORD_BYTES + 1)
    assert gc(None, 1) == (0, 6, 0, 4, 3 * RECORD_BYTES + 1)
    shown = CliRunner().invoke(app, ["gc", str(tmp_path)])
    assert shown.exit_code == 0
    assert "files that cannot be deleted: 1;" in shown.stdout
