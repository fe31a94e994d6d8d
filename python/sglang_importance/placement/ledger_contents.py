"""What a ledger tells a server that starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sgl_importance.nodes.ghosts import GhostNode
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.ledger.steady_time import steady_time
from sgl_importance.placement.pins.pin import Pin
from sglang_importance.placement.pinning import Pinning
from sglang_importance.tree.state import TreeState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """A copy of it, for the ranks that do not read it themselves.

    Attributes:
        records: in the order in which ghosts are restored: last used, and of these the topmost, last.
        evidence: of reuse.
        clock: admitted requests so far.
        pins: of servers before, oldest first.
    """

    records: list[PrefixRecord]
    evidence: ReuseEvidence
    clock: int
    pins: list[Pin]

    @classmethod
    def read(cls, ledger: Ledger, max_pages: int) -> LedgerContents:
        """
        Args:
            max_pages: that ghosts have room for.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        records = list(ledger.prefixes(max_pages=max_pages))
        records.reverse()
        evidence = ledger.evidence()
        contents = cls(
            records=records,
            evidence=ReuseEvidence.nothing() if evidence is None else evidence,
            clock=ledger.clock,
            pins=ledger.pins.read(steady_time(), page_size=ledger.page_size),
        )
        for what, damaged in (("rows", ledger.damaged_rows), ("pins", ledger.pins.damaged)):
            if damaged:
                logger.warning(
                    "KV importance ledger: %d damaged %s of %s are left out", damaged, what, ledger.place
                )
        return contents

    def restore(self, state: TreeState, pins: Pinning | None) -> list[Pin]:
        """Feeds ghosts, evidence and clock; returns the pins that were taken in.

        Args:
            pins: take in those of the ledger; None where pins move nothing.
        """
        tree, reuse = state.tree, state.policy.reuse
        reuse.restore(self.evidence.hits, self.evidence.reached, self.clock)
        for record in self.records:
            if record.at_risk_as is not None:
                reuse.resumed(record.at_risk_as, record.last_access)
            ghost = GhostNode(
                at_risk_as=record.at_risk_as,
                last_access=record.last_access,
                accesses=record.accesses,
                span=record.span,
                block_type=record.block_type,
                queries=record.queries,
                vectors=record.vectors,
            )
            tree.ghosts.restore(record.digests(tree.page_size), ghost)
        if pins is None:
            return []
        restored = pins.restore(self.pins)
        if len(restored) < len(self.pins) and state.ranks.leads:
            logger.warning(
                "KV importance ledger: no room for %d of %d pins (a cache salt's must fit the largest tier)",
                len(self.pins) - len(restored),
                len(self.pins),
            )
        return restored
