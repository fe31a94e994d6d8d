"""How much of a victim goes."""

from __future__ import annotations

LEAST_TOKENS = 256
LEAST_PART = 4


def tail_pages(asked: int, tokens: int, page_size: int) -> int:
    """Pages that a victim of so many tokens gives up where ``asked`` tokens are: these, ``LEAST_TOKENS`` or
    one ``LEAST_PART``-th, whichever is most, so that few cuts make a leaf small; maybe more than it has."""
    return -(-max(asked, LEAST_TOKENS, -(-tokens // LEAST_PART)) // page_size)
