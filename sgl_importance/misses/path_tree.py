"""Radix trees of token paths, as raw tokens in whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sgl_importance.misses.reason import Fate, PathVisit

TOKEN_BYTES = 8
_PACKED, _HALVES = np.dtype("<i8"), np.dtype("<u4")


def packed(tokens: Sequence[int], ahead: int = 0) -> bytes:
    """Token ids as the trees hold them. An ``array("q")`` is read without a loop.

    Args:
        ahead: 1 where each is looked up with the one behind it (EAGLE): of the last one nothing is known.
    """
    ids = np.asarray(tokens, _PACKED)
    return (ids[:-1] | ids[1:] << 32 if ahead else ids).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Token ids of ``packed``, of pairs the first ones."""
    ids: list[int] = np.frombuffer(tokens, _HALVES)[::2].tolist()
    return ids


def common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens that are equal."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // TOKEN_BYTES
    # As little-endian numbers: the lowest bit of their difference is of the first token that differs.
    difference = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class PathNode:
    """Tokens that follow those of the nodes above, all with one fate.

    Attributes:
        parent: None of the root, and of a node that was forgotten.
        children: by their first page, oldest first.
        tokens: packed, of whole pages.
        end: tokens from the root to the node's end.
        fate: None while the cache holds it.
        stamp: the order in which paths are forgotten: of the last event that touched it. No smaller than its
            children's.
        visit: the last request that asked for it, or brought it.
        marks: first pages of what followed the node's end and was forgotten.
    """

    __slots__ = ("children", "end", "fate", "marks", "parent", "stamp", "tokens", "visit")

    def __init__(
        self, parent: PathNode | None, tokens: bytes, fate: Fate | None, stamp: int, visit: PathVisit | None
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, PathNode] = {}
        self.tokens = tokens
        self.end: int = (0 if parent is None else parent.end) + len(tokens) // TOKEN_BYTES
        self.fate = fate
        self.stamp = stamp
        self.visit = visit
        self.marks: set[bytes] = set()

    @property
    def length(self) -> int:
        """Tokens of the node itself."""
        return len(self.tokens) // TOKEN_BYTES

    def cut(self, tokens: int, page_bytes: int) -> PathNode:
        """Makes the first ``tokens`` tokens a node of their own, in front of this one, and returns it."""
        assert self.parent is not None
        at = tokens * TOKEN_BYTES
        front = PathNode(self.parent, self.tokens[:at], self.fate, self.stamp, self.visit)
        self.parent.children[self.tokens[:page_bytes]] = front  # in this one's place among its siblings
        self.tokens = self.tokens[at:]
        self.parent = front
        front.children[self.tokens[:page_bytes]] = self
        return front


KnownPath = list[tuple[PathNode, int]]
"""Nodes from the root on, with how many tokens of each are meant; of the last maybe fewer than it has."""


def walk(root: PathNode, tokens: bytes, page_bytes: int) -> Iterator[tuple[PathNode, int]]:
    """Nodes that hold the beginning of ``tokens``, with how many tokens of each match, in whole pages.

    Only of the last node may fewer match than it has.
    """
    node, start = root, 0
    while (child := node.children.get(tokens[start : start + page_bytes])) is not None:
        stop = start + len(child.tokens)
        if tokens[start:stop] == child.tokens:
            yield child, child.length
            node, start = child, stop
            continue
        matching = common_tokens(tokens[start:stop], child.tokens) * TOKEN_BYTES
        yield child, matching // page_bytes * page_bytes // TOKEN_BYTES
        return
