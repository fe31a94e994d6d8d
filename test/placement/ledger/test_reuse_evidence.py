"""Reuse evidence as it is kept in a ledger, also across versions."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.placement.ledger.ledger_place import LedgerPlace
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS
from sgl_importance.reuse.reuse_class import CLASSES_OF_END, NUM_CLASSES

from support.workloads.ledger_rows import make_earlier, open_ledger, record

BUCKETS_BEFORE = 42
"""Age buckets in the evidence of schemas 1 and 2."""

cells = st.lists(
    st.tuples(st.integers(0, NUM_CLASSES - 1), st.integers(0, NUM_AGE_BUCKETS - 1), st.floats(0, 1e6)),
    max_size=10,
)


def evidence_of(hits: list[tuple[int, int, float]], reached: list[tuple[int, int, float]]) -> ReuseEvidence:
    none = ReuseEvidence.nothing()
    tables = none.hits.copy(), none.reached.copy()
    for table, values in zip(tables, (hits, reached), strict=True):
        for row, bucket, value in values:
            table[row, bucket] = value
    return ReuseEvidence(*tables, refreshes=7)


def assert_same(found: ReuseEvidence | None, expected: ReuseEvidence) -> None:
    assert found is not None
    assert found.refreshes == expected.refreshes
    np.testing.assert_array_equal((found.hits, found.reached), (expected.hits, expected.reached))


def as_before(evidence: ReuseEvidence, classes: int = CLASSES_OF_END) -> bytes:
    """What versions wrote whose life tables ended at 32,768 requests; the first of them had fewer classes."""
    header = np.array([evidence.refreshes, classes, BUCKETS_BEFORE], dtype="<i8").tobytes()
    counts = np.stack([evidence.hits, evidence.reached])[:, :classes, :BUCKETS_BEFORE]
    return zlib.compress(header + counts.astype("<f8").tobytes(), level=1)


@given(cells, cells)
def test_it_comes_back_as_it_was(hits: list, reached: list) -> None:
    evidence = evidence_of(hits, reached)
    assert_same(ReuseEvidence.from_bytes(evidence.to_bytes()), evidence)


@given(cells, cells, st.sampled_from([CLASSES_OF_END, NUM_CLASSES]))
def test_what_earlier_versions_wrote_is_read(hits: list, reached: list, classes: int) -> None:
    known = [
        [(row % classes, bucket % BUCKETS_BEFORE, value) for row, bucket, value in values]
        for values in (hits, reached)
    ]
    evidence = evidence_of(*known)
    assert_same(ReuseEvidence.from_bytes(as_before(evidence, classes)), evidence)


def test_a_ledger_of_schema_2_keeps_what_was_learnt_while_its_server_goes_on(place: LedgerPlace) -> None:
    """Its life tables ended at 32,768 requests."""
    learnt = evidence_of([(3, 5, 2.0)], [(3, 5, 8.0), (4, BUCKETS_BEFORE - 1, 1.0)])
    late = evidence_of([(3, NUM_AGE_BUCKETS - 1, 1.0)], [(3, NUM_AGE_BUCKETS - 1, 1.0)])
    earlier = open_ledger(place)
    earlier.write([record([1, 2, 3, 4])], clock=5, requests=5)
    set_evidence = "UPDATE models SET evidence = ?"
    earlier.database.execute(set_evidence, (as_before(learnt),))
    (layout,) = earlier.database.execute("SELECT reuse_layout FROM format")[0]
    make_earlier(earlier, 2)
    (layout_before,) = earlier.database.execute("SELECT reuse_layout FROM format")[0]
    assert layout_before.endswith(f"x {BUCKETS_BEFORE} age buckets")

    ledger = open_ledger(place)
    assert (len(ledger), ledger.clock) == (1, 5)
    assert ledger.database.execute("SELECT reuse_layout FROM format") == [(layout,)]
    assert_same(ledger.evidence(), learnt)
    ledger.write([record([5, 6, 7, 8])], clock=6, requests=1, evidence=late)
    ledger.database.execute(set_evidence, (as_before(evidence_of([], [(3, 5, 9.0)])),))  # by the other server
    assert_same(ledger.evidence(), learnt.followed_by(late))
    ledger.close()
    earlier.close()
    again = open_ledger(place)
    assert_same(again.evidence(), learnt.followed_by(late))
    again.close()
    if isinstance(place, Path):
        assert [each.name for each in place.parent.iterdir() if "set-aside" in each.name] == []


def test_tables_of_other_shapes_are_not_read() -> None:
    for classes, buckets in (
        (CLASSES_OF_END + 1, NUM_AGE_BUCKETS),
        (0, NUM_AGE_BUCKETS),
        (NUM_CLASSES + CLASSES_OF_END, NUM_AGE_BUCKETS),
        (CLASSES_OF_END, NUM_AGE_BUCKETS - 1),
    ):
        header = np.array([1, classes, buckets], dtype="<i8").tobytes()
        assert ReuseEvidence.from_bytes(zlib.compress(header + bytes(16 * classes * buckets))) is None
