"""What a replay of device, host and storage is given: sizes, policies, how blocks come down, and costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sgl_importance.errors import ImportanceError
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, TRACE_FOLLOWERS


class WritePolicy(StrEnum):
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class TierError(ImportanceError, ValueError):
    """Tiers that cannot be replayed; the message names the cure."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier and its policy.

    Attributes:
        capacity: blocks that it can hold.
        policy: name of its eviction policy.
        bytes_per_second: bandwidth towards the tier above; unused for the device.
    """

    tier: Tier
    capacity: int
    policy: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class TieredSetup:
    """The tiers and costs of a tiered replay.

    Attributes:
        sizes: from the fastest tier on; the first is the device.
        prefill_tokens_per_second: rate at which missing tokens are computed.
        bytes_per_token: KV bytes of one token over all layers.
        chunk_tokens: that a server computes, and inserts as a node, at once, for ``replay_served_tiers``;
            None for ``replay_tiers``, which has single blocks.
    """

    sizes: tuple[TierSize, ...]
    write_policy: WritePolicy
    prefill_tokens_per_second: float
    bytes_per_token: int
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        assert self.sizes[0].tier is Tier.DEVICE
        if self.chunk_tokens is not None:
            self._check_served()
        elif not self.writes_through:
            for size in self.sizes[1:]:
                if size.policy in TRACE_FOLLOWERS:
                    raise TierError(
                        f"{size.policy} follows the requests, but under write_back the {size.tier} tier gets "
                        "blocks between them: use write_through, or another policy there"
                    )

    def _check_served(self) -> None:
        if [size.tier for size in self.sizes] != [Tier.DEVICE, Tier.HOST]:
            raise TierError("whole nodes are replayed in device and host: give these two, and no storage")
        policies = {size.policy for size in self.sizes}
        if len(policies) > 1 or not policies <= {"lru", IMPORTANCE}:
            raise TierError(f"whole nodes are ranked on both tiers by one of lru and {IMPORTANCE}: name one")
        if self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            raise TierError("whole nodes are not copied selectively: use write_through or write_back")

    @property
    def writes_through(self) -> bool:
        return self.write_policy is not WritePolicy.WRITE_BACK

    def copies(self, *, again: bool) -> bool:
        """Whether a block is copied down when a request asks for it; ``again``: not for the first time."""
        return self.writes_through and (again or self.write_policy is WritePolicy.WRITE_THROUGH)
