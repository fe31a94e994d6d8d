"""Neighbouring pages of a sequence, as one thread writes them."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from sgl_importance.storage.pages import Page, StoredPages, write_reason
from sgl_importance.storage.store_counters import StoreCounters


class WriteRun:
    """Neighbouring pages that one worker writes; whoever waits for them may give up.

    Args:
        pages: where they go.
        counters: counts what is written and what is not.
        identity: digest of the model.
        keys: of the pages, one at least.
        bodies: the pages, each [page bytes]; filled before the run is called.
        start: place of the first in its batch.
        before: key of the page in front of the first; None at the start of a sequence.
        depth: pages in front of the first.
        moment: when the sequence is used, in ns.
    """

    def __init__(
        self,
        pages: StoredPages,
        counters: StoreCounters,
        identity: bytes,
        keys: Sequence[str],
        bodies: list[Page],
        *,
        start: int,
        before: str | None,
        depth: int,
        moment: int,
    ) -> None:
        assert keys
        self.keys = keys
        self.start = start
        self.bodies = bodies
        self.stored = [False] * len(keys)
        self.finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pages = pages
        self._counters = counters
        self._identity = identity
        self._before = before
        self._depth = depth
        self._moment = moment

    def abandon(self) -> None:
        """Lets go of the pages, which are not written any more unless that has begun.

        A disk that hangs would fill the host's memory with what waits behind it.
        """
        self.bodies = []

    def __call__(self) -> None:
        bodies = self.bodies  # read once: from here on these are kept, whoever abandons the run
        if not bodies:
            self.finished.put(None)
            return
        try:
            outcomes = self._pages.write_run(
                self._identity,
                self.keys,
                bodies,
                before=self._before,
                depth=self._depth,
                moment=self._moment,
            )
        except Exception as error:
            outcomes = [error] * len(self.keys)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                self._counters.add("unwritten_pages", write_reason(outcome))
                continue
            self.stored[index] = True
            if outcome:
                self._counters.add("written_pages")
                self._counters.add("written_bytes", amount=bodies[index].nbytes)
        self.finished.put(None)
