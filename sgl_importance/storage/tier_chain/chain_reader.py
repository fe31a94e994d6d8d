"""Reads pages of a chain from wherever they lie. Any thread may, and none asks for a lock: a page that was
moved while it was looked for is looked for again."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence

from sgl_importance.storage.page_record import MissReason, PageDamaged, PageMiss, page_digest
from sgl_importance.storage.pages import Page
from sgl_importance.storage.tier_chain.kinds.tier import Scratch
from sgl_importance.storage.tier_chain.kinds.tier_record import PageName, check_record
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.page_mover import set_damaged_aside
from sgl_importance.storage.tier_chain.tier_counters import TierCounters

LOOKS = 3
"""For a page that others move meanwhile, and for a way to make room."""

Fault = tuple[int, PageName | None]
"""A tier and the page that was not there, or was damaged; None where the tier itself failed."""


class ChainReader:
    """
    Args:
        members: of the chain, fastest first.
        level_of: the tier that a page is said to be in; None for none.
        counters: of the tiers.
        record_bytes: of a page with its head.
        clock: seconds.
    """

    def __init__(
        self,
        members: Sequence[ChainMember],
        level_of: Callable[[PageName], int | None],
        counters: TierCounters,
        *,
        record_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._members = members
        self._level_of = level_of
        self._counters = counters
        self._clock = clock
        self._scratch = Scratch(record_bytes)
        self._faults: queue.SimpleQueue[Fault] = queue.SimpleQueue()

    def take_faults(self) -> Iterator[Fault]:
        """What was found since the last call, by any thread."""
        while not self._faults.empty():
            yield self._faults.get_nowait()

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        """How many pages of a sequence are there, from its first on; none in a tier that hangs."""
        now = self._clock()
        hung = {level for level, member in enumerate(self._members) if member.hangs(now)}
        for present, key in enumerate(keys):
            level = self._level_of(PageName(identity, page_digest(key)))
            if level is None or level in hung:
                return present
        return len(keys)

    def read_run(self, identity: bytes, keys: Sequence[str], stage: Callable[[], Page]) -> Iterator[Page]:
        """As ``storage.pages.StoredPages``.

        Raises:
            PageMiss: a page is in no tier, or its tier hangs or failed.
            PageDamaged: it is not what was written.
        """
        for key in keys:
            body = stage()
            self._read(PageName(identity, page_digest(key)), body)
            yield body

    def _read(self, name: PageName, body: Page) -> None:
        record = self._scratch.record
        for _ in range(LOOKS):
            level = self._level_of(name)
            if level is None:
                break
            member = self._members[level]
            now = self._clock()
            if member.hangs(now):
                raise PageMiss(MissReason.TIMEOUT)
            try:
                with member.reading(now):
                    member.tier.get(name, record)
            except FileNotFoundError:
                if self._level_of(name) == level:
                    self._faults.put((level, name))
                    break
                continue
            except OSError as error:
                self._faults.put((level, None))
                raise PageMiss(MissReason.IO) from error
            try:
                body[:] = check_record(record, name)
            except PageDamaged as damaged:
                set_damaged_aside(member, name, damaged, self._counters)
                self._faults.put((level, name))
                raise
            member.failures = 0
            self._counters.add("hit_pages", member.name)
            return
        raise PageMiss(MissReason.ABSENT)
