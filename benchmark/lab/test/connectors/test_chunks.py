"""Chunks of another cache are ranked by what is known of their pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.interface import Importance
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.connectors.chunks import MAX_REPRIEVES, ChunkDirectory, ChunkRanking

PAGE, CHUNK = 4, 8


class Known(dict[bytes, Importance]):
    def get_importance(self, key: bytes) -> Importance | None:
        return self.get(key)


def important(mass: float, queries: int = 3) -> Importance:
    return Importance(mass, mass, mass, mass, queries=queries, weight=1.0)


def digests(tokens: list[int], salt: str | None = None) -> list[bytes]:
    return chain_digests(root_digest(None, salt), tokens, PAGE)


def text(start: int, chunks: int) -> list[int]:
    return list(range(start, start + chunks * CHUNK))


def make(source: Known, sequences: dict[int, int], **kwargs) -> ChunkRanking:
    """Sequences by their first token and number of chunks; chunk n of the one at s is named s + n."""
    directory = ChunkDirectory(PAGE, CHUNK, **kwargs)
    for start, chunks in sequences.items():
        directory.learn([start + n for n in range(chunks)], text(start, chunks))
    return ChunkRanking(source, directory)


def test_without_evidence_the_order_is_the_cache_s_own():
    ranking = make(Known(), {0: 2, 100: 2})
    assert ranking.victims([100, 1, 0, 101], 3) == [0, 1, 2]


def test_a_chunk_is_worth_what_later_queries_gave_its_pages():
    source = Known({digests(text(0, 2))[2]: important(0.25), digests(text(0, 2))[3]: important(0.5)})
    ranking = make(source, {0: 2, 100: 1})
    assert (ranking.worth(0), ranking.worth(1), ranking.worth(100), ranking.worth(7)) == (0, 0.75, 0, 0)
    assert ranking.victims([1, 100], 1) == [1]


def test_one_query_is_no_evidence():
    source = Known({digests(text(0, 1))[0]: important(0.9, queries=1)})
    assert make(source, {0: 1}).worth(0) == 0


def test_a_chunk_is_not_evicted_before_those_behind_it():
    source = Known({digests(text(0, 3))[5]: important(0.5)})
    ranking = make(source, {0: 3, 100: 1})
    assert ranking.victims([0, 1, 2, 100], 1) == [3]


def test_what_nobody_uses_leaves_after_so_many_reprieves():
    source = Known({digests(text(0, 1))[0]: important(0.5)})
    ranking = make(source, {0: 1})
    for _ in range(MAX_REPRIEVES):
        assert ranking.victims([0, 999], 1) == [1]
    assert ranking.victims([0, 999], 1) == [0]
    ranking.used(0)
    assert ranking.victims([0, 999], 1) == [1]


@given(st.lists(st.integers(0, 30), unique=True), st.integers(1, 40), st.integers(0, 5))
def test_victims_are_distinct_and_as_many_as_there_are(oldest: list[int], count: int, marked: int):
    source = Known({page: important(0.1) for page in digests(text(0, 30))[:marked]})
    victims = make(source, {0: 30}).victims(oldest, count)
    assert len(set(victims)) == len(victims) == min(count, len(oldest))


def test_other_salts_are_other_pages():
    directory = ChunkDirectory(PAGE, CHUNK)
    directory.learn([1], text(0, 1), cache_salt="tenant-a")
    chunk = directory.get(1)
    assert chunk is not None
    assert chunk.pages == digests(text(0, 1), "tenant-a") != digests(text(0, 1))


def test_the_last_chunk_may_be_short_and_the_oldest_are_forgotten():
    directory = ChunkDirectory(PAGE, CHUNK, max_chunks=2)
    directory.learn([1, 2], text(0, 1) + [5] * (PAGE + 1))
    last = directory.get(2)
    assert last is not None
    assert (len(last.pages), last.previous) == (1, 1)
    directory.learn([3], text(50, 1))
    assert (len(directory), directory.get(1)) == (2, None)


def test_chunks_must_be_whole_pages():
    with pytest.raises(ValueError, match="multiple of --page-size"):
        ChunkDirectory(16, 24)
