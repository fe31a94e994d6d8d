"""Which sequences were marked as used a moment ago, so that they need not be marked again."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST_SEQUENCES = 4096


class RecentUses:
    """Sequences by their last pages; a key of a page stands for all pages in front of it, too.

    Moments are of the wall clock, as the dates of files are: after a jump of it, nothing counts as recent.
    Any thread may call.

    Args:
        seconds: for which a sequence that was marked counts as marked.
    """

    def __init__(self, seconds: float) -> None:
        self._holds_ns = int(seconds * 1e9)
        self._moments: OrderedDict[tuple[bytes, str], int] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, identity: bytes, last: str, now: int) -> int | None:
        """The moment, in ns, as of which the sequence up to ``last`` is marked; None where not recently."""
        with self._lock:
            moment = self._moments.get((identity, last))
        return moment if moment is not None and 0 <= now - moment < self._holds_ns else None

    def add(self, identity: bytes, last: str, moment: int) -> None:
        """The sequence up to ``last`` is marked as used at ``moment`` (ns)."""
        with self._lock:
            self._moments[identity, last] = moment
            self._moments.move_to_end((identity, last))
            if len(self._moments) > MOST_SEQUENCES:
                self._moments.popitem(last=False)
