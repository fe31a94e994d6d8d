"""The plan of a pre-warm: which prefixes to bring in, and in which order.

Each prefix saves ``reuse rate x seconds to restore x g`` per admitted request, and takes its KV bytes: its
marginal loss (``ranking.marginal_loss``), had it been evicted. A prefix is useful only whole, so the
tokens before it come first.
The order that saves most at every point on the way is Horn's (Single-machine job sequencing with treelike
precedence ordering and linear delay penalties, SIAM J. Appl. Math. 23, 1972): the densest prefix follows its
parent at once, and both count as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Candidate:
    """Pages that could be brought in.

    Attributes:
        digest: chained digest of the last page.
        parent: chained digest of the page in front.
        depth: tokens in front.
        tokens: tokens of the pages.
        rate: reuses per admitted request that keeping them can earn.
        saved_seconds: seconds that each reuse saves: seconds to restore, times g.
        restore_seconds: seconds to bring them in.
    """

    digest: bytes
    parent: bytes
    depth: int
    tokens: int
    rate: float
    saved_seconds: float
    restore_seconds: float

    def __post_init__(self) -> None:
        assert self.tokens > 0
        assert min(self.rate, self.saved_seconds, self.restore_seconds) >= 0


@dataclass(frozen=True, slots=True)
class PlannedPath:
    """A path from the root, brought in at once.

    Attributes:
        nodes: digests of the candidates on the path that the plan has not brought in before; consecutive.
        start: tokens in front of them, which are on the device already or come from an earlier path.
        stop: tokens of the whole path; may end inside the last node, at a page.
    """

    nodes: tuple[bytes, ...]
    start: int
    stop: int


def plan(
    candidates: Collection[Candidate],
    *,
    present: Collection[bytes],
    max_tokens: int,
    max_seconds: float,
    page_size: int,
) -> list[PlannedPath]:
    """Paths to bring in, best first.

    Args:
        candidates: pages that are known, at most one for each digest. Those whose path to the root is not
            known are left out.
        present: digests of pages that are on the device, and of the roots.
        max_tokens: room on the device.
        max_seconds: most that bringing in may take by the cost model; a page more may be begun.
        page_size: tokens per page; a node that does not fit whole is cut at a page.

    Returns:
        Paths, each of which starts at the end of an earlier one, or of the present pages.
    """
    assert max_tokens >= 0
    paths: list[PlannedPath] = []
    seconds = 0.0
    for node in _by_value(_reachable(candidates, present)):
        if seconds >= max_seconds:
            break
        tokens = min(node.tokens, max_tokens // page_size * page_size)
        if not tokens:
            break
        max_tokens -= tokens
        seconds += node.restore_seconds
        last = paths[-1] if paths else None
        if last is not None and last.nodes[-1] == node.parent:
            paths[-1] = PlannedPath((*last.nodes, node.digest), last.start, node.depth + tokens)
        else:
            paths.append(PlannedPath((node.digest,), node.depth, node.depth + tokens))
        if tokens < node.tokens:
            break
    return paths


def _reachable(candidates: Collection[Candidate], present: Collection[bytes]) -> list[Candidate]:
    """Candidates that are missing and whose parents are present or reachable; parents before children.

    A prefix is reused at least as often as its continuations.
    """
    known = set(present)
    reachable: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda each: each.depth):
        if candidate.parent in known:
            if candidate.digest not in known:
                reachable.append(candidate)
            known.add(candidate.digest)
    rates: dict[bytes, float] = {}
    raised = []
    for candidate in reversed(reachable):
        rate = max(candidate.rate, rates.get(candidate.digest, 0.0))
        rates[candidate.parent] = max(rate, rates.get(candidate.parent, 0.0))
        raised.append(replace(candidate, rate=rate))
    return raised[::-1]


class _Block:
    """Nodes that follow each other at once, the topmost first."""

    __slots__ = ("nodes", "tokens", "value", "version")

    def __init__(self, node: Candidate) -> None:
        self.nodes = [node]
        self.value = node.rate * node.saved_seconds
        self.tokens = node.tokens
        self.version = 0

    @property
    def density(self) -> float:
        return self.value / self.tokens

    def append(self, other: _Block) -> None:
        self.nodes += other.nodes
        self.value += other.value
        self.tokens += other.tokens
        self.version += 1


def _by_value(nodes: Sequence[Candidate]) -> Iterator[Candidate]:
    """Horn's order of a forest given parents before children."""
    blocks = {node.digest: _Block(node) for node in nodes}
    owner = {node.digest: node.digest for node in nodes}  # node -> top of its block, path-compressed

    def top_of(digest: bytes) -> bytes:
        while owner[digest] != digest:
            owner[digest] = owner[owner[digest]]
            digest = owner[digest]
        return digest

    def entry(digest: bytes) -> tuple[float, int, bytes, int]:
        block = blocks[digest]
        return (-block.density, block.nodes[0].depth, digest, block.version)

    agenda = [entry(digest) for digest in blocks]
    heapify(agenda)
    while agenda:
        _, _, digest, version = heappop(agenda)
        block = blocks.get(digest)
        if block is None or block.version != version:
            continue
        parent = block.nodes[0].parent
        del blocks[digest]
        if parent not in owner or top_of(parent) not in blocks:
            yield from block.nodes  # the parent is present, or has been brought in
            continue
        top = top_of(parent)
        owner[digest] = top
        blocks[top].append(block)
        heappush(agenda, entry(top))
