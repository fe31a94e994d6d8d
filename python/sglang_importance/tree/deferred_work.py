"""Work deferred until the answers of a forward pass are out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class DeferredWork:
    """Defers work until upstream has handed the answers of a forward pass to the detokenizer.

    That is the end of ``Scheduler.process_batch_result``. Slots and KV that a request gives back in it go to
    no other request before it ends, so the work can still read them. Work that comes outside of it (of a
    retraction, which makes room for another request) is done at once.
    """

    def __init__(self) -> None:
        self._is_processing = False
        self._work: list[Callable[[], None]] = []
        self.installed: Callable[..., None] | None = None
        """The function that stands in for upstream's method."""

    def do(self, work: Callable[[], None]) -> None:
        """Does the work now, or after the answers of the pass whose results are being processed."""
        if self._is_processing:
            self._work.append(work)
        else:
            work()

    def around(self, process_batch_result: Callable[..., None]) -> Callable[..., None]:
        """Upstream's method, followed by the work that was deferred meanwhile, in order."""

        @wraps(process_batch_result)
        def process(*args: Any, **kwargs: Any) -> None:
            self._is_processing = True
            try:
                process_batch_result(*args, **kwargs)
            finally:
                self._is_processing = False
            while self._work:
                self._work.pop(0)()

        self.installed = process
        return process
