"""Moves pages between the tiers of a chain, so that a kill at any point leaves each in at least one.

A move copies, reads the copy back and checks it, and deletes the page from where it was. A page that is found
in two tiers is deleted from the slower one at the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import count

from sgl_importance.storage.page_record import PageDamaged
from sgl_importance.storage.tier_chain.kinds.tier import NO_ROOM, Scratch
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, PageName, check_record, record_bytes
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.placement import Move, Placement
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_health import TierHealth


class PageNumbers:
    """A number for each name; none is given twice."""

    def __init__(self) -> None:
        self._numbers: dict[PageName, int] = {}
        self._names: dict[int, PageName] = {}
        self._next = count()

    def find(self, name: PageName) -> int | None:
        """The number of a name, if it has one."""
        return self._numbers.get(name)

    def ensure(self, name: PageName) -> int:
        """The number of a name, which gets one if it has none."""
        page = self._numbers.get(name)
        if page is None:
            page = self._numbers[name] = next(self._next)
            self._names[page] = name
        return page

    def name_of(self, page: int) -> PageName:
        """
        Raises:
            KeyError: there is no such page.
        """
        return self._names[page]

    def forget(self, page: int) -> None:
        """The page has no number any more; again does nothing."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._numbers[name]

    def items(self) -> list[tuple[int, PageName]]:
        """Every number and its name."""
        return list(self._names.items())

    def check_integrity(self) -> None:
        """Asserts that names and numbers are each other's."""
        assert {page: name for name, page in self._numbers.items()} == self._names


class Point(StrEnum):
    """Points of a move at which a process may be killed, as tests do."""

    BEGUN = "begun"
    COPIED = "copied"
    CHECKED = "checked"
    PLACED = "placed"
    DELETED = "deleted"


class PageMover:
    """Carries out what the placement plans; one thread at a time.

    Args:
        members: of the chain, fastest first.
        placement: told of each move that was made.
        numbers: of the pages.
        health: told of each access that failed.
        counters: of the tiers.
        page_bytes: of each page.
        at: called at each ``Point`` of a move.
    """

    def __init__(
        self,
        members: Sequence[ChainMember],
        placement: Placement,
        numbers: PageNumbers,
        health: TierHealth,
        counters: TierCounters,
        *,
        page_bytes: int,
        at: Callable[[Point], None],
    ) -> None:
        self._members = tuple(members)
        self._placement = placement
        self._numbers = numbers
        self._health = health
        self._counters = counters
        self._at = at
        self._scratch = Scratch(record_bytes(page_bytes))
        self._copy = Scratch(record_bytes(page_bytes))

    def move(self, step: Move) -> None:
        """Brings a page from one tier to another, or gives it up.

        Raises:
            OSError, PageDamaged: it could not be; nothing has changed but what is known of the page.
        """
        assert step.source is not None
        name, source = self._numbers.name_of(step.page), self._members[step.source]
        self._at(Point.BEGUN)
        if step.target is not None:
            self._copy_checked(step.page, name, step.source, step.target)
        self._placement.apply(step)
        self._at(Point.PLACED)
        if step.target is None:
            self._counters.add("evicted_pages", source.name)
        else:
            promoted = step.target < step.source
            self._counters.add("promoted_pages" if promoted else "demoted_pages", source.name)
        try:
            source.tier.delete(name)
        except OSError:
            self._health.failed(step.source, writing=True)  # it is there twice until the next start
            if not self._placement.rooms.is_open(step.source):
                raise  # what else was planned may need the tier
        self._at(Point.DELETED)

    def _copy_checked(self, page: int, name: PageName, source: int, target: int) -> None:
        record, copy = self._scratch.record, self._copy.record
        try:
            with self._health.reading(source):
                self._members[source].tier.get(name, record)
        except FileNotFoundError:
            self._placement.lose(page)
            raise
        except OSError:
            self._health.failed(source)
            raise
        try:
            check_record(record, name)
        except PageDamaged as damaged:
            set_damaged_aside(self._members[source], name, damaged, self._counters)
            self._placement.lose(page)
            raise
        self._members[source].failures = 0
        self.put(target, name, record)
        self._at(Point.COPIED)
        try:
            with self._health.reading(target):
                self._members[target].tier.get(name, copy)
            check_record(copy, name)
        except PageDamaged as damaged:
            set_damaged_aside(self._members[target], name, damaged, self._counters)
            self._health.failed(target)
            raise
        except OSError:
            self._health.failed(target)
            self._members[target].tier.delete(name)
            raise
        self._members[target].failures = 0
        self._at(Point.CHECKED)

    def put(self, level: int, name: PageName, record: Bytes) -> None:
        """Writes a record into a tier.

        Raises:
            OSError: it could not be.
        """
        try:
            self._members[level].tier.put(name, record)
        except OSError as error:
            if error.errno in NO_ROOM:  # what it holds can still be read
                self._health.took_no_more(level)
            else:
                self._health.failed(level, writing=True)
            raise
        self._members[level].failed_writes = 0


def set_damaged_aside(
    member: ChainMember, name: PageName, damaged: PageDamaged, counters: TierCounters
) -> None:
    """Takes a damaged record out of what the tier serves; any thread may."""
    counters.add("damaged_pages", member.name)
    with suppress(OSError):  # where it stays, it is no page of the chain all the same
        member.tier.set_aside(name, damaged.reason)
