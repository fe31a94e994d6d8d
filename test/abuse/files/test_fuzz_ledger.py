"""A spoiled ledger tells what was written, or nothing."""

from __future__ import annotations

import random
import shutil
from array import array
from contextlib import closing
from pathlib import Path

import pytest

from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerError, LedgerUnusable
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.reuse.estimator import ReuseEstimator

from support.fuzz import damage, examples
from support.workloads.ledger_rows import PAGE, record

MODEL = bytes(range(32))


def prefix(number: int, parent: PrefixRecord | None) -> PrefixRecord:
    return record([number] * PAGE, after=parent, last_access=number, accesses=number, at_risk_as=number % 5)


@pytest.fixture(scope="module")
def ledger_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of 60 prefixes and 20 pins, half in the log beside it, as a killed server leaves it."""
    folder, copy = tmp_path_factory.mktemp("ledger"), tmp_path_factory.mktemp("copy")
    records: list[PrefixRecord] = []
    for number in range(60):
        records.append(prefix(number, records[-1] if number % 3 else None))
    with closing(Ledger(folder / "ledger.sqlite", MODEL, page_size=PAGE)) as ledger:
        estimator = ReuseEstimator()
        evidence = ReuseEvidence.of(estimator)
        ledger.write(records[:30], clock=30, requests=30, evidence=evidence, namespaces=[(None, None)])
        ledger.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ledger.write(records[30:], clock=60, requests=30)
        pins = [Pin(f"pin{number}", array("q", range(number, number + PAGE))) for number in range(20)]
        ledger.pins.write(pins, (), now=0.0, budget_bytes=1 << 20)
        for file in folder.iterdir():
            shutil.copy(file, copy)
    return copy


@examples(40, 2000)
def test_a_spoiled_ledger_tells_no_lies(ledger_files: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(3)
    truth = {prefix(number, None).token_ids[0]: number for number in range(60)}
    known = 0
    for example in range(count):
        folder = tmp_path / str(example)
        shutil.copytree(ledger_files, folder)
        for name in rng.choice(
            (("ledger.sqlite",), ("ledger.sqlite-wal",), ("ledger.sqlite", "ledger.sqlite-wal"))
        ):
            file = folder / name
            file.write_bytes(damage(rng, file.read_bytes()))
        if rng.random() < 0.1:
            (folder / "ledger.sqlite-shm").write_bytes(rng.randbytes(rng.randrange(40_000)))
        try:
            ledger = Ledger(folder / "ledger.sqlite", MODEL, page_size=PAGE)
        except LedgerUnusable:
            continue
        with closing(ledger):
            try:
                for row in ledger.prefixes():
                    assert row.token_ids is not None
                    number = truth[row.token_ids[0]]
                    assert (row.accesses, tuple(row.token_ids)) == (number, (number,) * PAGE)
                    known += 1
                for pin in ledger.pins.read(0.0, page_size=PAGE):
                    assert pin.tokens == array("q", range(int(pin.pin_id[3:]), int(pin.pin_id[3:]) + PAGE))
                ledger.evidence()
                ledger.namespaces()
                ledger.write([prefix(1, None)], clock=61, requests=1)
                ledger.forget(1 << 10, lambda *_: 1.0)
            except LedgerError:
                pass  # what a server does with it: test_ledger_feed.py, test_ledger_writer.py
        shutil.rmtree(folder)
    assert known > count
