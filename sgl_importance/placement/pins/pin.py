"""One soft pin: a prefix to be kept, and the strength with which it is kept by now."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from sgl_importance.nodes.named_sessions import Session
from sgl_importance.tiers import Tier

# Losses span less: the retention index 2 ** 68 (from a page that every request asks for to a class of
# which ten million intervals ended without a visit), the seconds per token 2 ** 30 (from one, on a very slow
# machine, to the least that counts). A pinned page with a copy on the host must outlast any page without.
PIN_OCTAVES = 128.0
# Admitted requests without a use after which a pin without a lifetime has half its octaves left; it ends
# after eight half-lives. Long against a scan of ten times the pool, short against a forgotten pin.
HALF_LIFE_REQUESTS = 65_536


class PinSource(IntEnum):
    """Source of a pin; smaller is served first.

    Requests choose their own salts, so hinted pins must not divide the shares that the operator has
    assigned to requested pins.
    """

    REQUESTED = 0  # by the operator's route
    HINTED = 1  # by a hint of an ordinary request


class PinEnd(StrEnum):
    """Why a pin ended."""

    UNPINNED = "unpinned"
    EXPIRED = "expired"  # its lifetime is over
    UNUSED = "unused"  # without a lifetime, and no request used it
    SUPERSEDED = "superseded"  # by a hint for the same text or more of it, for no shorter
    MADE_ROOM = "made_room"  # when one more came: hinted, and nearest to its end
    SESSION_OVER = "session_over"  # hinted, and the only session that asked for it said so


@dataclass(slots=True, eq=False)
class Pin:
    """One prefix to be kept.

    Attributes:
        pin_id: its name, the same on every rank.
        tokens: the prefix, whole pages.
        extra_key: namespace of its requests, beside the salt.
        cache_salt: namespace of its requests, and the tenant whose budget it spends.
        expires_at: Unix time at which it ends; None where only disuse ends it.
        source: operator or hint.
        session: the only one whose requests asked for it; None where others did, or none.
        last_used: clock of the last admitted request that found one of its pages in the cache.
        digests: chained digest of each page.
        octaves: log2 of its present bias.
        granted: leading pages within the budget, by tier.
    """

    pin_id: str
    tokens: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    expires_at: float | None = None
    source: PinSource = PinSource.REQUESTED
    session: Session | None = None
    last_used: int = 0
    digests: list[bytes] = field(default_factory=list)
    octaves: float = PIN_OCTAVES
    granted: dict[Tier, int] = field(default_factory=dict)

    @property
    def tenant(self) -> str | None:
        return self.cache_salt


def decayed_octaves(idle_requests: int) -> float:
    """log2 of the bias of a pin after so many admitted requests without a use; falls in steps to 0."""
    octaves = PIN_OCTAVES * 0.5 ** (idle_requests // HALF_LIFE_REQUESTS)
    return octaves if octaves >= 1 else 0.0
