"""The reasons why prompt tokens were not found, and what the server remembers of KV that it does not hold."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sgl_importance.tiers import Tier


class Reason(StrEnum):
    """Why tokens were computed. Every token that was not found has exactly one."""

    NEVER_SEEN = "never_seen"
    """New text, as far back as the server remembers: nothing that it knew goes on here."""
    FORGOTTEN = "forgotten"
    """Known once, and not remembered any more: older than the memory of paths."""
    PARTED = "parted"
    """What the namespace has asked for before goes on with other tokens."""
    EVICTED = "evicted"
    """To make room for other KV."""
    SESSION_OVER = "session_over"
    """Only a session had asked for it, which said that it was over: it was given back."""
    OTHER_NAMESPACE = "other_namespace"
    """Held for another salt, key or adapter."""
    FLUSHED = "flushed"
    """Given back by a flush or by a weight update."""
    SHORT = "short"
    """The rest that fills no page, or the prompt's last token, which is computed always."""
    NOT_KEPT = "not_kept"
    """Computed before and not kept: a selector chose its pages, or the request was aborted or retracted."""
    STORAGE = "storage"
    """It went on to storage, which did not bring it back: missed, or too late."""
    UNUSED = "unused"
    """Held, and no request could go on from it: computed at the same time, not loaded from the host, prompt
    logprobs wanted, or a window or state of the model missing."""


class Cause(StrEnum):
    """What the server did, where the reason leaves it open."""

    FLUSH = "flush"
    WEIGHT_UPDATE = "weight_update"
    ABORT = "abort"
    BEAMS = "beams"
    RETRACTION = "retraction"
    SELECTOR = "selector"


class NeededBy(StrEnum):
    """Work that needed the room."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOAD_BACK = "load_back"
    PREFETCH = "prefetch"
    UNKNOWN = "unknown"


class Room(NamedTuple):
    """For whom room was made.

    Attributes:
        work: that needed it.
        rid: the first request of the batch; None where it is not known.
        others: further requests of the batch.
    """

    work: NeededBy
    rid: str | None = None
    others: int = 0


class Fate(NamedTuple):
    """How KV came to be held no longer.

    Attributes:
        reason: EVICTED, SESSION_OVER, FLUSHED, NOT_KEPT or STORAGE.
        clock: when, in admitted requests.
        time: when, Unix time in seconds.
        cause: of FLUSHED and NOT_KEPT.
        tier: of EVICTED and STORAGE: that gave up the last copy. Of SESSION_OVER: that had it when it was
            given back; STORAGE where that keeps it, until its own budget removes it.
        room: of EVICTED, SESSION_OVER and STORAGE: for whom.
        reuse: of EVICTED, SESSION_OVER and STORAGE: reuses per admitted request that keeping it could have
            earned, by the prediction that ranked it; 0 of what its session went on without.
    """

    reason: Reason
    clock: int
    time: float
    cause: Cause | None = None
    tier: Tier | None = None
    room: Room | None = None
    reuse: float | None = None


class PathVisit(NamedTuple):
    """A request that asked for a path, or brought it.

    Attributes:
        rid: its id; None where it is not known (storage).
        clock: when, in admitted requests.
        time: when, Unix time in seconds.
    """

    rid: str | None
    clock: int
    time: float
