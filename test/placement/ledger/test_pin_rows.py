"""Pins in the ledger: what comes back, what does not fit, and what becomes of an earlier schema."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_importance.placement.ledger import ledger_file, ledger_writer
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LedgerPlace
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.reuse.estimator import ReuseEstimator

from support.waiting import wait_until
from support.workloads.ledger_rows import NAMESPACE, PAGE, make_earlier, open_ledger, record

BUDGET = 1 << 20


def make_pin(name: str, tokens: int = 2 * PAGE, **kwargs) -> Pin:
    return Pin(name, array("q", range(len(name), len(name) + tokens)), **kwargs)


def read(ledger: Ledger, now: float = 100.0) -> list[Pin]:
    return ledger.pins.read(now, page_size=PAGE)


def write(ledger: Ledger, *added: Pin, ended: tuple[str, ...] = (), budget_bytes: int = BUDGET) -> set[str]:
    return ledger.pins.write(added, ended, now=100.0, budget_bytes=budget_bytes)


def named(place: LedgerPlace) -> list[str]:
    """What the next server finds."""
    ledger = open_ledger(place)
    try:
        return [pin.pin_id for pin in read(ledger)]
    finally:
        ledger.close()


def test_a_pin_comes_back_as_it_was_and_in_its_order(place: LedgerPlace):
    pins = [
        make_pin("plain"),
        make_pin("salted", cache_salt="tenant", expires_at=100.5),
        make_pin("keyed", extra_key="lora", expires_at=1e9),
    ]
    ledger = open_ledger(place)
    assert write(ledger, *pins) == {"plain", "salted", "keyed"}
    ledger.close()
    again = open_ledger(place)
    for before, after in zip(pins, read(again), strict=True):
        for name in ("pin_id", "tokens", "extra_key", "cache_salt", "expires_at"):
            assert getattr(after, name) == getattr(before, name), name
    assert [pin.pin_id for pin in read(again, now=100.5)] == ["plain", "keyed"]
    again.close()


def test_ended_and_expired_pins_leave_the_ledger(place: LedgerPlace):
    ledger = open_ledger(place)
    write(ledger, make_pin("a"), make_pin("b"), make_pin("short", expires_at=100.5))
    write(ledger, ended=("a",))
    ledger.pins.write([], (), now=101.0, budget_bytes=BUDGET)
    assert ledger.database.execute("SELECT pin_id FROM pins") == [("b",)]
    ledger.close()


def test_models_keep_their_own_pins(place: LedgerPlace):
    ours, theirs = open_ledger(place), open_ledger(place, b"other")
    write(ours, make_pin("p"))
    write(theirs, make_pin("p", PAGE))
    write(theirs, ended=("p",))
    assert ([pin.pin_id for pin in read(ours)], read(theirs)) == (["p"], [])
    ours.close()
    theirs.close()


def test_pins_are_bounded_and_prefixes_make_room_for_them(place: LedgerPlace):
    ledger = open_ledger(place)
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
    "change", ["tokens = pages", "pin_id = 'other'", "names = '[\"stolen\", null]'", "expires_at = 7e9"]
)
def test_a_damaged_pin_is_left_out_and_counted(place: LedgerPlace, change: str):
    ledger = open_ledger(place)
    write(ledger, make_pin("a"), make_pin("b"))
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    (pages,) = ledger.database.execute("SELECT pages FROM prefixes")[0]
    values = (pages,) if "pages" in change else ()
    ledger.database.execute(f"UPDATE pins SET {change.replace('pages', '?')} WHERE pin_id = 'a'", values)
    assert [pin.pin_id for pin in read(ledger)] == ["b"]
    assert ledger.pins.damaged == 1
    ledger.close()


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_pin_that_no_answer_could_name_is_left_out_and_counted(place: LedgerPlace, field: str):
    ledger = open_ledger(place)
    write(ledger, make_pin("a", **{field: "\ud800"}), make_pin("b", **{field: "\U0001f511"}))
    assert [(pin.pin_id, getattr(pin, field)) for pin in read(ledger)] == [("b", "\U0001f511")]
    assert ledger.pins.damaged == 1
    ledger.close()


def test_a_ledger_of_the_schema_without_pins_keeps_what_was_learnt(place: LedgerPlace):
    ledger = open_ledger(place)
    ledger.write([record([1, 2, 3, 4])], clock=5, requests=5, namespaces=[NAMESPACE])
    make_earlier(ledger, 1)
    ledger.close()
    again = open_ledger(place)
    assert (len(again), again.clock, list(again.namespaces().values())) == (1, 5, [NAMESPACE])
    assert write(again, make_pin("p")) == {"p"}
    again.close()
    assert named(place) == ["p"]
    if isinstance(place, Path):
        assert [each.name for each in place.parent.iterdir() if "set-aside" in each.name] == []


def test_a_disk_too_full_for_a_newer_schema_costs_no_ledger(file: Path, monkeypatch: pytest.MonkeyPatch):
    """SQLite ends the transaction by itself there: what was learnt is no damaged file."""
    ledger = open_ledger(file)
    ledger.write([record([1, 2, 3, 4])], clock=5, requests=5, namespaces=[NAMESPACE])
    make_earlier(ledger, 1)
    ledger.close()

    def statements() -> Iterator[str]:
        yield "ROLLBACK"  # as SQLite does
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ledger_file, "steps_from", lambda *_: [(2, statements())])
        with pytest.raises(LedgerUnusable, match="full: make way for it, or name another"):
            open_ledger(file)
    again = open_ledger(file)
    assert len(again) == 1
    again.close()
    assert [each.name for each in file.parent.iterdir() if "set-aside" in each.name] == []


def test_a_known_ledger_opens_while_another_server_writes(
    place: LedgerPlace, monkeypatch: pytest.MonkeyPatch
):
    # Who needs the lock fails, instead of waiting for it.
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.0)
    if not isinstance(place, Path):
        monkeypatch.setattr("sgl_importance.placement.ledger.postgres_database.BUSY_SECONDS", 0.001)
    busy = open_ledger(place)
    write(busy, make_pin("p"))
    with busy.database.transaction(alone=True):
        busy.database.execute("UPDATE models SET used = 0")
        assert named(place) == ["p"]
    busy.close()


# ---- beside a server ----


def writer_of(ledger: Ledger, **settings) -> LedgerWriter:
    evidence = ReuseEvidence.of(ReuseEstimator())
    settings = {"budget_bytes": BUDGET, "clock": 0, "evidence": evidence, **settings}
    return LedgerWriter(ledger, worth=lambda *_: 1.0, **settings)


def test_pins_are_written_while_the_server_runs(place: LedgerPlace, monkeypatch):
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    first, second = make_pin("first"), make_pin("second")
    writer = writer_of(open_ledger(place))
    writer.keep_pins([first, second], 1)
    wait_until(lambda: writer.kept_pins == {"first", "second"})
    assert named(place) == ["first", "second"], "without a stop"
    writer.keep_pins([second], 2)
    wait_until(lambda: writer.kept_pins == {"second"})
    assert named(place) == ["second"]
    writer.close()


def test_a_pin_in_place_of_one_of_its_name_is_written(place: LedgerPlace, monkeypatch):
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    now = [100.0]
    monkeypatch.setattr(ledger_writer, "steady_time", lambda: now[0])
    writer = writer_of(open_ledger(place))
    other = make_pin("other")
    writer.keep_pins([make_pin("renewed", expires_at=200.0), make_pin("moved"), other], 1)
    wait_until(lambda: writer.kept_pins == {"renewed", "moved", "other"})
    now[0] = 300.0  # the first has ended; both come anew before the writer has seen them gone
    renewed, moved = make_pin("renewed", expires_at=400.0), make_pin("moved", 3 * PAGE, cache_salt="tenant")
    writer.keep_pins([other, renewed, moved], 2)
    writer.close()
    assert writer.kept_pins == {"renewed", "moved", "other"}
    ledger = open_ledger(place)
    found = {pin.pin_id: pin for pin in read(ledger, now=300.0)}
    ledger.close()
    assert list(found) == ["other", "renewed", "moved"]
    assert found["renewed"].expires_at == 400.0
    assert found["moved"].tokens == moved.tokens
    assert found["moved"].cache_salt == "tenant"


def test_a_server_only_ends_pins_that_it_knows(place: LedgerPlace):
    ledger = open_ledger(place)
    write(ledger, make_pin("restored"))
    (restored,) = read(ledger)
    writer = writer_of(ledger, pins=[restored])
    other = open_ledger(place)
    write(other, make_pin("of another server"))
    other.close()
    assert writer.kept_pins == {"restored"}
    writer.keep_pins([], 1)
    writer.close()
    assert named(place) == ["of another server"]


def test_what_could_not_be_written_is_written_later(file: Path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    ledger = open_ledger(file)
    ledger.database.execute("PRAGMA query_only = ON")
    writer = writer_of(ledger)
    writer.keep_pins([make_pin("p")], 1)
    wait_until(lambda: writer._has_warned)
    assert writer.kept_pins == frozenset()
    ledger.database.execute("PRAGMA query_only = OFF")

    def another_visit() -> bool:
        writer.put(ledger_writer.Visit((), 2, None, None))
        return bool(writer.kept_pins)

    wait_until(another_visit)
    writer.close()
    assert named(file) == ["p"]


def test_pins_beyond_the_room_are_named_once(place: LedgerPlace, caplog):
    writer = writer_of(open_ledger(place), budget_bytes=10_000)
    writer.keep_pins([make_pin("big", 1000 * PAGE), make_pin("small")], 1)
    writer.close()
    assert writer.kept_pins == {"small"}
    assert caplog.text.count("1 pins will not outlive the server") == 1
