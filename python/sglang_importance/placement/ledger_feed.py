"""Connects a scheduler with its ledger: goes on from what it holds, and writes what follows."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerError, LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import place_of
from sgl_importance.placement.ledger.ledger_writer import LedgerWriter, Visit
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.estimator import REFRESH_INTERVAL
from sglang_importance.placement.ledger_contents import LedgerContents
from sglang_importance.placement.pinning import Pinning
from sglang_importance.storage.weights import WATCH, Weights
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


logger = logging.getLogger(__name__)


class LedgerFeed:
    """Hands every finished request to the ledger.

    Args:
        ledger: of the model in memory, which the tree has gone on from.
        tree: whose nodes are written.
        policy: whose clock and reuse counts are written.
        weights: that the ledger was opened for; while others are loaded, nothing is written.
        budget_bytes: of the ledger.
        pins: that the ledger holds and the server too.
    """

    def __init__(
        self,
        ledger: Ledger,
        tree: AnnotatedTree,
        policy: ImportancePolicy,
        *,
        weights: Weights,
        budget_bytes: int,
        pins: Sequence[Pin] = (),
    ) -> None:
        self.place = ledger.place
        self.page_size = ledger.page_size
        self.model = ledger.model
        self.keeps_token_ids = ledger.keep_token_ids
        self._tree = tree
        self._policy = policy
        self._fingerprint = weights.fingerprint
        self._cut: list[UnifiedTreeNode] = []
        self._told_at = policy.clock // REFRESH_INTERVAL
        self._writer = LedgerWriter(
            ledger,
            budget_bytes=budget_bytes,
            worth=self._worth,
            clock=policy.clock,
            evidence=ReuseEvidence.of(policy.reuse),
            pins=pins,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Writes the waiting visits. A scheduler that is killed loses the last half second."""
        atexit.unregister(self.close)
        atexit.unregister(self._writer.close)
        self._writer.put(Visit((), self._policy.clock, None, ReuseEvidence.of(self._policy.reuse)))
        self._writer.close()

    def abandon(self) -> None:
        """Learning has failed: facts may be wrong by now, and are not written any more.

        Called within the scheduler's pass, which waits for no disk: the end of the process does.
        """
        atexit.unregister(self.close)
        self._cut.clear()
        self._writer.take_no_more()
        atexit.register(self._writer.close)

    def keep_pins(self, pins: Iterable[Pin]) -> None:
        """The pins that shall outlive the server, oldest first; no new ones where no token ids are kept, or
        while other weights are in memory."""
        takes_new = self.keeps_token_ids and self._has_its_weights()
        wanted = [pin for pin in pins if takes_new or self._writer.keeps(pin)]
        self._writer.keep_pins(wanted, self._policy.clock)

    def describe(self) -> dict[str, Any]:
        """Where it is, whether the last write succeeded, and the visits that were lost."""
        return {
            "place": str(self.place),
            "is_written": self._writer.is_writing,
            "lost_visits": self._writer.lost,
        }

    def surviving_pins(self) -> frozenset[str]:
        """Names of the pins that a server which started now, with the weights in memory, would find."""
        return self._writer.surviving_pins() if self._has_its_weights() else frozenset()

    def _has_its_weights(self) -> bool:
        return WATCH.current is not None and WATCH.current.fingerprint == self._fingerprint

    def visited(self, req: Req, path: Sequence[UnifiedTreeNode]) -> None:
        """A request has finished on this path from the root."""
        cut_nodes, self._cut = self._cut, []  # also where nothing is written: nobody else takes them
        weights = WATCH.current
        if weights is None or not weights.pages_match or weights.fingerprint != self._fingerprint:
            return
        now = time.time()
        # Both parts of a node that was cut, or its row would go on naming the whole.
        cut = [part for node in cut_nodes if node in self._tree for part in (node.parent, node)]
        nodes = {node.id: node for node in (*cut, *path) if node is not None}
        records = [self._record(node, now) for node in nodes.values()]
        refreshes = self._policy.clock // REFRESH_INTERVAL
        evidence = None
        if refreshes != self._told_at:
            evidence = ReuseEvidence.of(self._policy.reuse)
            self._told_at = refreshes
        namespace = (req.extra_key, req.cache_salt)
        self._writer.put(Visit(records, self._policy.clock, namespace, evidence))

    def cut(self, node: UnifiedTreeNode) -> None:
        """The first tokens of ``node`` are a node of their own now."""
        self._cut.append(node)

    def _record(self, node: UnifiedTreeNode, now: float) -> PrefixRecord:
        metadata = self._tree.metadata(node)
        return PrefixRecord(
            digest=self._tree.end_digest(node),
            parent=self._tree.start_digest(node),
            depth=metadata.depth,
            tokens=metadata.tokens,
            token_ids=key_of(node).raw_token_ids(),
            page_digests=None,
            vectors=metadata.importance.page_vectors(),
            queries=metadata.importance.queries,
            accesses=metadata.accesses,
            span=metadata.span,
            block_type=metadata.block_type,
            at_risk_as=metadata.at_risk_as,
            last_access=metadata.last_access,
            used=now,
            in_storage=metadata.in_storage,
        )

    def _worth(self, at_risk_as: int | None, age: int, tokens: int, depth: int) -> float:
        # On the writer's thread: a reader of the index sees the whole of the old or of the new one.
        if at_risk_as is None:
            return 0.0
        seconds = self._policy.cost.recompute_seconds(tokens, depth)
        return self._policy.reuse.index(at_risk_as, age) * seconds / tokens


def describe_ledger(feed: LedgerFeed | None, state: TreeState) -> dict[str, Any] | None:
    """As ``LedgerFeed.describe``, also of a ledger that could not be opened at the start; None without."""
    if feed is not None:
        return feed.describe()
    if not (place := state.options.ledger_place):
        return None
    return {"place": str(place_of(place)), "is_written": False, "lost_visits": state.counters.requests}


def model_digest(weights: Weights, page_size: int) -> bytes:
    """Digest, 32 bytes, of model and page size, on which a ledger's rows depend."""
    facts = f"{weights.fingerprint} {weights.config} {page_size}"
    return blake2b(facts.encode(), digest_size=32).digest()


def open_ledger_feed(state: TreeState, pins: Pinning | None, scheduler: Scheduler) -> LedgerFeed | None:
    """Takes in what the ledger of a scheduler that has just been built holds, and opens its feed.

    None where the ledger cannot be used, and on ranks that another one writes for: they serve all the same.

    Args:
        state: whose policy and ghosts go on where the ledger's stand.
        pins: take in those of the ledger; None where pins move nothing.
        scheduler: whose weights the ledger is for.
    """
    if WATCH.current is None:
        WATCH.watch(scheduler)
    # The ranks must start alike, and another server may write it meanwhile: the leader reads it.
    ledger, contents = _opened(state) if state.ranks.leads else (None, None)
    contents = state.ranks.from_leader(contents)
    if contents is None:
        return None
    restored_pins = contents.restore(state, pins)
    if ledger is None:
        return None
    weights = WATCH.current
    assert weights is not None
    logger.info(
        "KV importance ledger %s: %d pages known, %d pins, %d requests",
        ledger.place,
        len(state.tree.ghosts),
        len(restored_pins),
        state.policy.clock,
    )
    return LedgerFeed(
        ledger,
        state.tree,
        state.policy,
        weights=weights,
        budget_bytes=state.options.ledger.megabytes << 20,
        pins=restored_pins,
    )


def _opened(state: TreeState) -> tuple[Ledger | None, LedgerContents | None]:
    """The ledger of the model in memory, and what it holds; nothing where it cannot be used."""
    options, weights = state.options, WATCH.current
    assert weights is not None
    place = place_of(options.ledger_place)
    for _ in range(2):
        try:
            ledger = Ledger(
                place,
                model_digest(weights, state.tree.page_size),
                page_size=state.tree.page_size,
                keep_token_ids=options.ledger.token_ids == "on",
            )
        except LedgerUnusable as problem:
            logger.warning("KV importance ledger: %s; the server goes on without", problem)
            return None, None
        try:
            return ledger, LedgerContents.read(ledger, state.tree.ghosts.capacity_pages)
        except LedgerError as error:
            aside = ledger.give_up()
            logger.warning("KV importance ledger: %s cannot be read (%s); %s", place, error, aside)
    return None, None
