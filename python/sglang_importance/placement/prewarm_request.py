"""Distinguishes requests that only warm the cache from clients' requests, by their ids."""

from __future__ import annotations

import uuid

RID_PREFIX = "kv-importance-prewarm-"


def new_rid() -> str:
    """Request id of the next step of a pre-warm."""
    return RID_PREFIX + uuid.uuid4().hex


def is_prewarm(rid: str) -> bool:
    """Whether the request counts as no access, no query and no evidence of reuse."""
    return rid.startswith(RID_PREFIX)
