"""A ledger whose file is taken away, is none, or cannot be written: pins are kept, or said to be lost."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LEDGER_FILE
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.reuse.estimator import ReuseEstimator

from support.waiting import wait_until
from support.workloads.ledger_rows import NAMESPACE, PAGE, open_ledger, record


def writer_of(ledger: Ledger, **settings: object) -> LedgerWriter:
    started = {"clock": 0, "evidence": ReuseEvidence.of(ReuseEstimator()), "budget_bytes": 1 << 28}
    return LedgerWriter(ledger, worth=lambda *_: 1.0, **{**started, **settings})


def pin(name: str, **kwargs: object) -> Pin:
    return Pin(name, array("q", range(2 * PAGE)), **kwargs)


def prefix(number: int, clock: int) -> PrefixRecord:
    return record([number] * PAGE, last_access=clock)


def content(path: Path) -> tuple[set[str], set[int], int]:
    """Pins, first tokens of the prefixes and the clock that a server would start with."""
    with closing(open_ledger(path)) as ledger:
        pins = {held.pin_id for held in ledger.pins.read(time.time(), page_size=PAGE)}
        rows = list(ledger.prefixes())
        assert ledger.damaged_rows == ledger.pins.damaged == 0
        return pins, {row.token_ids[0] for row in rows if row.token_ids}, ledger.clock


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_SECONDS", "LOOK_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(ledger_writer, name, 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def writer(folder: Path) -> Iterator[LedgerWriter]:
    with closing(busy_writer(folder)) as writer:
        yield writer


def busy_writer(folder: Path) -> LedgerWriter:
    """Of a ledger that holds two pins, one that has ended since, and five prefixes."""
    writer = writer_of(open_ledger(folder / LEDGER_FILE))
    writer.put(Visit([prefix(number, number) for number in range(1, 6)], 5, NAMESPACE, None))
    writer.keep_pins([pin("ended"), pin("a"), pin("b")], 6)
    wait_until(lambda: writer.surviving_pins() == {"ended", "a", "b"})
    writer.keep_pins([pin("a"), pin("b")], 7)
    wait_until(lambda: writer.surviving_pins() == {"a", "b"})
    return writer


def remove(folder: Path) -> None:
    """With what is in it; a writer that looks meanwhile puts nothing new into what is about to go."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir(exist_ok=True)  # the writer may have been quicker


TAKE_AWAY = {
    "removed": remove,
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "only the file": lambda folder: (folder / LEDGER_FILE).unlink(),
    "replaced": replace,
}


@pytest.mark.parametrize("taken", TAKE_AWAY)
def test_a_ledger_that_is_taken_away_is_made_again(
    folder: Path, writer: LedgerWriter, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    TAKE_AWAY[taken](folder)
    # Without a request and without a stop: who asks is told the truth at once, and later better.
    wait_until(lambda: writer.surviving_pins() == {"a", "b"})
    assert content(folder / LEDGER_FILE) == ({"a", "b"}, {1, 2, 3, 4, 5}, 7)
    (line,) = [each.message for each in caplog.records if "ledger" in each.message]
    assert str(folder / LEDGER_FILE) in line
    writer.put(Visit([prefix(6, 8)], 8, NAMESPACE, None))
    writer.keep_pins([pin("b"), pin("c")], 8)
    wait_until(lambda: writer.surviving_pins() == {"b", "c"})
    assert content(folder / LEDGER_FILE) == ({"b", "c"}, {1, 2, 3, 4, 5, 6}, 8)


@pytest.mark.parametrize("taken", TAKE_AWAY)
def test_pins_are_said_to_be_lost_from_the_moment_on(
    folder: Path, writer: LedgerWriter, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LedgerWriter, "_has_place", lambda self: False)  # the writer has not noticed yet
    time.sleep(0.1)
    wait_until(lambda: writer.surviving_pins() == {"a", "b"})  # where the look takes long, there are none
    TAKE_AWAY[taken](folder)
    assert writer.surviving_pins() == frozenset()


def test_a_file_of_another_server_in_its_place_is_used_as_it_is(folder: Path, writer: LedgerWriter) -> None:
    remove(folder)
    other = writer_of(open_ledger(folder / LEDGER_FILE))
    other.put(Visit([prefix(9, 100)], 100, NAMESPACE, None))
    other.keep_pins([pin("theirs")], 100)
    wait_until(lambda: writer.surviving_pins() == {"a", "b"})
    wait_until(lambda: other.surviving_pins() == {"theirs"})
    other.close()
    assert content(folder / LEDGER_FILE)[0] == {"a", "b", "theirs"}
    assert 9 in content(folder / LEDGER_FILE)[1]


def test_two_servers_on_a_directory_that_is_removed(folder: Path, writer: LedgerWriter) -> None:
    other = writer_of(open_ledger(folder / LEDGER_FILE))
    other.keep_pins([pin("theirs")], 7)
    wait_until(lambda: other.surviving_pins() == {"theirs"})
    remove(folder)
    wait_until(lambda: writer.surviving_pins() == {"a", "b"} and other.surviving_pins() == {"theirs"})
    assert content(folder / LEDGER_FILE)[:2] == ({"a", "b", "theirs"}, {1, 2, 3, 4, 5})
    writer.keep_pins([pin("a")], 8)
    wait_until(lambda: writer.surviving_pins() == {"a"})
    other.close()
    assert content(folder / LEDGER_FILE)[0] == {"a", "theirs"}


def test_what_was_counted_of_reuse_comes_along(folder: Path) -> None:
    reuse = ReuseEstimator()
    writer = writer_of(open_ledger(folder / LEDGER_FILE))
    for clock in range(1, 3000):
        reuse.tick()
        reuse.began(3)
        if clock % 3 == 0:
            reuse.hit(3, clock)
        if clock == 2000:
            writer.put(Visit((), clock, None, ReuseEvidence.of(reuse)))
            wait_until(lambda: content(folder / LEDGER_FILE)[2] == 2000)
            remove(folder)
    writer.put(Visit((), 2999, None, ReuseEvidence.of(reuse)))
    writer.close()
    with closing(open_ledger(folder / LEDGER_FILE)) as ledger:
        kept = ledger.evidence()
        assert ledger.clock == 2999
    assert kept is not None
    np.testing.assert_allclose(kept.hits, reuse.counts()[0])
    assert kept.hits.sum() > 0


def test_where_none_can_be_made_pins_are_lost_until_one_can(
    folder: Path, writer: LedgerWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    remove(folder)
    file = folder.with_name("file")
    file.write_text("in the way")

    def is_in_the_way() -> bool:
        if folder.is_dir():  # the writer has been quicker
            remove(folder)
        with suppress(OSError):
            file.rename(folder)
        return folder.is_file()

    wait_until(is_in_the_way)
    wait_until(lambda: "the server goes on without" in caplog.text)
    assert writer.surviving_pins() == frozenset()
    writer.keep_pins([pin("a"), pin("c")], 9)
    time.sleep(0.2)
    assert writer.surviving_pins() == frozenset()
    assert caplog.text.count("the server goes on without") == 1
    folder.unlink()
    wait_until(lambda: writer.surviving_pins() == {"a", "c"})
    assert content(folder / LEDGER_FILE)[:2] == ({"a", "c"}, {1, 2, 3, 4, 5})


def test_a_stop_makes_it_again_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_writer, "LOOK_SECONDS", 3600.0)
    writer = busy_writer(folder)
    remove(folder)
    writer.close()
    assert content(folder / LEDGER_FILE) == ({"a", "b"}, {1, 2, 3, 4, 5}, 7)


def test_a_disk_that_hangs_holds_nobody_who_asks(
    writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []

    def hangs(self: object) -> bool:
        wait_until(lambda: answered)
        return True

    monkeypatch.setattr("sgl_importance.placement.ledger.sqlite_database.FilePlace.is_held", hangs)
    assert writer.surviving_pins() == frozenset()
    assert writer.surviving_pins() == frozenset()
    answered.append(True)
    wait_until(lambda: writer.surviving_pins() == {"a", "b"})


# ---- what is no ledger ----


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [a_folder, a_pipe, a_device, a_loop])
@pytest.mark.parametrize("name", [LEDGER_FILE, f"{LEDGER_FILE}.lock"])
def test_what_is_no_file_is_named_with_the_cure(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(LedgerUnusable) as refused:
        open_ledger(tmp_path / LEDGER_FILE)
    message = str(refused.value)
    assert str(tmp_path / name) in message
    assert "--kv-importance-ledger" in message
    assert "unable to open" not in message
    assert len(message.splitlines()) == 1


def test_another_program_s_lock_is_waited_for(folder: Path, writer: LedgerWriter) -> None:
    """A backup that holds the file for longer than a write waits: the pin comes, and nobody said it had."""
    with closing(sqlite3.connect(folder / LEDGER_FILE, isolation_level=None)) as backup:
        backup.execute("BEGIN IMMEDIATE")
        writer.keep_pins([pin("a"), pin("c")], 9)
        time.sleep(0.3)
        assert "c" not in writer.surviving_pins()
        backup.execute("ROLLBACK")
    wait_until(lambda: writer.surviving_pins() == {"a", "c"})
