"""What stock's order of evictions would have found, from the recording of a server that evicts by another."""

from __future__ import annotations

import time
from pathlib import Path

from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking
from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import RequestAdmitted, RequestFinished

OURS = "demo-"
"""What the ids of the load's requests begin with."""
WRITTEN_SECONDS = 20.0


class NotRecorded(Exception):
    """The recording has not come to hold what it must; the message names the cure."""


def lru_hit_tokens(recording: Path, requests: int) -> int:
    """Prompt tokens that a pool of the same size finds under LRU: the shadow of ``--kv-policy observe``.

    Args:
        recording: folder of ``--kv-importance-trace``, of a server whose prompts fit one prefill chunk.
        requests: of ours that it must hold, all finished; a thread of the server writes it.
    """
    deadline = time.monotonic() + WRITTEN_SECONDS
    while (found := _followed(recording))[1] < requests:
        if time.monotonic() > deadline:
            raise NotRecorded(f"{found[1]} of {requests} requests are recorded: is the disk full?")
        time.sleep(0.2)
    return found[0]


def _followed(recording: Path) -> tuple[int, int]:
    """Tokens found, and requests that have finished."""
    reader = open_trace(recording)
    header = reader.header
    cache = ShadowCache(
        header.capacity_tokens["device"] // header.page_size,
        header.page_size,
        LruShadowRanking(),
        spare_pages=int(header.page_size > 1),
    )
    hits, finished = 0, 0
    lengths: dict[int, int] = {}
    ours: set[int] = set()
    for record in reader:
        match record:
            case RequestAdmitted() if not record.rid.startswith(HEALTH_CHECK_PREFIX):
                lengths[record.request] = record.input_tokens
                pages = [reader.digest(page) for page in record.pages]
                found = cache.admit(str(record.request), pages, record.input_tokens) or 0
                if record.rid.startswith(OURS):
                    ours.add(record.request)
                    hits += found
            case RequestFinished() if record.request in lengths:
                pages = [reader.digest(page) for page in record.pages]
                cache.finish(str(record.request), pages, lengths[record.request] + record.output_tokens)
                finished += record.request in ours
    return hits, finished
