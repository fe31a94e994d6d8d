"""The optimum of residency: the fewest loads that any choice of pages to keep allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_importance_lab.replay.residency.page_steps import Numbers

Read = tuple[Numbers, bool]
"""Pages that are read at once, and whether loads of them count."""


def fewest_loads(reads: Sequence[Read], num_pages: int, num_slots: int) -> list[int]:
    """Loads of each read when the pages stay whose next counted read comes first (Belady, 1966).

    What is read may be given up at once, so no policy loads less: each stay of a page in a slot, from one
    read to the next that counts, saves one load, and the earliest to end leaves most room for others.

    Args:
        reads: in their order.
        num_pages: different pages.
        num_slots: pages that stay from one read to the next.
    """
    never = len(reads)
    coming = np.full(num_pages, never)
    next_reads = []
    for at in range(len(reads) - 1, -1, -1):
        pages, counts = reads[at]
        next_reads.append(coming[pages])
        coming[pages] = at if counts else never
    resident = np.zeros(num_pages, dtype=bool)
    until = np.full(num_pages, never)
    loads = []
    for (pages, counts), upcoming in zip(reads, reversed(next_reads), strict=True):
        loads.append(int((~resident[pages]).sum()) if counts else 0)
        until[pages] = upcoming
        resident[pages] = upcoming < never
        held = np.flatnonzero(resident)
        if len(held) > num_slots:
            resident[held[np.argsort(until[held], kind="stable")[num_slots:]]] = False
    return loads
