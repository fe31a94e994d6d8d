"""Chunks of another cache, ranked by what is known of their pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance.interface import ImportanceSource
from sgl_importance.nodes.digests import chain_digests, root_digest

DEFAULT_MAX_CHUNKS = 2**16  # some 40 MB at 16 pages per chunk
MIN_QUERIES = 2  # what one query says of a prompt is recency in disguise
WINDOW = 64
MAX_REPRIEVES = 8


@dataclass(slots=True)
class Chunk:
    """The importance of one chunk.

    Attributes:
        pages: chained digests of its whole pages.
        previous: name of the chunk before it in its sequence; None for the first.
        reprieves: how often it was passed over since its last use, for a younger one.
    """

    pages: list[bytes]
    previous: int | None
    reprieves: int = 0


class ChunkDirectory:
    """From the names that a cache gives its chunks to our page digests.

    A name is a hash of tokens and cannot be read backwards, so somebody must ``learn`` it where the tokens
    are still known. A chunk that was not learned, or was forgotten, has no importance.

    Args:
        page_size: tokens per page of the server that is asked.
        chunk_tokens: tokens per chunk.
        max_chunks: chunks to remember; the one learned longest ago is forgotten first.

    Raises:
        ValueError: chunks do not consist of whole pages.
    """

    def __init__(self, page_size: int, chunk_tokens: int, max_chunks: int = DEFAULT_MAX_CHUNKS) -> None:
        if chunk_tokens % page_size:
            raise ValueError(
                f"chunks of {chunk_tokens} tokens are not whole pages of {page_size}: "
                "choose a chunk size that is a multiple of --page-size"
            )
        self.page_size = page_size
        self.chunk_tokens = chunk_tokens
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, name: int) -> Chunk | None:
        return self._chunks.get(name)

    def learn(
        self,
        names: Sequence[int],
        tokens: Sequence[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Takes in the chunks of one sequence.

        Args:
            names: of its chunks, the first one first; the last may be shorter than the others.
            tokens: of the sequence, from its first on.
            extra_key, cache_salt: namespace of its pages on the server.
        """
        pages_per_chunk = self.chunk_tokens // self.page_size
        known = 0
        while known < len(names) and names[known] in self._chunks:
            self._chunks.move_to_end(names[known])
            known += 1
        if known == len(names):
            return
        digests = chain_digests(root_digest(extra_key, cache_salt), tokens, self.page_size)
        for number in range(known, len(names)):
            start = number * pages_per_chunk
            previous = names[number - 1] if number else None
            self._chunks[names[number]] = Chunk(digests[start : start + pages_per_chunk], previous)
        while len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)


class ChunkRanking:
    """Orders the least recently used chunks of a cache by importance.

    Only chunks at the old end of the cache's own order are compared, and each is passed over a bounded number
    of times: what nobody uses any more leaves, however important it once was.

    Args:
        source: asked on the thread that evicts.
        directory: finds the pages of a chunk.
    """

    def __init__(self, source: ImportanceSource, directory: ChunkDirectory) -> None:
        self._source = source
        self._directory = directory

    def worth(self, name: int) -> float:
        """Cross body mass of the chunk's pages; 0.0 without evidence, or once its reprieves are spent."""
        chunk = self._directory.get(name)
        if chunk is None or chunk.reprieves >= MAX_REPRIEVES:
            return 0.0
        known = (self._source.get_importance(page) for page in chunk.pages)
        return sum(page.cross_body_mass for page in known if page and page.queries >= MIN_QUERIES)

    def victims(self, oldest: Sequence[int], count: int) -> list[int]:
        """The chunks to evict of the least recently used ones: least worth first, then least recently used.

        A chunk is worth at least what the chunks behind it are: without it they are never found.

        Args:
            oldest: names of chunks that may be evicted, least recently used first.
            count: how many to evict at most.

        Returns:
            Positions in ``oldest``.
        """
        worth = {name: self.worth(name) for name in oldest}
        for name in oldest:
            behind, value = self._directory.get(name), worth[name]
            while behind is not None and behind.previous in worth and worth[behind.previous] < value:
                worth[behind.previous] = value
                behind = self._directory.get(behind.previous)
        order = sorted(range(len(oldest)), key=lambda position: worth[oldest[position]])
        victims = order[:count]
        for position in range(max(victims, default=0)):
            chunk = self._directory.get(oldest[position])
            if chunk is not None and position not in victims:
                chunk.reprieves += 1
        return victims

    def used(self, name: int) -> None:
        """The chunk was hit or stored: it may be passed over again."""
        chunk = self._directory.get(name)
        if chunk is not None:
            chunk.reprieves = 0
