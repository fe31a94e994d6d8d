"""Pins in the ledger: what comes back, what does not fit, and what becomes of an earlier schema."""

from __future__ import annotations

import sqlite3
from array import array
from pathlib import Path

import pytest

from sgl_importance.ledger import ledger_database, ledger_writer
from sgl_importance.ledger.ledger import Ledger
from sgl_importance.ledger.ledger_writer import LedgerWriter
from sgl_importance.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.pins.pin import Pin
from sgl_importance.reuse.estimator import ReuseEstimator

from support.waiting import wait_until
from support.workloads.ledger_rows import NAMESPACE, PAGE, open_ledger, record

BUDGET = 1 << 20


def make_pin(name: str, tokens: int = 2 * PAGE, **kwargs) -> Pin:
    return Pin(name, array("q", range(len(name), len(name) + tokens)), **kwargs)


def read(ledger: Ledger, now: float = 100.0) -> list[Pin]:
    return ledger.pins.read(now, page_size=PAGE)


def write(ledger: Ledger, *added: Pin, ended: tuple[str, ...] = (), budget_bytes: int = BUDGET) -> set[str]:
    return ledger.pins.write(added, ended, now=100.0, budget_bytes=budget_bytes)


def named(path: Path) -> list[str]:
    """What the next server finds."""
    ledger = open_ledger(path)
    try:
        return [pin.pin_id for pin in read(ledger)]
    finally:
        ledger.close()


def test_a_pin_comes_back_as_it_was_and_in_its_order(tmp_path: Path):
    pins = [
        make_pin("plain"),
        make_pin("salted", cache_salt="tenant", expires_at=100.5),
        make_pin("keyed", extra_key="lora", expires_at=1e9),
    ]
    ledger = open_ledger(tmp_path / "l.sqlite")
    assert write(ledger, *pins) == {"plain", "salted", "keyed"}
    ledger.close()
    again = open_ledger(tmp_path / "l.sqlite")
    for before, after in zip(pins, read(again), strict=True):
        for name in ("pin_id", "tokens", "extra_key", "cache_salt", "expires_at"):
            assert getattr(after, name) == getattr(before, name), name
    assert [pin.pin_id for pin in read(again, now=100.5)] == ["plain", "keyed"]
    again.close()


def test_ended_and_expired_pins_leave_the_file(tmp_path: Path):
    ledger = open_ledger(tmp_path / "l.sqlite")
    write(ledger, make_pin("a"), make_pin("b"), make_pin("short", expires_at=100.5))
    write(ledger, ended=("a",))
    ledger.pins.write([], (), now=101.0, budget_bytes=BUDGET)
    ledger.close()
    with sqlite3.connect(tmp_path / "l.sqlite") as connection:
        assert connection.execute("SELECT pin_id FROM pins").fetchall() == [("b",)]


def test_models_keep_their_own_pins(tmp_path: Path):
    ours, theirs = open_ledger(tmp_path / "l.sqlite"), open_ledger(tmp_path / "l.sqlite", b"other")
    write(ours, make_pin("p"))
    write(theirs, make_pin("p", PAGE))
    write(theirs, ended=("p",))
    assert ([pin.pin_id for pin in read(ours)], read(theirs)) == (["p"], [])
    ours.close()
    theirs.close()


def test_pins_are_bounded_and_prefixes_make_room_for_them(tmp_path: Path):
    ledger = open_ledger(tmp_path / "l.sqlite")
    budget = 40_000
    rows = [record([number, 2, 3, 4], last_access=number) for number in range(200)]
    ledger.write(rows, clock=200, requests=200)
    kept = write(ledger, *(make_pin(f"{number}", 400 * PAGE) for number in range(3)), budget_bytes=budget)
    assert kept == {"0"}
    assert ledger.pins.num_bytes <= budget // 4
    assert write(ledger, make_pin("small"), budget_bytes=budget) == {"small"}
    before = len(ledger)
    ledger._written_bytes = budget
    ledger.forget(budget, lambda *_: 1.0)
    assert 0 < len(ledger) < before
    assert ledger.num_bytes <= budget
    ledger.close()


@pytest.mark.parametrize(
    "change", ["tokens = x'0100'", "pin_id = 'other'", "names = '[\"stolen\", null]'", "expires_at = 7e9"]
)
def test_a_damaged_pin_is_left_out_and_counted(tmp_path: Path, change: str):
    ledger = open_ledger(tmp_path / "l.sqlite")
    write(ledger, make_pin("a"), make_pin("b"))
    ledger._connection.execute(f"UPDATE pins SET {change} WHERE pin_id = 'a'")
    assert [pin.pin_id for pin in read(ledger)] == ["b"]
    assert ledger.pins.damaged == 1
    ledger.close()


def test_a_file_of_the_schema_without_pins_keeps_what_was_learnt(tmp_path: Path):
    path = tmp_path / "l.sqlite"
    ledger = open_ledger(path)
    ledger.write([record([1, 2, 3, 4])], clock=5, requests=5, namespaces=[NAMESPACE])
    ledger._connection.execute("DROP TABLE pins")
    ledger._connection.execute("PRAGMA user_version = 1")
    ledger.close()
    again = open_ledger(path)
    assert (len(again), again.clock, list(again.namespaces().values())) == (1, 5, [NAMESPACE])
    assert write(again, make_pin("p")) == {"p"}
    again.close()
    assert named(path) == ["p"]
    assert [each.name for each in tmp_path.iterdir() if "set-aside" in each.name] == []


def test_a_known_ledger_opens_while_another_server_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        ledger_database, "BUSY_SECONDS", 0.0
    )  # who needs the lock fails, instead of waiting for it
    path = tmp_path / "l.sqlite"
    busy = open_ledger(path)
    write(busy, make_pin("p"))
    busy._connection.execute("BEGIN IMMEDIATE")
    assert named(path) == ["p"]
    busy._connection.execute("ROLLBACK")
    busy.close()


# ---- beside a server ----


def writer_of(ledger: Ledger, **settings) -> LedgerWriter:
    evidence = ReuseEvidence.of(ReuseEstimator())
    settings = {"budget_bytes": BUDGET, "clock": 0, "evidence": evidence, **settings}
    return LedgerWriter(ledger, worth=lambda *_: 1.0, **settings)


def test_pins_are_written_while_the_server_runs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    path = tmp_path / "l.sqlite"
    first, second = make_pin("first"), make_pin("second")
    writer = writer_of(open_ledger(path))
    writer.keep_pins([first, second], 1)
    wait_until(lambda: writer.kept_pins == {"first", "second"})
    assert named(path) == ["first", "second"], "without a stop"
    writer.keep_pins([second], 2)
    wait_until(lambda: writer.kept_pins == {"second"})
    assert named(path) == ["second"]
    writer.close()


def test_a_server_only_ends_pins_that_it_knows(tmp_path: Path):
    path = tmp_path / "l.sqlite"
    ledger = open_ledger(path)
    write(ledger, make_pin("restored"))
    (restored,) = read(ledger)
    writer = writer_of(ledger, pins=[restored])
    other = open_ledger(path)
    write(other, make_pin("of another server"))
    other.close()
    assert writer.kept_pins == {"restored"}
    writer.keep_pins([], 1)
    writer.close()
    assert named(path) == ["of another server"]


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    ledger = open_ledger(tmp_path / "l.sqlite")
    ledger._connection.execute("PRAGMA query_only = ON")
    writer = writer_of(ledger)
    writer.keep_pins([make_pin("p")], 1)
    wait_until(lambda: writer._has_warned)
    assert writer.kept_pins == frozenset()
    ledger._connection.execute("PRAGMA query_only = OFF")

    def another_visit() -> bool:
        writer.put(ledger_writer.Visit((), 2, None, None))
        return bool(writer.kept_pins)

    wait_until(another_visit)
    writer.close()
    assert named(tmp_path / "l.sqlite") == ["p"]


def test_pins_beyond_the_room_are_named_once(tmp_path: Path, caplog):
    writer = writer_of(open_ledger(tmp_path / "l.sqlite"), budget_bytes=10_000)
    writer.keep_pins([make_pin("big", 1000 * PAGE), make_pin("small")], 1)
    writer.close()
    assert writer.kept_pins == {"small"}
    assert caplog.text.count("1 pins will not outlive the server") == 1
