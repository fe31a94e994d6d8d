"""Chained page digests: each names a page and everything in front of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from xxhash import xxh3_128_digest

DIGEST_BYTES = 16
_TOKEN_BYTES = array("q").itemsize


def root_digest(*namespace: str | None) -> bytes:
    """Digest that a chain starts with: requests of different salts or adapters never share a page.

    An empty name is none, as sglang has it.
    """
    return xxh3_128_digest(repr(tuple(name or None for name in namespace)).encode())


def iterate_chain(parent: bytes, tokens: Sequence[int], page_size: int, *, ahead: int = 0) -> Iterator[bytes]:
    """One digest per whole page; each stands for the page and everything before it.

    Not cryptographic: a collision would misjudge a page's importance, never serve its content.

    Args:
        parent: digest of what is in front of the tokens.
        tokens: of whole pages, and of a part of one that is left out.
        page_size: tokens per page.
        ahead: tokens behind a page that are part of its identity.
    """
    raw = memoryview(array("q", tokens)).cast("B")
    page_bytes, named_bytes = page_size * _TOKEN_BYTES, (page_size + ahead) * _TOKEN_BYTES
    for start in range(0, len(raw) - named_bytes + 1, page_bytes):
        parent = xxh3_128_digest(parent + raw[start : start + named_bytes])
        yield parent


def chain_digests(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The digests of ``iterate_chain``, all at once."""
    return list(iterate_chain(parent, tokens, page_size))
