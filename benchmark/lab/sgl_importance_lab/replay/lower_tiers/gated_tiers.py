"""Tiers with admission of copies (the gate): the server's own, or one of its control arms.

The write policy says when a copy is offered, the gate whether it is made: under ``write_through`` at every
request that asks for a block, under ``write_through_selective`` from the second request on, under
``write_back`` when the tier above evicts it. Admitted copies are prefix-closed: a block is offered with
all its ancestors that have no copy, and refused with them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.ranking.cost_model import CostModel
from sgl_importance.ranking.write_gate import GateSettings, WriteGate
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.lower_tiers.tiered_replay import (
    TierCache,
    TieredCounts,
    TieredReplay,
    TieredSetup,
    TierError,
)
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, TRACE_FOLLOWERS
from sgl_importance_lab.replay.sessions import BlockFacts
from sgl_importance_lab.replay.tier_order import TierOrder
from sgl_importance_lab.replay.trace import NO_PARENT, Trace
from sgl_importance_lab.replay.trace_nodes import TraceNodes

PAIR_SHARE = 1e-6  # attention's share of prefill per token of context, of an 8B model: 1 at a million tokens


class GateKind(StrEnum):
    """The decider about copies."""

    OPEN = "open"
    """None: every block that is offered is copied."""
    LOSS = "loss"
    """``WriteGate``, the server's."""
    RANDOM = "random"
    """A coin: the control arm at equal bytes."""


class StorageOffer(StrEnum):
    """Moment at which a block is offered to the storage tier."""

    COPIED = "copied"
    """When the host got its copy, as sglang does."""
    EVICTED = "evicted"
    """Once more when the host gives it up, and until then only if it is as likely to come back as not."""


@dataclass(frozen=True, slots=True)
class Gating:
    """The rule by which copies to lower tiers are decided.

    Attributes:
        tiers: which tiers are gated; the others are open.
        shares: of ``RANDOM``, the share that passes, by tier.
    """

    kind: GateKind = GateKind.LOSS
    settings: GateSettings = field(default_factory=GateSettings)
    tiers: tuple[Tier, ...] = (Tier.HOST, Tier.STORAGE)  # no set: a sweep's journal knows jobs by their repr
    storage_offer: StorageOffer = StorageOffer.COPIED
    shares: tuple[tuple[Tier, float], ...] = ()
    seed: int = 0


def check_gating(setup: TieredSetup, gating: Gating) -> None:
    """
    Raises:
        TierError: the policy of the storage tier follows the requests, which it gets blocks between.
    """
    if gating.storage_offer is not StorageOffer.EVICTED:
        return
    for size in setup.sizes[2:]:
        if size.policy in TRACE_FOLLOWERS and size.policy != IMPORTANCE:
            raise TierError(
                f"{size.policy} follows the requests, but between them a gate offers the {size.tier} tier "
                "what the host gives up: leave out --gate, or use another policy there"
            )


class Gate(Protocol):
    def admits(self, tier: Tier, chain: Sequence[NodeMetadata], *, can_wait: bool = False) -> bool: ...


class OpenGate:
    def admits(self, tier: Tier, chain: Sequence[NodeMetadata], *, can_wait: bool = False) -> bool:
        return not can_wait


class RandomGate:
    """One toss per node and visit, so that all offers within a visit are decided alike."""

    def __init__(self, shares: dict[Tier, float], seed: int) -> None:
        self._shares = shares
        self._seed = seed

    def admits(self, tier: Tier, chain: Sequence[NodeMetadata], *, can_wait: bool = False) -> bool:
        last = chain[-1]
        toss = random.Random(f"{self._seed} {tier} {last.last_access}").random()
        return toss < self._shares[tier]


class GatedReplay(TieredReplay):
    """A tiered replay with one policy object over the tiers that rank by importance, and gated copies.

    Args:
        facts: ``block_facts(trace)``, where the caller has them.
        seed: of policies that draw.
    """

    def __init__(
        self,
        trace: Trace,
        setup: TieredSetup,
        gating: Gating,
        *,
        facts: BlockFacts | None = None,
        seed: int = 0,
    ) -> None:
        assert trace.parents is not None
        assert setup.shared_order
        super().__init__(trace, setup, seed=seed)
        self.gating = gating
        token_seconds = 1 / setup.prefill_tokens_per_second
        bandwidths = {size.tier: size.bytes_per_second for size in setup.sizes}
        cost = CostModel(
            prefill_seconds_per_token=token_seconds,
            prefill_seconds_per_token_pair=token_seconds * PAIR_SHARE,
            bytes_per_token=setup.bytes_per_token,
            host_bytes_per_second=bandwidths.get(Tier.HOST, 1.0),
            storage_bytes_per_second=bandwidths.get(Tier.STORAGE, 1.0),
        )
        self.nodes = TraceNodes(trace, cost, facts=facts)
        self._parents: list[int] = trace.parents.tolist()
        block_bytes = trace.block_tokens * setup.bytes_per_token
        capacities = {size.tier: size.capacity * block_bytes for size in setup.sizes[1:]}
        self.write_gate = WriteGate(self.nodes.policy, capacities, gating.settings)
        gates: dict[GateKind, Gate] = {
            GateKind.OPEN: OpenGate(),
            GateKind.LOSS: self.write_gate,
            GateKind.RANDOM: RandomGate(dict(gating.shares), gating.seed),
        }
        self._gates = {
            size.tier: gates[gating.kind if size.tier in gating.tiers else GateKind.OPEN]
            for size in setup.sizes
        }
        self.tiers = [
            TierCache(size, trace, self._order(level)) if size.policy == IMPORTANCE else self.tiers[level]
            for level, size in enumerate(setup.sizes)
        ]
        self.refused_tokens = dict.fromkeys(Tier, 0)

    def _order(self, level: int) -> TierOrder:
        size = self.setup.sizes[level]

        def below(block: int) -> Tier | None:
            if level + 1 == len(self.tiers):
                return None
            lower = self.tiers[level + 1]
            demoted = level == 0 and not self.setup.writes_through
            return lower.size.tier if demoted or lower.resident[block] else None

        return TierOrder(size.capacity, size.tier, self.nodes, below)

    # ---- copies ----

    def admit(self, index: int, path: Sequence[int], found: Sequence[int]) -> None:
        self.nodes.begin_request()
        start = int(self.trace.offsets[index])
        for position, block in enumerate(path):
            self.nodes.visit(block, start + position, position)
        self.write_gate.tick()
        for level, tier in enumerate(self.tiers):
            missing: list[int] = []  # positions that have no copy here yet, up to the present one
            for position, block in enumerate(path):
                source = found[position] if position < len(found) else 0
                here = bool(tier.resident[block])
                if (here or level <= source) and missing:
                    missing = self._copy_down(level, index, path, missing)
                if here:
                    tier.use(block, position)
                elif level <= source:
                    tier.admit(block, position)
                else:
                    missing.append(position)
                    if self._ends_node(path, position):
                        missing = self._copy_down(level, index, path, missing)

    def _ends_node(self, path: Sequence[int], position: int) -> bool:
        """Whether the next block's facts differ. Like the tokens of a radix node, adjacent blocks of one
        class are offered together."""
        if position + 1 == len(path):
            return True
        return self.nodes[path[position]].reuse_class != self.nodes[path[position + 1]].reuse_class

    def _copy_down(self, level: int, index: int, path: Sequence[int], positions: list[int]) -> list[int]:
        """Offers the blocks at these positions to a tier; returns those that still have no copy there."""
        if not self._offered(level, path[positions[-1]]):
            return positions
        can_wait = level == 2 and self.gating.storage_offer is StorageOffer.EVICTED
        if not self._admits(level, [path[position] for position in positions], can_wait=can_wait):
            return positions
        for position in positions:
            self.tiers[level].admit(path[position], position)
            self.tiers[level].written_tokens += self.tokens_at(index, position)
        return []

    def _offered(self, level: int, block: int) -> bool:
        if not self.setup.copies(again=self.nodes[block].accesses > 0):
            return False
        if level < 2:
            return True
        return bool(self.tiers[1].resident[block])

    def _admits(self, level: int, chain: Sequence[int], *, can_wait: bool = False) -> bool:
        tier = self.tiers[level].size.tier
        if self._gates[tier].admits(tier, [self.nodes[block] for block in chain], can_wait=can_wait):
            return True
        self.refused_tokens[tier] += self.trace.block_tokens
        return False

    def make_room(self) -> None:
        for level, tier in enumerate(self.tiers):
            while tier.overfull():
                block = tier.evict()
                self.write_gate.gave_up(tier.size.tier, self.nodes[block])
                self._copy_below(level, block)

    def _copy_below(self, level: int, block: int) -> None:
        """Offers an evicted block to the next tier, where the write policy says so."""
        if level + 1 == len(self.tiers):
            return
        lower = self.tiers[level + 1]
        if lower.resident[block]:
            return
        offers_again = level > 0 and self.gating.storage_offer is StorageOffer.EVICTED
        if self.setup.writes_through and not offers_again:
            return
        chain = self._chain(level, block)
        # Copies of its descendants in any lower tier could not be reached without one of the block.
        reached_through = any(tier.has_children(block) for tier in self.tiers[level + 1 :])
        if not reached_through and not self._admits(level + 1, chain):
            return
        for copied in chain:
            lower.demote(copied)
            lower.written_tokens += self.trace.block_tokens

    def _chain(self, level: int, block: int) -> list[int]:
        """The block and its ancestors without a copy in the tier below ``level``; under write_back the
        ancestors, which are still in this tier or above, follow when it is their turn."""
        chain = [block]
        if self.setup.writes_through:
            lower = self.tiers[level + 1]
            while (parent := self._parents[chain[-1]]) != NO_PARENT and not lower.resident[parent]:
                chain.append(parent)
        return chain[::-1]


def replay_gated(trace: Trace, setup: TieredSetup, gating: Gating, *, seed: int = 0) -> TieredCounts:
    """``replay_tiers`` with a gate ahead of the lower tiers, and one policy object where tiers rank by
    importance."""
    return GatedReplay(trace, setup, gating, seed=seed).run()
