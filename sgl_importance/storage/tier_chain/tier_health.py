"""Which tiers of a chain work: one that fails several times in a row is left out until it works again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf

import numpy as np

from sgl_importance.storage.page_record import PageDamaged
from sgl_importance.storage.tier_chain.kinds.tier import NO_ROOM
from sgl_importance.storage.tier_chain.kinds.tier_record import check_record
from sgl_importance.storage.tier_chain.measure import probe_record
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.placement import Placement
from sgl_importance.storage.tier_chain.tier_counters import TierCounters

FAILURES_IN_A_ROW = 3
"""After which a tier is left out."""
PROBE_SECONDS = 10.0
"""Between two looks whether a tier that was left out works again."""


class TierHealth:
    """Counts failed accesses, and opens and closes the tiers of a placement.

    Args:
        members: of the chain, fastest first.
        placement: of its pages.
        counters: of its tiers.
        page_bytes: of each page.
        clock: seconds.
        on_return: called with the levels of tiers that work again.
    """

    def __init__(
        self,
        members: Sequence[ChainMember],
        placement: Placement,
        counters: TierCounters,
        *,
        page_bytes: int,
        clock: Callable[[], float],
        on_return: Callable[[Sequence[int]], None],
    ) -> None:
        self._members = tuple(members)
        self._placement = placement
        self._counters = counters
        self._page_bytes = page_bytes
        self._clock = clock
        self._on_return = on_return

    def failed(self, level: int, *, writing: bool = False) -> None:
        """An access failed; at the third read, or the third write, in a row the tier is left out.

        They are counted apart: a file system that became read-only answers every read.
        """
        member = self._members[level]
        if writing:
            member.failed_writes += 1
        else:
            member.failures += 1
        self._counters.add("failed_accesses", member.name)
        failures = max(member.failures, member.failed_writes)
        if failures >= FAILURES_IN_A_ROW:
            self._leave_out(level)

    def reading(self, level: int) -> AbstractContextManager[None]:
        """A read of the tier, which others look after while it lasts."""
        return self._members[level].reading(self._clock())

    def leave_out_hung(self) -> None:
        """Leaves out tiers in which a read hangs: a move into one would keep all others waiting."""
        for level, member in enumerate(self._members):
            if member.hangs(self._clock()):
                self._leave_out(level)

    def _leave_out(self, level: int) -> None:
        if self._placement.rooms.is_open(level):
            member = self._members[level]
            member.next_probe = self._clock() + PROBE_SECONDS
            self._counters.add("times_left_out", member.name)
            self._placement.close_tier(level)

    def took_no_more(self, level: int) -> None:
        """The medium is full before the capacity: until the next look, the tier is what it holds now."""
        member = self._members[level]
        member.next_growth = self._clock() + PROBE_SECONDS
        if member.tier.makes_room:
            self._placement.rooms.narrow(level)
        else:
            self._placement.rooms.stop(level)

    def probe(self) -> None:
        """Looks after tiers that were left out, or were full too early, each from time to time."""
        for level, member in enumerate(self._members):
            if self._clock() >= member.next_growth:
                member.next_growth = inf
                self._placement.widen(level)
            waits = self._clock() < member.next_probe or member.hangs(self._clock())
            if not self._placement.rooms.is_open(level) and not waits:
                member.next_probe = self._clock() + PROBE_SECONDS
                self._try_again(level)

    def _try_again(self, level: int) -> None:
        member = self._members[level]
        name, record = probe_record(0, self._page_bytes)
        back = np.empty_like(record)
        is_full = False
        try:
            try:
                member.tier.put(name, record)
                member.tier.get(name, back)
                check_record(back, name)
                member.tier.delete(name)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                is_full = True  # what it holds can be read all the same
            member.failures = member.failed_writes = 0
            self._placement.open_tier(level)
            self._on_return([level])
            if is_full:
                self.took_no_more(level)
            self._counters.add("times_come_back", member.name)
        except (OSError, PageDamaged):
            if self._placement.rooms.is_open(level):
                self._placement.close_tier(level)
