"""Admission of copies to the lower tiers (the gate): which of them are worth their bytes.

A copy is written if all of three hold:

- *payback*: P(it is asked for while it stays) is large enough. How long it stays follows from Little's law,
  capacity / write rate, so a tier that is written faster asks for more. The stay is never taken for longer
  than the clock has run.
- *displacement*: where the tier is full, losing the copy costs at least as much, per byte and admitted
  request, as losing the tier's recent victims. That threshold is smoothed over victims, fades where
  nothing is given up any more, and is not crossed back and forth by single victims.
- *budget*: the tier's bucket, refilled by each admitted request, still holds bytes.

All three are judged by the estimate of reuse that ranks evictions (``reuse.estimator``). The clock
counts admitted requests and nothing is random: the same requests lead to the same copies on every rank.

The displacement rule is TinyLFU's admission (Einziger, Friedman, Manes, ACM ToS 2017), with marginal loss in
place of frequency and the recent victims in place of the next one, which an asynchronous copy cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.ranking.marginal_loss import ImportancePolicy
from sgl_importance.reuse.life_table import BUCKET_STARTS, MAX_AGE, age_bucket
from sgl_importance.tiers import Tier

HALF_LIFE = 256
"""Admitted requests after which a byte written counts half in a tier's write rate."""
VICTIM_SHARE = 1 / 64
"""Weight of one victim in the threshold, for a victim of the tier's 1/1024; larger ones weigh more."""
MIN_RESIDENCE = 1
"""A tier is not rewritten in fewer admitted requests: the budget of one request is capacity / this. A guard
against storms; what is worth its bytes is for the other two rules to say."""
BURST_REQUESTS = 2
"""Requests whose budget a bucket can hold."""


class Refusal(StrEnum):
    """The rule that a chain fell short of."""

    BUDGET = "budget"
    PAYBACK = "payback"
    DISPLACEMENT = "displacement"


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Thresholds of the admission of copies.

    Attributes:
        host_payback: least P(asked for while the copy stays) on the host: bytes read per byte written.
        storage_payback: the same in storage: ten bytes may be written for one that is read.
        early_payback: the same, where the copy can still be made when its source is evicted, unless
            ``storage_payback`` asks for more. A copy that is as likely as not to be asked for is stored at
            once, so that it outlives the server.
        displacement: least loss of a copy, as a share of what recent victims of a full tier lost. Below 1,
            since at 1 all traces lose hits under write_back (docs/placement.md).
    """

    host_payback: float = 0.0
    storage_payback: float = 0.1
    early_payback: float = 0.5
    displacement: float = 0.5


class TierPressure:
    """Write rate of one tier, and the loss of its recent victims.

    Args:
        capacity_bytes: size of the tier; None where it is not known or without bound.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        assert capacity_bytes is None or capacity_bytes > 0
        self.capacity_bytes = capacity_bytes
        self.bucket_bytes = self.budget_bytes * BURST_REQUESTS
        self.residence = MAX_AGE
        """Admitted requests that a copy stays, as the tier is written now."""
        self.victim_loss = 0.0
        self._rate = 0.0
        self._seen = 0.0
        self._written_bytes = 0

    @property
    def budget_bytes(self) -> float:
        """Bytes that one admitted request may add on average."""
        return float("inf") if self.capacity_bytes is None else self.capacity_bytes / MIN_RESIDENCE

    def tick(self) -> None:
        """One more request was admitted."""
        keep = 0.5 ** (1 / HALF_LIFE)
        self._rate = self._rate * keep + self._written_bytes * (1 - keep)
        self._seen = self._seen * keep + (1 - keep)
        self._written_bytes = 0
        self.victim_loss *= keep
        self.bucket_bytes = min(self.bucket_bytes + self.budget_bytes, self.budget_bytes * BURST_REQUESTS)
        if self.capacity_bytes is not None and self._rate > 0:
            self.residence = max(1, min(MAX_AGE, int(self.capacity_bytes * self._seen / self._rate)))

    def wrote(self, size: int) -> None:
        self._written_bytes += size
        self.bucket_bytes -= size

    def gave_up(self, size: int, loss: float) -> None:
        """The tier evicted ``size`` bytes whose loss is ``loss`` per byte and admitted request."""
        part = 1.0 if self.capacity_bytes is None else size * 1024 / self.capacity_bytes
        weight = 1 - (1 - VICTIM_SHARE) ** part
        self.victim_loss += weight * (loss - self.victim_loss)


class WriteGate:
    """Decides about copies to the tiers below the device; never moves anything.

    Args:
        policy: its estimate and clock.
        capacities: bytes of each tier that is gated; None where not known.
        settings: thresholds.
    """

    def __init__(
        self,
        policy: ImportancePolicy,
        capacities: Mapping[Tier, int | None],
        settings: GateSettings | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings or GateSettings()
        self._capacities = dict(capacities)
        self._min_payback = {
            Tier.HOST: self.settings.host_payback,
            Tier.STORAGE: self.settings.storage_payback,
        }
        self._paybacks: dict[tuple[int, int, int], float] = {}
        self._paybacks_of = -1
        self.refusal = Refusal.BUDGET
        """Reason of the last refusal."""
        self.tiers: dict[Tier, TierPressure] = {}
        self.reset()

    def reset(self) -> None:
        """The tiers are empty again."""
        self.tiers = {tier: TierPressure(size) for tier, size in self._capacities.items()}

    def tick(self) -> None:
        """One more request was admitted."""
        for tier in self.tiers.values():
            tier.tick()

    def gave_up(self, tier: Tier, node: NodeMetadata) -> None:
        """The tier evicted the node.

        Its loss counts as if no lower tier had a copy, like that of the candidates, which have none: so nodes
        are compared by how soon they are asked for, not by how far their copies have got. A pin's bias does
        not count: one pinned victim would keep everything else out for the rest of the day.
        """
        if tier in self.tiers:
            loss = self.policy.loss(tier, node, below=None) / self.policy.bias(tier, node)
            self.tiers[tier].gave_up(self._bytes(node), loss)

    def admits(self, tier: Tier, chain: Sequence[NodeMetadata], *, can_wait: bool = False) -> bool:
        """Whether to copy a whole chain to the tier; an admitted chain counts as written.

        Args:
            tier: where the copies would lie.
            chain: the node that is offered and, ahead of it, its ancestors without a copy there, since a
                copy behind a gap would be of no use.
            can_wait: whether the chain will be offered once more, when its source is evicted.
        """
        assert chain
        pressure = self.tiers[tier]
        size = sum(self._bytes(node) for node in chain)
        if pressure.bucket_bytes <= 0:  # in debt: a chain is not cut, however long it is
            return self._refuse(Refusal.BUDGET)
        least_payback = self._min_payback[tier]
        if can_wait:
            least_payback = max(least_payback, self.settings.early_payback)
        if self._mean(chain, lambda node: self.payback(tier, node)) < least_payback:
            return self._refuse(Refusal.PAYBACK)
        least = self.settings.displacement * pressure.victim_loss
        if least and self._mean(chain, lambda node: self.policy.loss(tier, node, below=None)) < least:
            return self._refuse(Refusal.DISPLACEMENT)
        pressure.wrote(size)
        return True

    def _refuse(self, refusal: Refusal) -> bool:
        self.refusal = refusal
        return False

    def payback(self, tier: Tier, node: NodeMetadata) -> float:
        """P(the node is asked for while a copy that is made now stays in the tier), raised by its pins.

        No copy is made for a reuse at an age that no interval can have reached yet: without evidence the
        estimate is all prior, which over a tier that is never full adds up to near certainty.
        """
        reuse = self.policy.reuse
        stays = min(self.tiers[tier].residence, reuse.clock)
        if self._paybacks_of != reuse.version:
            self._paybacks.clear()
            self._paybacks_of = reuse.version
        age = max(reuse.clock - node.last_access, 1)
        # Bucketed, so that a handful of answers serves all nodes until the estimate changes.
        key = (node.reuse_class, age_bucket(age), age_bucket(stays))
        known = self._paybacks.get(key)
        if known is None:
            horizon = int(BUCKET_STARTS[key[2]])
            known = reuse.probability_within(key[0], int(BUCKET_STARTS[key[1]]), horizon)
            self._paybacks[key] = known
        pinned: float = max(node.pin_octaves.values(), default=0.0)
        return min(1.0, known * float(2.0**pinned))

    def _bytes(self, node: NodeMetadata) -> int:
        return node.tokens * self.policy.cost.bytes_per_token

    @staticmethod
    def _mean(chain: Sequence[NodeMetadata], of: Callable[[NodeMetadata], float]) -> float:
        """Mean over the tokens of a chain."""
        return sum(of(node) * node.tokens for node in chain) / sum(node.tokens for node in chain)
