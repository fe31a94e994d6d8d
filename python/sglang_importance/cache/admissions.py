"""Requests that are admitted: what each found, and who is told."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.node_metadata import NodeMetadata, transition_after
from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.records import EventKind
from sgl_importance.signal.fold import QueryFolds
from sgl_importance.tiers import Tier
from sglang_importance.cache.misses import Misses
from sglang_importance.cache.node_events import NodeEvents
from sglang_importance.observe.recorder import Recorder
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.placement.hint_follower import HintFollower
from sglang_importance.placement.pinning import Pinning
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.placement.session_follower import SessionFollower
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.request_record import found_tokens, record_of


class Admissions:
    """Takes requests in, each once, whatever upstream makes of it later.

    Attributes:
        is_decode_server: whether prompts are computed by another server.
    """

    def __init__(
        self,
        state: TreeState,
        node_events: NodeEvents,
        pins: Pinning,
        hints: HintFollower,
        sessions: SessionFollower,
        *,
        recorder: Recorder | None,
        shadowing: Shadowing | None,
        misses: Misses | None,
    ) -> None:
        self.is_decode_server = False
        self._state = state
        self._node_events = node_events
        self._pins = pins
        self._hints = hints
        self._sessions = sessions
        self._recorder = recorder
        self._shadowing = shadowing
        self._misses = misses

    def admit(self, req: Req, cached_tokens: int) -> QueryFolds:
        """Counts one access per admitted request: upstream also counts inserts and waiting requests."""
        tree, policy, counters = self._state.tree, self._state.policy, self._state.counters
        self._note_prefix(req, cached_tokens)
        if self._shadowing is not None and not req.skip_radix_cache_insert:  # stock keeps nothing of it, too
            self._state.faults.beside(FaultPlace.OBSERVATION, self._shadowing.admitted, req)
            self._state.faults.beside(FaultPlace.OBSERVATION, self._shadowing.count, counters)
        hits = self._hit_nodes(req, cached_tokens)
        self._sessions.admitted(req, hits)
        observed = transition_after(tree.metadata(hits[-1]) if hits else None)
        serial = policy.admit()
        counters.calibration.advance(serial)
        counters.ages.admitted(serial)
        if self._misses is not None:
            self._misses.admitted(req)
        transition = self._hints.admitted(req, cached_tokens, observed)
        query = QueryFolds(serial, transition)
        if self._recorder is not None:
            self._state.faults.beside(FaultPlace.RECORDING, self._recorder.admitted, req, query.serial)
        for node in hits:
            metadata = tree.metadata(node)
            self._hit_at_age(req, metadata)
            if metadata.is_prewarmed:
                counters.prewarmed_hit_tokens += metadata.tokens
                metadata.is_prewarmed = False
            tree.accessed(metadata, transition)
            self._node_events.record_only(EventKind.HIT, Tier.DEVICE, node, rid=req.rid)
        self._pins.admitted(hits)
        self.count(req, cached_tokens)
        return query

    def _note_prefix(self, req: Req, cached_tokens: int) -> None:
        record = record_of(req)
        if self.is_decode_server and record.decode_prefix is None:
            record.decode_prefix = cached_tokens

    def _hit_at_age(self, req: Req, metadata: NodeMetadata) -> None:
        """A prompt begins on the device, then comes the host; what storage had was counted when it came."""
        end, found = metadata.depth + metadata.tokens, found_tokens(req)
        if metadata.is_prewarmed or end > found[Tier.DEVICE] + found[Tier.HOST]:
            return
        tier = Tier.DEVICE if end <= found[Tier.DEVICE] else Tier.HOST
        self._state.counters.ages.asked_again(tier, metadata.tokens, metadata.last_access)

    def count(self, req: Req, cached_tokens: int) -> None:
        """Counts an admitted request of a user, its prompt and its hits, once.

        Reads the request only, so it goes on when learning has ended, and then counts the hits of LRU.

        Args:
            cached_tokens: of its prompt, that it found on the device.
        """
        record = record_of(req)
        if record.is_counted or is_prewarm(req.rid) or req.rid.startswith(HEALTH_CHECK_PREFIX):
            return
        record.is_counted = True
        self._note_prefix(req, cached_tokens)
        self._state.counters.admitted(req)

    def _hit_nodes(self, req: Req, cached_tokens: int) -> list[UnifiedTreeNode]:
        """Nodes that the request found in the cache, root side first."""
        if cached_tokens <= 0 or req.last_node is None:
            return []
        tree = self._state.tree
        path = tree.path(tree.core.node_by_id(req.last_node))
        return [
            node
            for node in path
            if (metadata := tree.metadata(node)).depth + metadata.tokens <= cached_tokens
        ]
