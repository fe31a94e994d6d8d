"""The ledger beside a server: bounded, silent about passing trouble, and fine after SIGKILL."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_place import LedgerPlace
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.reuse.estimator import REFRESH_INTERVAL, ReuseEstimator

from support.drivers.ledger_victim import BUDGET_BYTES
from support.python_path import TEST, python_path
from support.waiting import wait_until
from support.workloads.ledger_rows import NAMESPACE, open_ledger, random_tree, record

VICTIM = "support.drivers.ledger_victim"


def writer_of(ledger: Ledger, **settings) -> LedgerWriter:
    return LedgerWriter(
        ledger,
        worth=lambda *_: 1.0,
        clock=0,
        evidence=ReuseEvidence.of(ReuseEstimator()),
        **{"budget_bytes": 1 << 30, **settings},
    )


def visit(*records, clock: int = 1) -> Visit:
    return Visit(records, clock, NAMESPACE, None)


def test_what_was_put_before_the_close_is_kept(place: LedgerPlace):
    writer = writer_of(open_ledger(place))
    records = random_tree(random.Random(0), 50)
    for each in records:
        assert writer.put(visit(each))
    writer.close()
    ledger = open_ledger(place)
    assert {each.digest for each in ledger.prefixes()} == {each.digest for each in records}
    assert list(ledger.namespaces().values()) == [NAMESPACE]
    ledger.close()


def test_a_hot_prefix_is_written_once_for_each_batch(place: LedgerPlace):
    writer = writer_of(open_ledger(place))
    for clock in range(1, 1001):
        writer.put(visit(record([1, 2, 3, 4], last_access=clock, accesses=clock), clock=clock))
    writer.close()
    assert writer.written < 20
    ledger = open_ledger(place)
    (row,) = ledger.prefixes()
    assert (row.accesses, row.last_access, ledger.clock) == (1000, 1000, 1000)
    ledger.close()


def test_the_queue_is_bounded_and_never_waits(place: LedgerPlace):
    ledger = open_ledger(place)
    blocker = open_ledger(place)
    # A server that has stopped in the middle of a write.
    blocker.database.execute("BEGIN IMMEDIATE" if isinstance(place, Path) else "BEGIN")
    blocker.database.execute("UPDATE models SET used = 0")
    writer = writer_of(ledger, queue_bytes=100_000)
    # The file stays locked until all are offered: whoever waited for room would do so for ever.
    taken = [writer.put(visit(record([number, 2, 3, 4]))) for number in range(2000)]
    assert 0 < sum(taken) < 2000
    assert writer.lost == 2000 - sum(taken)
    blocker.database.execute("ROLLBACK")
    writer.close()
    assert writer.written == sum(taken)
    blocker.close()


@pytest.mark.parametrize(
    ("spoil", "heal", "message"),
    [
        ("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1000000", "full"),
        ("PRAGMA query_only = ON", "PRAGMA query_only = OFF", "readonly"),
    ],
)
def test_a_full_or_read_only_disk_is_named_once_and_tried_again(
    file: Path, monkeypatch, caplog, spoil: str, heal: str, message: str
):
    monkeypatch.setattr(ledger_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    ledger = open_ledger(file)
    ledger.database.execute(spoil)
    writer = writer_of(ledger)
    for seed in range(5):
        writer.put(visit(*random_tree(random.Random(seed), 300)))
        time.sleep(0.05)
    wait_until(lambda: message in caplog.text)
    assert sum("cannot be written" in line.message for line in caplog.records) == 1
    assert writer.written == 0
    wait_until(lambda: writer.lost == 5)
    assert not writer.is_writing
    ledger.database.execute(heal)
    wait_until(lambda: writer.put(visit(record([1, 2, 3, 4]))) and writer.written)
    writer.close()
    assert "is written again" in caplog.text


def test_damage_found_while_serving_ends_the_ledger_and_nothing_else(file: Path, caplog):
    ledger = open_ledger(file)
    ledger.write(random_tree(random.Random(1), 300), clock=1, requests=1)
    ledger.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ledger.database.execute("PRAGMA cache_size = 1")
    with file.open("r+b") as content:
        content.seek(4096)
        content.write(os.urandom(file.stat().st_size - 4096))
    writer = writer_of(ledger)
    writer.put(visit(*random_tree(random.Random(2), 300)))
    wait_until(lambda: writer._worker.has_failed)
    assert "nothing more is written" in caplog.text
    assert not writer.put(visit(record([1, 2, 3, 4])))
    writer.close()
    assert len(open_ledger(file)) == 0
    assert [each for each in file.parent.iterdir() if ".set-aside-" in each.name]


def test_counts_of_reuse_survive_and_those_of_two_servers_add_up(place: LedgerPlace):
    def serve(reuse: ReuseEstimator, seed: int) -> ReuseEvidence:
        rng, start = random.Random(seed), ReuseEvidence.of(reuse)
        for _ in range(5 * REFRESH_INTERVAL):
            clock = reuse.tick()
            reuse.began(3)
            if rng.random() < 0.5:
                reuse.hit(3, clock)
        new = ReuseEvidence.of(reuse).since(start)
        ledger = open_ledger(place)
        ledger.write([], clock=reuse.clock, requests=5 * REFRESH_INTERVAL, evidence=new)
        ledger.close()
        return new

    first = ReuseEstimator()
    serve(first, 1)
    ledger = open_ledger(place)
    kept = ledger.evidence()
    assert kept is not None
    np.testing.assert_allclose(kept.hits, first.counts()[0])
    np.testing.assert_allclose(kept.reached, first.counts()[1])
    again = ReuseEstimator()
    again.restore(kept.hits, kept.reached, ledger.clock)
    assert again.index(3, 5) == pytest.approx(first.index(3, 5))
    assert again.index(3, 5) != pytest.approx(ReuseEstimator().index(3, 5))
    # It and a second server, which both started from this, count on beside each other.
    news = [serve(first, 2), serve(again, 3)]
    merged = ledger.evidence()
    assert merged is not None
    expected = kept
    for each in news:
        expected = expected.followed_by(each)
    np.testing.assert_allclose(merged.hits, expected.hits)
    assert merged.hits.sum() > news[0].hits.sum() + news[1].hits.sum()
    ledger.close()


def check_intact(place: LedgerPlace) -> int:
    ledger = open_ledger(place)
    rows = list(ledger.prefixes())
    assert ledger.damaged_rows == 0
    digests = {row.digest for row in rows}
    root_or_known = [row.parent in digests or row.depth == 0 for row in rows]
    assert all(root_or_known)
    assert ledger.num_bytes <= 2 * BUDGET_BYTES  # a batch may be killed before it forgets
    evidence = ledger.evidence()
    assert not rows or evidence is not None
    ledger.close()
    if isinstance(place, Path):
        assert not [each for each in place.parent.iterdir() if ".set-aside-" in each.name]
    return len(rows)


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_killed_writer_beside_another_leaves_a_ledger_that_opens(place: LedgerPlace, kills: int):
    rng = random.Random(kills)
    rows = 0
    for number in range(kills):
        victims = [
            subprocess.Popen(
                [sys.executable, "-m", VICTIM, str(place), str(2 * number + each)],
                env={**os.environ, **python_path(TEST)},
                stdout=subprocess.PIPE,
            )
            for each in range(2)
        ]
        try:
            for victim in victims:
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"writing\n"
            time.sleep(rng.uniform(0.0, 0.6))
            for victim in victims:
                victim.kill()
                victim.wait()
                rows = max(rows, check_intact(place))
        finally:
            for victim in victims:
                victim.kill()
                victim.communicate()
    assert rows > 0
