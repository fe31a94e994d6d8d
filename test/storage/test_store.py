"""A directory of pages: what is read is what was written, whole sequences' ends go first, nothing hangs."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.storage import budget
from sgl_importance.storage.budget import scan
from sgl_importance.storage.page_record import HEADER_BYTES, MissReason, PageDamaged, PageMiss, decode_header
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.pages import PageByPage
from sgl_importance.storage.store import QUARANTINED_FILES, PageStore, set_aside
from sgl_importance.storage.store_counters import StoreCounters

from support.nightly_cases import rest_nightly
from support.page_files import page_file

PAGE_BYTES = 512
RECORD_BYTES = HEADER_BYTES + PAGE_BYTES
NOW = 1_700_000_000_000_000_000
MODEL, OTHER_MODEL = bytes(32), bytes(range(32))


def body_of(key: str) -> np.ndarray:
    return np.random.default_rng(abs(hash(key)) % 2**32).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def open_store(folder: Path, pages: int = 1000) -> PageStore:
    return PageStore(folder, budget_bytes=pages * RECORD_BYTES, counters=StoreCounters())


def read(store: PageStore, key: str, identity: bytes = MODEL) -> np.ndarray:
    body = np.empty(PAGE_BYTES, np.uint8)
    store.read(identity, key, body)
    return body


def reason_of_miss(store: PageStore, key: str, identity: bytes = MODEL) -> MissReason:
    with pytest.raises(PageMiss) as caught:
        read(store, key, identity)
    return caught.value.reason


def test_reads_what_was_written_and_nothing_of_another_model(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert not store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert (read(store, "a") == body_of("a")).all()
    assert reason_of_miss(store, "b") is MissReason.ABSENT
    assert reason_of_miss(store, "a", OTHER_MODEL) is MissReason.ABSENT
    assert (read(open_store(tmp_path), "a") == body_of("a")).all()


def test_what_is_made_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    directory = tmp_path / "srv" / "store"
    store = open_store(directory)
    store.describe(MODEL, "facts")
    store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert {path.stat().st_mode & 0o777 for path in (directory.parent, *page_folders(directory))} == {0o700}
    (page,) = directory.glob("pages/*/*.page")
    assert page.stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_store(tmp_path).write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def page_folders(directory: Path) -> list[Path]:
    return [directory, *(path for path in directory.rglob("*") if path.is_dir())]


def test_a_damaged_page_is_set_aside_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    path = page_file(store, MODEL, "a")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert reason_of_miss(store, "a") is MissReason.BODY
    assert reason_of_miss(store, "a") is MissReason.ABSENT
    assert len(list(store.quarantine.iterdir())) == 1
    assert store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert (read(store, "a") == body_of("a")).all()


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.EACCES, errno.EPERM])
def test_a_page_that_cannot_be_read_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = open_store(tmp_path)
    store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    with monkeypatch.context() as bad_sector:
        bad_sector.setattr("sgl_importance.storage.store.open_regular", raising(code))
        assert reason_of_miss(store, "a") is MissReason.IO
    assert not store.exists(MODEL, "a")
    assert store.counters["quarantined_pages"] == 1
    assert store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert (read(store, "a") == body_of("a")).all()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_a_page_that_cannot_be_read_for_a_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = open_store(tmp_path)
    store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    with monkeypatch.context() as busy:
        busy.setattr("sgl_importance.storage.store.open_regular", raising(code))
        assert reason_of_miss(store, "a") is MissReason.IO
    assert (read(store, "a") == body_of("a")).all()


def raising(code: int) -> Callable[[object], int]:
    def refuse(path: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    return refuse


def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(QUARANTINED_FILES + 5):
        store.write(MODEL, str(number), body_of("x"), depth=0, moment=NOW)
        assert set_aside(page_file(store, MODEL, str(number)), store.quarantine, MissReason.BODY)
    assert len(list(store.quarantine.iterdir())) == QUARANTINED_FILES


@pytest.mark.parametrize("what", ["link", "folder"])
def test_the_quarantine_is_bounded_beside_what_is_no_file(tmp_path: Path, what: str) -> None:
    """The oldest there is a link that leads nowhere, or a folder."""
    store = open_store(tmp_path)
    store.write(MODEL, "strange", body_of("x"), depth=0, moment=NOW)
    strange = page_file(store, MODEL, "strange")
    strange.unlink()
    if what == "link":
        strange.symlink_to("nowhere")
    else:
        strange.mkdir()
    assert set_aside(strange, store.quarantine, MissReason.IO)
    for number in range(QUARANTINED_FILES + 5):
        store.write(MODEL, str(number), body_of("x"), depth=0, moment=NOW)
        assert set_aside(page_file(store, MODEL, str(number)), store.quarantine, MissReason.BODY)
    assert len(list(store.quarantine.iterdir())) == QUARANTINED_FILES + (what == "folder")


def test_a_page_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    store = PageStore(tmp_path, budget_bytes=PAGE_BYTES, counters=StoreCounters())
    with pytest.raises(OSError, match="exceeds the budget"):
        store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    assert list(scan(store.pages)) == []


def test_what_a_killed_writer_left_is_deleted_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.write(MODEL, "a", body_of("a"), depth=0, moment=NOW)
    unfinished = page_file(store, MODEL, "a").with_name("left.tmp")
    unfinished.write_bytes(b"x")
    budget.evict(store.pages, 10**9)
    assert unfinished.exists()
    monkeypatch.setattr(budget, "UNFINISHED_SECONDS", -1.0)
    budget.evict(store.pages, 10**9)
    assert not unfinished.exists()
    assert (read(store, "a") == body_of("a")).all()


# A sequence is a path in a tree of pages: which child to go to at each step.
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(sequences=sequences, pages=st.integers(5, 14))
def test_within_the_budget_and_never_a_page_without_its_predecessors(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], pages: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = open_store(folder, pages)
    for sequence in sequences:
        keys = ["".join(map(str, sequence[: end + 1])) for end in range(len(sequence))]
        moment = time.time_ns()
        for depth, key in enumerate(keys):
            store.write(MODEL, key, body_of(key), depth=depth, moment=moment)
        files = [file for file in scan(store.pages) if file.is_page]
        assert sum(file.size for file in files) <= pages * RECORD_BYTES
        present = {key for key in all_keys(sequences) if store.exists(MODEL, key)}
        assert len(present) == len(files)
        assert all(key[:-1] in present or len(key) == 1 for key in present)
        assert present.issuperset(keys)


def all_keys(sequences: list[list[int]]) -> set[str]:
    return {"".join(map(str, s[: end + 1])) for s in sequences for end in range(len(s))}


# ---- batches ----


def open_transfer(store: PageStore, timeout: float = 5.0) -> PageTransfer:
    return PageTransfer(store, page_bytes=PAGE_BYTES, timeout=timeout, counters=store.counters)


def write_all(transfer: PageTransfer, keys: list[str]) -> list[bool]:
    def copy_page(index: int, body: np.ndarray) -> None:
        body[:] = body_of(keys[index])

    return transfer.write(MODEL, keys, copy_page, prefix=["x", "y", "z"])


def test_a_batch_comes_back_in_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    transfer = open_transfer(store)
    keys = [f"key{number}" for number in range(100)]
    assert write_all(transfer, keys) == [True] * 100
    assert transfer.count_present(MODEL, [*keys, "more"]) == 100
    pages = [page.copy() for page in transfer.read(MODEL, keys)]
    assert all((page == body_of(key)).all() for page, key in zip(pages, keys, strict=True))
    assert store.counters["read_pages"] == store.counters["written_pages"] == 100
    assert decode_header(page_file(store, MODEL, "key5").read_bytes()).depth == 8


@pytest.mark.parametrize("missing", [0, 1, 15, 16, 57])
def test_a_batch_ends_at_the_first_miss(tmp_path: Path, missing: int) -> None:
    store = open_store(tmp_path)
    transfer = open_transfer(store)
    keys = [f"key{number}" for number in range(60)]
    write_all(transfer, keys)
    page_file(store, MODEL, keys[missing]).unlink()
    assert transfer.count_present(MODEL, keys) == missing
    assert len(list(transfer.read(MODEL, keys))) == missing
    assert store.counters.values()["missed_pages", "absent"] == 1


class StuckPages(PageByPage):
    """Pages on a disk that answers when it is told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.bodies: list[np.ndarray] = []
        self.answers = 0

    def exists(self, identity: bytes, key: str) -> bool:
        self._wait()
        return True

    def read(self, identity: bytes, key: str, body: np.ndarray) -> None:
        self.bodies.append(body)
        self._wait()
        body[:] = 255

    def _wait(self) -> None:
        self.answer.wait(30)
        self.answers += 1

    def write(self, identity: bytes, key: str, body: np.ndarray, *, depth: int, moment: int) -> bool:
        raise OSError(28, "full")

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None: ...


class NamedPages(StuckPages):
    """Pages in runs of two, of which only the keys are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[str | None, list[str]]] = []
        """Of each run the key in front of it, and its own."""

    def run_pages(self, page_bytes: int) -> int:
        return 2

    def write_run(self, identity: bytes, keys: Sequence[str], bodies: object, **where: Any) -> list[bool]:
        self.runs.append((where["before"], list(keys)))
        return [True] * len(keys)


@pytest.mark.parametrize(("prefix", "before"), [([], None), (["x", "y"], "y")])
def test_a_run_is_written_behind_the_page_in_front_of_it(prefix: list[str], before: str | None) -> None:
    pages = NamedPages()
    transfer = PageTransfer(pages, page_bytes=PAGE_BYTES, timeout=30, counters=StoreCounters())
    transfer.write(MODEL, ["a", "b", "c"], lambda index, body: None, prefix=prefix)
    assert sorted(pages.runs, key=lambda run: run[1]) == [(before, ["a", "b"]), ("b", ["c"])]


def test_nobody_waits_for_a_stuck_disk_and_its_late_bytes_go_nowhere() -> None:
    pages, counters = StuckPages(), StoreCounters()
    transfer = PageTransfer(pages, page_bytes=PAGE_BYTES, timeout=0.1, counters=counters)
    assert transfer.count_present(MODEL, ["a"]) == 0
    assert list(transfer.read(MODEL, ["a", "b"])) == []
    assert list(transfer.read(MODEL, ["a", "b"])) == []
    assert pages.answers == 0
    assert counters.values()["missed_pages", "timeout"] == 3
    # A buffer that a late read still writes to is never handed to anybody else.
    assert not any(transfer.stage() is body for body in pages.bodies for _ in range(3))
    pages.answer.set()


def test_an_exception_is_a_miss_with_a_reason() -> None:
    class Broken(StuckPages):
        def exists(self, identity: bytes, key: str) -> bool:
            raise RuntimeError

        def read(self, identity: bytes, key: str, body: np.ndarray) -> None:
            raise RuntimeError

    counters = StoreCounters()
    transfer = PageTransfer(Broken(), page_bytes=PAGE_BYTES, timeout=5, counters=counters)
    assert transfer.count_present(MODEL, ["a"]) == 0
    assert list(transfer.read(MODEL, ["a"])) == []
    assert counters.values()["missed_pages", "io"] == 2
    assert transfer.write(MODEL, ["a"], lambda index, body: None) == [False]
    assert counters.values()["unwritten_pages", "disk_full"] == 1


# ---- several processes ----

WRITER = """
import sys
import time
import numpy as np
from pathlib import Path
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.store import PageStore
store = PageStore(Path(sys.argv[1]), budget_bytes=200_000, counters=StoreCounters())
print("ready", flush=True)
while True:
    for number in range(1000):
        body = np.full(2000, number % 251, np.uint8)
        store.write(bytes(32), str(number), body, depth=number % 7, moment=time.time_ns())
"""


@pytest.mark.parametrize("times", rest_nightly([3, 30]))
def test_writers_killed_at_any_moment_and_side_by_side_leave_only_whole_pages(
    tmp_path: Path, times: int
) -> None:
    rng = random.Random(0)
    store = PageStore(tmp_path, budget_bytes=200_000, counters=StoreCounters())
    body = np.empty(2000, np.uint8)
    served = 0
    for _ in range(times):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.2))
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
        for number in range(1000):
            try:
                store.read(bytes(32), str(number), body)
            except PageDamaged as damaged:
                pytest.fail(f"page {number}: {damaged}")
            except PageMiss:
                continue
            assert (body == number % 251).all()
            served += 1
        # Two writers may together exceed the budget by a sixteenth each, and by what each left unfinished.
        assert sum(file.size for file in scan(store.pages)) <= 200_000 * 9 / 8 + times * 2 * 2096
    assert served > 0
