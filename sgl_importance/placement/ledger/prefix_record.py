"""One row of the ledger: a run of pages behind a known prefix, and its facts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from sgl_importance.errors import ImportanceError
from sgl_importance.nodes.digests import DIGEST_BYTES, chain_digests
from sgl_importance.reuse.reuse_class import NUM_CLASSES, BlockType

VECTOR_WIDTH = 8
ROW_BYTES = 200
"""Of a row without its blobs, with its part of the indices."""
COLUMNS = (
    *("digest", "parent", "depth", "tokens", "queries", "accesses", "span", "block_type"),
    *("watched_as", "clock", "used", "in_storage", "has_token_ids", "pages", "vectors"),
)
"""Of a row, in the order of ``encode_row``; the checksum follows."""
NAMES = ", ".join(COLUMNS)
UPSERT = (
    f"INSERT INTO prefixes (model, {NAMES}, checksum) VALUES ({', '.join('?' * (len(COLUMNS) + 2))}) "
    "ON CONFLICT (model, digest) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*COLUMNS[1:], "checksum"))
)


class RowDamaged(ImportanceError, ValueError):
    """A row of the ledger fails its checksum, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """Consecutive pages of one radix-tree node, named by the chained digest of the last.

    Attributes:
        digest: chained digest of the last page; stands for everything up to it.
        parent: chained digest of the page in front of the first; the root's where there is none.
        depth: tokens in front of it.
        tokens: tokens that it holds, whole pages.
        token_ids: its tokens, int64; None where the ledger keeps none.
        page_digests: chained digests of its pages; None where ``token_ids`` give them.
        vectors: ``NodeImportance.page_vectors``, float [pages, 8].
        queries: distinct queries that looked at it.
        accesses: admitted requests that found it.
        span: admitted requests between its first visit and its last.
        block_type: the kind of text that it holds.
        at_risk_as: class of the at-risk interval that was open; None where none was.
        last_access: clock of its last visit, in admitted requests.
        used: time of its last visit, in seconds since 1970.
        in_storage: whether its pages are in the storage tier, or were on their way.
    """

    digest: bytes
    parent: bytes
    depth: int
    tokens: int
    token_ids: Sequence[int] | None
    page_digests: Sequence[bytes] | None
    vectors: npt.NDArray[Any]
    queries: int
    accesses: int
    span: int
    block_type: BlockType
    at_risk_as: int | None
    last_access: int
    used: float
    in_storage: bool

    @property
    def num_bytes(self) -> int:
        """Approximate bytes in memory while it waits to be written."""
        return 512 + 8 * self.tokens + self.vectors.nbytes

    def digests(self, page_size: int) -> list[bytes]:
        """Chained digests of its pages."""
        if self.page_digests is not None:
            return list(self.page_digests)
        assert self.token_ids is not None
        return chain_digests(self.parent, self.token_ids, page_size)


def encode_row(record: PrefixRecord, *, page_size: int, clock: int, keep_token_ids: bool) -> tuple[Any, ...]:
    """Values of ``COLUMNS`` and their checksum.

    Args:
        record: the prefix to write.
        page_size: tokens per page.
        clock: the ledger's clock at the record's last visit.
        keep_token_ids: False keeps only the digests of the pages.
    """
    if keep_token_ids:
        assert record.token_ids is not None
        pages = np.asarray(record.token_ids, dtype="<i4").tobytes()
    else:
        pages = b"".join(record.digests(page_size))
    values = (
        *(record.digest, record.parent, record.depth, record.tokens, record.queries, record.accesses),
        *(record.span, int(record.block_type), record.at_risk_as, clock, record.used, int(record.in_storage)),
        *(int(keep_token_ids), pages, record.vectors.astype("<f4").tobytes()),
    )
    return (*values, _checksum(values))


def decode_row(row: Sequence[Any], *, page_size: int) -> PrefixRecord:
    """The record that ``encode_row`` kept; its ``last_access`` is the ledger's clock.

    Raises:
        RowDamaged: its values or checksum are not those written.
    """
    *values, checksum = row
    try:
        if checksum != _checksum(values):
            raise RowDamaged("checksum")
        (digest, parent, depth, tokens, queries, accesses, span, block_type) = values[:8]
        (at_risk_as, clock, used, in_storage, has_token_ids, pages, vectors) = values[8:]
        if tokens <= 0 or tokens % page_size or depth < 0 or len(digest) != DIGEST_BYTES:
            raise RowDamaged("shape")
        if at_risk_as is not None and not 0 <= at_risk_as < NUM_CLASSES:
            raise RowDamaged("class")
        scores = np.frombuffer(vectors, dtype="<f4").reshape(tokens // page_size, VECTOR_WIDTH)
        token_ids = page_digests = None
        if has_token_ids:
            token_ids = array("q", np.frombuffer(pages, dtype="<i4").astype(np.int64).tobytes())
            last = chain_digests(parent, token_ids, page_size)[-1] if len(token_ids) == tokens else b""
        else:
            page_digests = [pages[i : i + DIGEST_BYTES] for i in range(0, len(pages), DIGEST_BYTES)]
            last = page_digests[-1] if len(page_digests) == len(scores) else b""
        if last != digest:
            raise RowDamaged("pages")
        return PrefixRecord(
            digest=digest,
            parent=parent,
            depth=depth,
            tokens=tokens,
            token_ids=token_ids,
            page_digests=page_digests,
            vectors=scores,
            queries=queries,
            accesses=accesses,
            span=span,
            block_type=BlockType(block_type),
            at_risk_as=at_risk_as,
            last_access=clock,
            used=used,
            in_storage=bool(in_storage),
        )
    except RowDamaged:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise RowDamaged(str(error)) from error


def _checksum(values: Sequence[Any]) -> int:
    # SQLite's integers are signed.
    return xxh3_64_intdigest(msgspec.msgpack.encode(tuple(values))) - 2**63
