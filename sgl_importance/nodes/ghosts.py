"""Ghosts: facts of pages that left every tier.

A ghost gives a page that comes back its importance, and lets the reuse estimator count a visit to an evicted
node. A ghost that is forgotten ends the node's at-risk interval without a visit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sgl_importance.interface import Importance
from sgl_importance.nodes.named_sessions import Session
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.calibration import Prediction
from sgl_importance.reuse.reuse_class import BlockType
from sgl_importance.reuse.turns import Turn
from sgl_importance.signal.node_importance import FloatArray, importance_of
from sgl_importance.tiers import Tier


class EvictionReason(StrEnum):
    LEAST_LOSS = "least_loss"
    """Room was needed, and this node had the least loss."""
    DROPPED_AFTER_USE = "dropped_after_use"
    """As ``LEAST_LOSS``, of a node that its request had marked as expendable."""
    SESSION_OVER = "session_over"
    """As ``LEAST_LOSS`` or at once, of a node whose session had said that it was over."""
    STOCK_ORDER = "stock_order"
    """sglang chose it: under ``observe``, and to make room for windows or states in a pool of their own."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Eviction of a node from its last tier.

    Attributes:
        tier: where its last copy was.
        clock: when, in admitted requests.
        loss: its expected marginal loss, in seconds per KV byte freed and admitted request.
    """

    tier: Tier
    clock: int
    loss: float
    reason: EvictionReason


@dataclass(slots=True)
class GhostNode:
    """The removed node that ghost pages belonged to.

    Attributes:
        vectors: ``NodeImportance.page_vectors`` of its pages, float64 [num_pages, 8].
        eviction: how it was lost; None where that is not known.
        prediction: of its next visit, where the last one was sampled.
        turn: of the node.
        session: of the node.
        resolved: whether its return or its end was already reported.
    """

    at_risk_as: int | None
    last_access: int
    accesses: int
    span: int
    block_type: BlockType
    queries: int
    vectors: FloatArray
    eviction: Eviction | None = None
    prediction: Prediction | None = None
    turn: Turn | None = None
    session: Session | None = None
    resolved: bool = False


GHOSTS_PER_DEVICE_PAGE = 4
"""Long enough to see whether an evicted page comes back."""
MAX_GHOST_PAGES = 2**18
"""About 70 MB of scheduler memory, also where a page is one token."""


def ghost_pages_of(device_pages: int) -> int:
    """Evicted pages that a server with a device tier of so many pages remembers."""
    return min(GHOSTS_PER_DEVICE_PAGE * device_pages, MAX_GHOST_PAGES)


class GhostTable:
    """The last ``capacity_pages`` pages that were removed, by chained digest; oldest forgotten first.

    Args:
        capacity_pages: pages to remember; 0 remembers nothing.
        on_expire: called once per removed node when its last page is forgotten without a return.
    """

    def __init__(self, capacity_pages: int, *, on_expire: Callable[[GhostNode], None]) -> None:
        assert capacity_pages >= 0
        self.capacity_pages = capacity_pages
        self._on_expire = on_expire
        self._pages: OrderedDict[bytes, tuple[GhostNode, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forgets everything without drawing conclusions: a flush says nothing about reuse."""
        self._pages.clear()

    def get_importance(self, key: bytes) -> Importance | None:
        """Importance of a page's ghost; the table stays as it is."""
        remembered = self._pages.get(key)
        if remembered is None:
            return None
        ghost, page = remembered
        return importance_of(ghost.vectors[page], ghost.queries)

    def remember(
        self,
        digests: Sequence[bytes],
        node: NodeMetadata,
        eviction: Eviction | None = None,
    ) -> None:
        """Keeps the pages of a node that is being removed."""
        ghost = GhostNode(
            at_risk_as=node.at_risk_as,
            last_access=node.last_access,
            accesses=node.accesses,
            span=node.span,
            block_type=node.block_type,
            queries=node.importance.queries,
            vectors=node.importance.page_vectors(),
            eviction=eviction,
            prediction=node.prediction,
            turn=node.turn,
            session=node.session,
        )
        self.restore(digests, ghost)

    def restore(self, digests: Sequence[bytes], ghost: GhostNode) -> None:
        """Keeps the pages of a node that was removed earlier; the latest call is forgotten last."""
        assert len(digests) == len(ghost.vectors), "a digest for each page"
        for page, digest in enumerate(digests):
            self._pages[digest] = (ghost, page)
            self._pages.move_to_end(digest)
        while len(self._pages) > self.capacity_pages:
            _, (expired, _) = self._pages.popitem(last=False)
            if not expired.resolved:
                expired.resolved = True
                self._on_expire(expired)

    def revive(self, digests: Iterable[bytes], node: NodeMetadata) -> list[tuple[GhostNode, int]]:
        """Restores the importance of a new node's pages from their ghosts, up to the first page without one.

        Leaves are evicted before their parents and the oldest ghosts go first, so behind a page without a
        ghost there is none either; a prompt that was never seen costs one look-up.

        Returns:
            Each ghost with the number of its pages that came back; ``resolved`` where some had before.
        """
        found = list(self._pop_known(digests))
        if not found:
            return []
        returned: dict[int, tuple[GhostNode, int]] = {}
        start = 0
        while start < len(found):
            # Pages that followed each other in one ghost are one slice: a page of its own costs microseconds.
            ghost, first = found[start]
            stop = start + 1
            while stop < len(found) and found[stop][0] is ghost and found[stop][1] == first + stop - start:
                stop += 1
            pages = stop - start
            node.importance.restore_pages(start, ghost.vectors[first : first + pages], ghost.queries)
            _, before = returned.get(id(ghost), (ghost, 0))
            returned[id(ghost)] = (ghost, before + pages)
            start = stop
        return list(returned.values())

    def _pop_known(self, digests: Iterable[bytes]) -> Iterator[tuple[GhostNode, int]]:
        """Forgets pages up to the first that is not known; the ghost of each and its page there."""
        for digest in digests:
            remembered = self._pages.pop(digest, None)
            if remembered is None:
                return
            yield remembered
