"""What the ledger keeps, forgets, shares and survives."""

from __future__ import annotations

import functools
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes.digests import root_digest
from sgl_importance.placement.ledger import ledger_file
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerError, LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LedgerPlace

from support.workloads.ledger_rows import NAMESPACE, PAGE, ROOT, open_ledger, random_tree, record


def by_digest(ledger: Ledger) -> dict:
    return {each.digest: each for each in ledger.prefixes()}


def test_a_row_comes_back_as_it_was(place: LedgerPlace):
    first = record([1, 2, 3, 4, 5, 6, 7, 8], last_access=7, accesses=5, span=6)
    second = record([9, 10, 11, 12], after=first, last_access=6, at_risk_as=None)
    ledger = open_ledger(place)
    assert ledger.write([first, second], clock=9, requests=9, namespaces=[NAMESPACE]) == 9
    ledger.close()
    again = open_ledger(place)
    back = by_digest(again)[first.digest]
    for name in (
        "parent",
        "depth",
        "tokens",
        "queries",
        "accesses",
        "span",
        "at_risk_as",
        "last_access",
        "used",
    ):
        assert getattr(back, name) == getattr(first, name), name
    assert list(back.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert back.digests(PAGE) == first.digests(PAGE)
    np.testing.assert_array_equal(back.vectors, first.vectors)
    assert by_digest(again)[second.digest].at_risk_as is None
    assert again.namespaces() == {ROOT: NAMESPACE}
    assert [each.last_access for each in again.prefixes()] == [7, 6]
    assert [each.digest for each in again.prefixes(max_pages=2)] == [first.digest]
    again.close()


def test_without_token_ids_only_digests_are_kept(place: LedgerPlace):
    known = record([101, 102, 103, 104, 105, 106, 107, 108])
    ledger = open_ledger(place, keep_token_ids=False)
    ledger.write([known], clock=0, requests=0, namespaces=[("key", "secret salt")])
    (back,) = ledger.prefixes()
    assert back.token_ids is None
    assert back.digests(PAGE) == known.digests(PAGE)
    assert ledger.namespaces() == {}
    tokens = np.asarray(known.token_ids, dtype="<i4").tobytes()
    for table in ("prefixes", "namespaces", "models", "pins"):
        for value in (value for row in ledger.database.execute(f"SELECT * FROM {table}") for value in row):
            assert value != json.dumps(("key", "secret salt"))
            assert not isinstance(value, bytes) or tokens not in value
    ledger.close()
    if isinstance(place, Path):
        content = place.read_bytes()
        assert b"secret salt" not in content
        assert tokens not in content


def test_nobody_else_may_read_it(file: Path):
    ledger = open_ledger(file)
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    for path in (file, file.with_name(f"{file.name}-wal")):
        assert path.stat().st_mode & 0o077 == 0, path
    ledger.close()


def test_models_are_kept_apart(place: LedgerPlace):
    ours, theirs = open_ledger(place), open_ledger(place, b"other")
    ours.write([record([1, 2, 3, 4])], clock=5, requests=5)
    assert (len(ours), len(theirs)) == (1, 0)
    assert (ours.clock, theirs.clock) == (5, 0)
    ours.close()
    theirs.close()


def test_two_servers_share_rows_and_the_clock(place: LedgerPlace):
    one, two = open_ledger(place), open_ledger(place)
    known = record([1, 2, 3, 4], last_access=10)
    one.write([known], clock=10, requests=10)
    # The other server's own clock stands at 3 and it saw the prefix one request ago.
    assert two.write([record([1, 2, 3, 4], last_access=2)], clock=3, requests=3) == 13
    (row,) = one.prefixes()
    assert row.last_access == 12
    one.close()
    two.close()


def test_a_failed_write_keeps_nothing(place: LedgerPlace):
    ledger, admin = open_ledger(place), open_ledger(place)
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    admin.database.execute("ALTER TABLE namespaces RENAME TO elsewhere")  # which is written last
    many = random_tree(random.Random(0), 400)
    with pytest.raises(LedgerError, match="namespaces"):
        ledger.write(many, clock=2, requests=1, namespaces=[NAMESPACE])
    assert (len(ledger), ledger.clock) == (1, 1)
    admin.database.execute("ALTER TABLE elsewhere RENAME TO namespaces")
    ledger.write(many, clock=2, requests=1, namespaces=[NAMESPACE])
    assert len(ledger) == 401
    assert list(ledger.namespaces().values()) == [NAMESPACE]
    ledger.close()
    admin.close()


def test_a_write_that_fills_the_disk_keeps_nothing(file: Path):
    ledger = open_ledger(file)
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    size = ledger.database.connection.execute("PRAGMA page_count").fetchone()[0]
    ledger.database.connection.execute(f"PRAGMA max_page_count = {size}")
    many = random_tree(random.Random(0), 400)
    with pytest.raises(LedgerError, match="full"):
        ledger.write(many, clock=2, requests=1)
    assert (len(ledger), ledger.clock) == (1, 1)
    ledger.database.connection.execute("PRAGMA max_page_count = 100000")
    ledger.write(many, clock=2, requests=1)
    assert len(ledger) == 401
    ledger.close()


def prefix_closed(ledger: Ledger) -> bool:
    rows = by_digest(ledger)
    return all(row.parent == ROOT or row.parent in rows for row in rows.values())


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), share=st.floats(0.2, 0.9))
def test_least_worth_is_forgotten_first_and_no_prefix_before_what_follows(
    new_place: Callable[[], LedgerPlace], seed: int, share: float
):
    rng = random.Random(seed)
    records = random_tree(rng, 300)
    ledger = open_ledger(new_place())
    ledger.write(records, clock=100, requests=100)

    def worth(reuse_class, age, tokens, depth):
        return 1.0 / (1 + age)

    full = ledger.num_bytes
    forgotten = ledger.forget(int(share * full), worth)
    assert forgotten > 0
    assert 0.8 * share * full <= ledger.num_bytes <= share * full
    assert prefix_closed(ledger)
    kept = by_digest(ledger)
    # What a prefix is worth: its own or the best of what follows.
    best = {each.digest: each.last_access for each in records}
    for each in reversed(records):
        if each.parent in best:
            best[each.parent] = max(best[each.parent], best[each.digest])
    lost = [best[each.digest] for each in records if each.digest not in kept]
    assert len(lost) == forgotten
    if kept:
        assert max(lost) <= min(best[digest] for digest in kept)
    assert ledger.forget(full, worth) == 0
    ledger.close()


def test_rows_of_a_model_that_nobody_serves_fade(place: LedgerPlace):
    old, new = open_ledger(place, b"old"), open_ledger(place, b"new")
    for ledger in (old, new):
        ledger.write(random_tree(random.Random(1), 200), clock=0, requests=0)
    old.database.execute("UPDATE models SET used = used - 365 * 86400 WHERE identity = ?", (b"old",))
    new.close()
    new = open_ledger(place, b"new")
    new.forget(int(0.6 * new.num_bytes), lambda *_: 1.0)
    assert len(new) == 200
    assert len(old) < 200
    old.close()
    new.close()


# ---- files that are not what they should be ----


def damaged(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".set-aside-" in path.name]


def filled(folder: Path) -> Path:
    path = folder / "ledger.sqlite"
    ledger = open_ledger(path)
    ledger.write(random_tree(random.Random(2), 300), clock=100, requests=100)
    ledger.close()
    return path


@pytest.mark.parametrize(
    "break_it",
    [
        lambda data: b"",
        lambda data: b"no database at all, " * 500,
        lambda data: data[: len(data) // 2],
        lambda data: data[:1000],
        lambda data: b"\0" * 8192 + data[8192:],
        lambda data: data[:4096] + bytes(len(data) - 4096),
    ],
    ids=["empty", "garbage", "half", "head", "no header", "zeros"],
)
def test_a_broken_file_is_set_aside_and_a_new_one_begins(tmp_path: Path, break_it, caplog):
    path = filled(tmp_path)
    data = break_it(path.read_bytes())
    path.write_bytes(data)
    ledger = open_ledger(path)
    assert len(ledger) == 0
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    ledger.close()
    aside = damaged(tmp_path)
    assert [each.read_bytes() for each in aside] == ([data] if data else [])
    assert ("set-aside" in caplog.text) == bool(data)
    again = open_ledger(path)
    assert len(again) == 1
    again.close()


def test_each_broken_file_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    """A disk that damages a file damages the next one soon, too."""
    path = tmp_path / "ledger.sqlite"
    for number in range(3):
        path.write_bytes(b"broken %d, " % number * 500)
        open_ledger(path).close()
    begins = sorted(each.read_bytes()[:8] for each in damaged(tmp_path))
    assert begins == [b"broken 0", b"broken 1", b"broken 2"]


@settings(max_examples=60)
@given(data=st.data())
def test_flipped_bits_are_never_taken_for_knowledge(tmp_path_factory: pytest.TempPathFactory, data):
    folder = tmp_path_factory.mktemp("flip")
    path = filled(folder)
    truth = {each.digest: each for each in random_tree(random.Random(2), 300)}
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    ledger = open_ledger(path)
    try:
        rows = list(ledger.prefixes())
    except LedgerError:
        rows = []  # what a server does with it: test_ledger_feed.py
    for row in rows:
        known = truth[row.digest]
        assert (row.parent, tuple(row.token_ids), row.accesses) == (
            known.parent,
            known.token_ids,
            known.accesses,
        )
        np.testing.assert_array_equal(row.vectors, known.vectors)
    ledger.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("PRAGMA user_version = 99", "schema 99, newer than 3"),
        ("UPDATE format SET reuse_layout = '3 classes'", "counts reuse by 3 classes"),
        ("PRAGMA application_id = 7", "another program"),
        ("DROP TABLE format", "damaged"),
        ("ALTER TABLE pins RENAME COLUMN tokens TO uokens", "damaged"),
    ],
)
def test_another_schema_is_set_aside_with_a_message(tmp_path: Path, change: str, message: str, caplog):
    path = filled(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute(change)
    connection.commit()
    connection.close()
    ledger = open_ledger(path)
    assert len(ledger) == 0
    assert message in caplog.text
    assert len(damaged(tmp_path)) == 1
    ledger.close()


def test_a_file_that_another_server_uses_is_not_taken_away(tmp_path: Path):
    path = filled(tmp_path)
    other = open_ledger(path)
    other.database.connection.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerUnusable, match=r"in use by another server, and .* schema 99"):
        open_ledger(path)
    assert not damaged(tmp_path)
    assert len(other) == 300
    other.close()
    open_ledger(path).close()
    assert len(damaged(tmp_path)) == 1


def test_a_file_that_another_server_is_making_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other writes its schema between two of our reads."""
    path = tmp_path / "ledger.sqlite"
    empty = sqlite3.connect(path)
    empty.execute("PRAGMA journal_mode = WAL")
    empty.close()
    others: list[Ledger] = []

    class Late(sqlite3.Connection):
        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            answer = super().execute(statement, *values)
            if statement == "PRAGMA application_id":
                monkeypatch.undo()
                others.append(open_ledger(path))
            return answer

    monkeypatch.setattr(ledger_file.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Late))
    ours = open_ledger(path)
    (other,) = others
    other.write([record([1, 2, 3, 4])], clock=1, requests=1)
    assert len(ours) == 1
    assert not damaged(tmp_path)
    ours.close()
    other.close()


def test_a_ledger_that_could_not_be_opened_anew_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another file models have other numbers: rows would be another model's."""
    path, away = tmp_path / "ledger.sqlite", tmp_path / "away"
    away.mkdir()
    open_ledger(path, b"other").close()
    ledger = open_ledger(path, b"ours")
    ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    for file in tmp_path.glob("ledger.sqlite*"):
        file.rename(away / file.name)
    open_ledger(path, b"ours").close()

    class Unreadable:
        def __init__(self, database: object) -> None:
            raise LedgerError("disk I/O error")

    with monkeypatch.context() as context:
        context.setattr("sgl_importance.placement.ledger.ledger.NamespaceRows", Unreadable)
        with pytest.raises(LedgerUnusable, match="disk I/O error"):
            ledger.take_place()
    for file in away.iterdir():
        file.replace(tmp_path / file.name)
    assert ledger.database.is_in_place()
    ledger.write([record([5, 6, 7, 8])], clock=2, requests=1)
    assert (len(ledger), ledger.clock, ledger.pins.num_bytes) == (2, 2, 0)
    ledger.close()
    with closing(open_ledger(path, b"other")) as other:
        assert (len(other), other.clock) == (0, 0)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnusable, match="file"):
        open_ledger(tmp_path / "file" / "ledger.sqlite")


def test_a_namespace_is_known_only_by_its_own_root(place: LedgerPlace):
    ledger = open_ledger(place)
    ledger.write([], clock=0, requests=0, namespaces=[("a", None), (None, "salt")])
    ledger.database.execute("UPDATE namespaces SET names = '[\"b\", null]' WHERE names LIKE '[\"a\"%'")
    assert ledger.namespaces() == {root_digest(None, "salt"): (None, "salt")}
    ledger.close()


@pytest.mark.parametrize("names", ["{", "3", '{"a": 1}', "[1, 2]", '["a", "salt"', b"\xff\xfe"])
def test_a_damaged_namespace_is_left_out(file: Path, names: str | bytes):
    ledger = open_ledger(file)
    ledger.write([], clock=0, requests=0, namespaces=[("a", None), (None, "salt")])
    ledger.database.execute("UPDATE namespaces SET names = ? WHERE names LIKE '[\"a\"%'", (names,))
    assert ledger.namespaces() == {root_digest(None, "salt"): (None, "salt")}
    ledger.close()
