"""Neighbouring pages of a sequence, as one thread writes them."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_importance.storage.pages import Page, StoredPages, write_reason
from sgl_importance.storage.store_counters import StoreCounters


@dataclass(kw_only=True, eq=False)
class WriteRun:
    """Neighbouring pages that one worker writes; whoever waits for them may give up.

    Attributes:
        pages: where they go.
        counters: counts what is written and what is not.
        identity: digest of the model.
        keys: of the pages, one at least.
        bodies: the pages, each [page bytes]; filled before the run is called.
        start: place of the first in its batch.
        before: key of the page in front of the first; None at the start of a sequence.
        depth: pages in front of the first.
        moment: when the sequence is used, in ns.
        stored: which of them are, once the run is finished.
        finished: has something in it from then on.
    """

    pages: StoredPages
    counters: StoreCounters
    identity: bytes
    keys: Sequence[str]
    bodies: list[Page]
    start: int
    before: str | None
    depth: int
    moment: int
    stored: list[bool] = field(init=False)
    finished: queue.SimpleQueue[None] = field(init=False, default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        assert self.keys
        self.stored = [False] * len(self.keys)

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
            outcomes = self.pages.write_run(
                self.identity,
                self.keys,
                bodies,
                before=self.before,
                depth=self.depth,
                moment=self.moment,
            )
        except Exception as error:
            outcomes = [error] * len(self.keys)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                self.counters.add("unwritten_pages", write_reason(outcome))
                continue
            self.stored[index] = True
            if outcome:
                self.counters.add("written_pages")
                self.counters.add("written_bytes", amount=bodies[index].nbytes)
        self.finished.put(None)
