"""Reuse evidence as it is kept in a ledger, also across versions."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS
from sgl_importance.reuse.reuse_class import CLASSES_OF_END, NUM_CLASSES

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


def as_before_ends(evidence: ReuseEvidence) -> bytes:
    """What versions without ends of answers wrote, and read."""
    header = np.array([evidence.refreshes, CLASSES_OF_END, NUM_AGE_BUCKETS], dtype="<i8").tobytes()
    counts = np.stack([evidence.hits[:CLASSES_OF_END], evidence.reached[:CLASSES_OF_END]])
    return zlib.compress(header + counts.astype("<f8").tobytes(), level=1)


@given(cells, cells)
def test_it_comes_back_as_it_was(hits: list, reached: list) -> None:
    evidence = evidence_of(hits, reached)
    again = ReuseEvidence.from_bytes(evidence.to_bytes())
    assert again is not None
    assert again.refreshes == 7
    np.testing.assert_array_equal((again.hits, again.reached), (evidence.hits, evidence.reached))


@given(cells, cells)
def test_without_ends_it_is_what_earlier_versions_write_and_read(hits: list, reached: list) -> None:
    plain = [[(row % CLASSES_OF_END, *rest) for row, *rest in values] for values in (hits, reached)]
    evidence = evidence_of(*plain)
    assert evidence.to_bytes() == as_before_ends(evidence)
    again = ReuseEvidence.from_bytes(as_before_ends(evidence))
    assert again is not None
    np.testing.assert_array_equal((again.hits, again.reached), (evidence.hits, evidence.reached))


def test_tables_of_other_shapes_are_not_read() -> None:
    for classes, buckets in (
        (CLASSES_OF_END + 1, NUM_AGE_BUCKETS),
        (0, NUM_AGE_BUCKETS),
        (NUM_CLASSES + CLASSES_OF_END, NUM_AGE_BUCKETS),
        (CLASSES_OF_END, NUM_AGE_BUCKETS - 1),
    ):
        header = np.array([1, classes, buckets], dtype="<i8").tobytes()
        assert ReuseEvidence.from_bytes(zlib.compress(header + bytes(16 * classes * buckets))) is None
