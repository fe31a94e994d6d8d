"""How many pages of a sequence are there, as one thread looks."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from sgl_importance.storage.page_record import MissReason, PageMiss
from sgl_importance.storage.pages import StoredPages


class Look:
    """How many of the first keys are there; behind a disk that hangs, what nobody waits for keeps no keys."""

    def __init__(self, pages: StoredPages, identity: bytes, keys: Sequence[str]) -> None:
        self.answer: queue.SimpleQueue[int | PageMiss] = queue.SimpleQueue()
        self._pages = pages
        self._identity = identity
        self._keys: Sequence[str] | None = keys

    def abandon(self) -> None:
        self._keys = None

    def __call__(self) -> None:
        keys = self._keys  # read once: it may be abandoned meanwhile
        if keys is None:
            self.answer.put(0)
            return
        try:
            self.answer.put(self._pages.count_present(self._identity, keys))
        except Exception:
            self.answer.put(PageMiss(MissReason.IO))
