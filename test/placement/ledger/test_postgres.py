"""A ledger in PostgreSQL: out of reach, of another version, with a password, and written by many."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import numpy as np
import pytest

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement import LedgerOptions
from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger_database import LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LedgerPlace, address_problem
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.postgres_url import url_problem
from sgl_importance.reuse.estimator import ReuseEstimator

from support.postgres import Postgres
from support.waiting import wait_until
from support.workloads.ledger_rows import NAMESPACE, open_ledger, random_tree, record


def writer_of(place: LedgerPlace, model: bytes = b"m", **settings: object) -> LedgerWriter:
    started = {"clock": 0, "evidence": ReuseEvidence.of(ReuseEstimator()), "budget_bytes": 1 << 28}
    return LedgerWriter(open_ledger(place, model), worth=lambda *_: 1.0, **{**started, **settings})


@pytest.fixture
def database(postgres: Postgres) -> Iterator[Postgres]:
    """Without a ledger, and running again afterwards."""
    postgres.forget()
    yield postgres
    if not postgres.is_running:
        postgres.start()


@pytest.mark.parametrize(("servers", "models"), [(6, 1), (6, 3)], ids=["one model", "three models"])
def test_many_servers_write_at_once(
    place: LedgerPlace, monkeypatch: pytest.MonkeyPatch, servers: int, models: int
) -> None:
    """Each writes prefixes of its own and one that all have; budgets are kept meanwhile."""
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    shared = record([7, 7, 7, 7])
    batches, batch = 5, 20

    def serve(number: int) -> None:
        writer = writer_of(place, bytes([number % models]))
        rng = random.Random(number)
        for clock in range(1, batches + 1):
            own = [record([number * 1000 + clock, rng.randrange(99), 1, each]) for each in range(batch)]
            assert writer.put(Visit([*own, shared], clock, NAMESPACE, None))
        writer.close()
        assert writer.lost == 0

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in range(models):
        with closing(open_ledger(place, bytes([model]))) as ledger:
            each = servers // models
            assert (len(ledger), ledger.clock) == (each * batches * batch + 1, each * batches)
            assert len(list(ledger.prefixes())) == len(ledger)
            assert ledger.damaged_rows == 0


def test_what_another_forgot_meanwhile_is_forgotten_once(
    place: LedgerPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = open_ledger(place), open_ledger(place)
    one.write(random_tree(random.Random(1), 300), clock=100, requests=100)
    budget = one.num_bytes // 2
    two._written_bytes = budget
    begin = one.database.transaction

    def late(*, alone: bool = False) -> AbstractContextManager[None]:
        """The other one had its turn first, between our count and our transaction."""
        assert two.forget(budget, lambda *_: 1.0) > 0
        return begin(alone=alone)

    monkeypatch.setattr(one.database, "transaction", late)
    assert one.forget(budget, lambda *_: 1.0) == 0
    assert one.num_bytes > 0.8 * budget
    one.close()
    two.close()


def test_two_databases_keep_two_fleets_of_one_model_apart(database: Postgres) -> None:
    """Rows, pins and clock of one are unknown to the other, and so is what it forgets."""
    database.execute("CREATE DATABASE other_fleet")
    try:
        with closing(open_ledger(database.url)) as ours:
            with closing(open_ledger(database.url.replace("/postgres?", "/other_fleet?"))) as theirs:
                ours.write([record([1, 2, 3, 4])], clock=5, requests=5)
                theirs.write([record([5, 6, 7, 8])], clock=2, requests=2)
                assert (ours.clock, theirs.clock) == (5, 2)
                assert [list(row.token_ids or ()) for row in theirs.prefixes()] == [[5, 6, 7, 8]]
            database.forget()
            with closing(open_ledger(database.url.replace("/postgres?", "/other_fleet?"))) as theirs:
                assert (len(theirs), theirs.clock) == (1, 2)
    finally:
        database.execute("DROP DATABASE other_fleet WITH (FORCE)")


def test_a_database_that_is_down_is_named_with_the_cure(database: Postgres) -> None:
    database.stop()
    with pytest.raises(LedgerUnusable) as refused:
        open_ledger(database.url)
    message = str(refused.value)
    assert database.url in message
    assert "--kv-importance-ledger" in message
    assert len(message.splitlines()) == 1


def test_a_wrong_password_is_named_and_not_shown(
    database: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGPASSWORD", "open sesame")
    with pytest.raises(LedgerUnusable, match=r"password authentication failed .*PGPASSWORD") as refused:
        open_ledger(database.url)
    assert "open sesame" not in str(refused.value) + caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:open%20sesame@host/db",
        "postgres://user:sesame@host:1,other:2/db",
        "postgresql:///db?host=/tmp&password=sesame",
        "postgresql://u@h/db?sslpassword=sesame",
        "postgresql://user:sesame/open@host/db",
        "postgresql://user:sesame?open@host/db",
        "postgresql://user:sesame#open@host/db",
        "postgresql://user:123/sesame@host/db",
    ],
)
def test_a_password_in_the_address_is_refused_and_not_repeated(url: str) -> None:
    for read in (
        lambda: ImportanceOptions(policy="importance", ledger=LedgerOptions(place=url)),
        lambda: open_ledger(url),
    ):
        with pytest.raises((ValueError, LedgerUnusable), match=r"holds a password.*PGPASSWORD") as refused:
            read()
        assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://host/db", "PostgreSQL"),
        ("postgresql://host\n/db", "print"),
        ("postgresql://[host/db", "no address"),
    ],
)
def test_what_is_no_address_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ImportanceOptions(policy="importance", ledger=LedgerOptions(place=url))


def test_what_libpq_cannot_read_is_refused_before_the_launch() -> None:
    assert "postgresql://user@host" in str(address_problem("postgresql://host/db?colour=blue"))
    assert address_problem("postgresql://user@one:5432,two:5433/db?sslmode=require") is None
    for sound in ("postgresql://user@[::1]:5432/db", "postgresql://host:5432/db?user=me@other"):
        assert url_problem(sound) is None
    assert address_problem("/some/directory") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE schema_version SET version = 99", "schema 99, newer than 3"),
        ("UPDATE format SET reuse_layout = '3 classes'", "counts reuse by 3 classes"),
        ("ALTER TABLE models RENAME COLUMN identity TO name", "identity"),
    ],
)
def test_a_ledger_of_another_version_is_left_alone(database: Postgres, change: str, message: str) -> None:
    with closing(open_ledger(database.url)) as ledger:
        ledger.write([record([1, 2, 3, 4])], clock=1, requests=1)
    database.execute(change)
    with pytest.raises(LedgerUnusable, match=message):
        open_ledger(database.url)
    assert database.execute("SELECT count(*) FROM prefixes") == [(1,)]


# ---- beside a server ----


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_SECONDS", "LOOK_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(ledger_writer, name, 0.02)
    monkeypatch.setattr(ledger_writer, "ANSWER_SECONDS", 5.0)


@pytest.mark.usefixtures("_at_once")
def test_a_database_that_goes_down_while_serving_comes_back(
    database: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    from array import array

    from sgl_importance.placement.pins.pin import Pin

    caplog.set_level(logging.INFO)
    pin = Pin("p", array("q", range(8)))
    writer = writer_of(database.url)
    writer.put(Visit([record([1, 2, 3, 4])], 1, NAMESPACE, None))
    writer.keep_pins([pin], 1)
    wait_until(lambda: writer.surviving_pins() == {"p"})
    database.stop()
    wait_until(lambda: not writer.surviving_pins())
    for clock in range(2, 5):
        assert writer.put(Visit([record([clock, 2, 3, 4])], clock, NAMESPACE, None))
        wait_until(lambda clock=clock: writer.lost == clock - 1)
    assert not writer.is_writing
    database.start()
    wait_until(lambda: writer.surviving_pins() == {"p"})
    assert writer.is_writing
    writer.put(Visit([record([9, 2, 3, 4])], 9, NAMESPACE, None))
    writer.close()
    assert writer.lost == 3
    assert caplog.text.count("the server goes on without") == 1
    assert caplog.text.count("is reached again") == 1
    assert database.password not in caplog.text
    with closing(open_ledger(database.url, b"m")) as ledger:
        assert {row.token_ids[0] for row in ledger.prefixes() if row.token_ids} == {1, 9}
        assert ledger.clock == 9, "time went on while it was down"


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_a_batch_whose_commit_was_not_answered_counts_once(
    database: Postgres, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    import psycopg

    writer = writer_of(database.url)
    connection = writer._ledger.database.connection
    begin = connection.transaction

    @contextmanager
    def dying() -> Iterator[None]:
        with begin():
            yield
            if not is_kept:
                database.stop()
        database.stop()
        connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    reuse = ReuseEstimator()
    reuse.began(3)
    monkeypatch.setattr(connection, "transaction", dying)
    writer.put(Visit([record([1, 2, 3, 4])], reuse.tick(), NAMESPACE, ReuseEvidence.of(reuse)))
    wait_until(lambda: writer.lost == 1)
    database.start()
    reuse.began(4)
    clock = reuse.tick()
    visit = Visit([record([5, 6, 7, 8])], clock, NAMESPACE, ReuseEvidence.of(reuse))
    wait_until(lambda: writer.put(visit) and writer.written > 0)
    writer.close()
    with closing(open_ledger(database.url, b"m")) as ledger:
        assert (len(ledger), ledger.clock) == (1 + is_kept, clock)
        evidence = ledger.evidence()
        assert evidence is not None
        np.testing.assert_allclose(evidence.reached, reuse.counts()[1])
        assert evidence.reached.any()


@pytest.mark.usefixtures("_at_once")
def test_tables_that_are_dropped_while_serving_are_made_again(database: Postgres) -> None:
    writer = writer_of(database.url)
    writer.put(Visit([record([1, 2, 3, 4])], 1, NAMESPACE, None))
    wait_until(lambda: writer.written)
    database.forget()
    wait_until(lambda: writer.put(Visit([record([5, 2, 3, 4])], 2, NAMESPACE, None)) and writer.written > 1)
    writer.close()
    assert database.execute("SELECT count(*) FROM prefixes") == [(1,)]


def test_tables_that_another_server_made_again_are_not_taken_for_those_before(
    database: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models have other numbers in them: rows would be another model's."""
    monkeypatch.setattr(ledger_writer, "LOOK_SECONDS", 3600.0)
    with closing(open_ledger(database.url, b"first")):
        writer = writer_of(database.url, b"second")
    database.forget()
    with closing(open_ledger(database.url, b"one")), closing(open_ledger(database.url, b"other")) as other:
        writer.put(Visit([record([1, 2, 3, 4])], 1, NAMESPACE, None))
        writer.close()
        assert (len(other), other.clock) == (0, 0)
    with closing(open_ledger(database.url, b"second")) as ledger:
        assert (len(ledger), ledger.clock) == (1, 1)


def test_a_database_that_hangs_holds_no_stop(database: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_writer, "CLOSE_SECONDS", 0.1)
    writer = writer_of(database.url)
    (backend,) = writer._ledger.database.execute("SELECT pg_backend_pid()")[0]
    os.kill(backend, signal.SIGSTOP)
    try:
        writer.put(Visit([record([1, 2, 3, 4])], 1, NAMESPACE, None))
        writer.close()
        assert writer._worker.unfinished
    finally:
        os.kill(backend, signal.SIGCONT)
    writer._worker.close()
    assert writer.written == 1
