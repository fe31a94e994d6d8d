"""The chain of storage tiers of this scheduler process, and what its tree tells it of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_class import BlockType, Transition, reuse_class
from sgl_importance.storage.tier_chain.chain import SequenceVisit, TierChain
from sgl_importance.storage.tier_chain.open_chain import ChainError, OpenBackend, OpenChain, describe_chain
from sgl_importance.storage.tier_chain.ranking import LruRanking, Ranking, ReuseRanking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import TierFileError, read_tier_file
from sglang_importance.upstream.refusal import LaunchRefused

MOST_VISITS = 1 << 14
"""Nodes that wait to be told of; when nothing is stored or fetched meanwhile, the oldest are forgotten."""
FRESH_CLASS = reuse_class(BlockType.USER, Transition.COLD, 0)


class ServedChain:
    """The scheduler's thread tells of visits, which costs it an entry in a queue; storage threads take them.

    Attributes:
        chain: None where the server has no chain.
        counters: of its tiers.
        ranking: how its pages are ranked, in words.
    """

    def __init__(self) -> None:
        self.chain: TierChain | None = None
        self.counters = TierCounters()
        self.ranking = ""
        self._reuse: ReuseEstimator | None = None
        self._visits: deque[SequenceVisit] = deque(maxlen=MOST_VISITS)

    def predict_by(self, reuse: ReuseEstimator) -> None:
        """From the next chain on, pages are ranked by what the tree's policy predicts."""
        self._reuse = reuse

    def visited(self, keys: Sequence[str], reuse_class: int, last_access: int) -> None:
        """A request has asked for these pages, which were last asked for at this clock."""
        self._visits.append(SequenceVisit(keys, reuse_class, last_access))

    def open(
        self, file: Path, *, owner: str, page_bytes: int, open_backend: OpenBackend
    ) -> tuple[OpenChain, list[str]]:
        """
        Args:
            file: of ``--kv-importance-tiers``.
            owner: name of the rank.
            page_bytes: of each page.
            open_backend: for tiers in backends of HiCache.

        Returns:
            The chain, and a line about each tier.

        Raises:
            LaunchRefused: the file or one of its tiers cannot be used.
        """
        try:
            opened = OpenChain(
                read_tier_file(file),
                owner=owner,
                page_bytes=page_bytes,
                make_ranking=self._make_ranking,
                counters=self.counters,
                visits=self._taken,
                open_backend=open_backend,
            )
        except (TierFileError, ChainError) as error:
            raise LaunchRefused([f"--KV importance tiers: {error}"]) from error
        self.chain = opened.chain
        return opened, describe_chain(opened.chain.members)

    def close(self, opened: OpenChain) -> None:
        """Closes its tiers; people see it no longer. Storage can be attached again."""
        opened.close()
        if self.chain is opened.chain:
            self.chain = None

    def _make_ranking(self, levels: int) -> Ranking:
        if self._reuse is None:
            self.ranking = "least recently used"
            return LruRanking(levels)
        self.ranking = "predicted reuse"
        return ReuseRanking(levels, self._reuse, unseen_class=FRESH_CLASS)

    def _taken(self) -> Iterator[SequenceVisit]:
        while self._visits:
            yield self._visits.popleft()


SERVED = ServedChain()
