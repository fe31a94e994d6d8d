"""A chain of tiers as one place for pages: reads from wherever a page is, and moves it as the placement says.

Whatever changes a place is done by one thread at a time. Readers (``chain_reader``) ask for no lock.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, NamedTuple

from sgl_importance.storage.page_record import PageDamaged, PageMiss, page_digest
from sgl_importance.storage.pages import RUN_BYTES, RUN_PAGES, Lanes, Page
from sgl_importance.storage.tier_chain.chain_reader import LOOKS, ChainReader
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    FoundPage,
    PageName,
    by_sequence,
    make_record,
    record_bytes,
)
from sgl_importance.storage.tier_chain.measure import fetch_seconds
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.page_mover import PageMover, PageNumbers, Point
from sgl_importance.storage.tier_chain.placement import Move, Placement
from sgl_importance.storage.tier_chain.ranking import Ranking, ReuseRanking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_health import TierHealth
from sgl_importance.storage.tier_chain.tier_rooms import MoveBudget, TierRooms

PATIENCE_SECONDS = 10.0
"""For whoever changes places at the moment; he may hang in a disk."""
HOLD_SECONDS = 1.0
"""For which a promotion keeps others from changing places, or for as long as one page takes."""
GIVE_WAY_SECONDS = 0.001
"""Between two such times; a lock goes to whoever asks first, not to whoever waits."""
RECOMPUTE_SECONDS = 1e3
"""Of a page: dearer than to fetch it from any tier."""


class SequenceVisit(NamedTuple):
    """A request asked for these pages of a sequence: of which class they are since, and when that was."""

    keys: Sequence[str]
    reuse_class: int
    last_access: int


class TierChain:
    """Pages in several tiers; see ``storage.pages.StoredPages``.

    Args:
        members: fastest first.
        page_bytes: of each page.
        ranking: of the pages, which are numbered here.
        counters: of the tiers.
        move_bytes_per_second: most that moves may write into each tier.
        visits: what was learnt since the last call, for a ``ReuseRanking``.
        at: called at each ``Point`` of a move.
        clock: seconds.
    """

    touch_holds_seconds = 0.0  # it learns from each use

    def __init__(
        self,
        members: Sequence[ChainMember],
        *,
        page_bytes: int,
        ranking: Ranking,
        counters: TierCounters,
        move_bytes_per_second: float = inf,
        visits: Callable[[], Iterable[SequenceVisit]] = tuple,
        at: Callable[[Point], None] = lambda point: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = tuple(members)
        self.counters = counters
        self._page_bytes = page_bytes
        self._ranking = ranking
        self._visits = visits
        self._clock = clock
        self._numbers = PageNumbers()
        self._held: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._changing_since: float | None = None
        self._placement = Placement(
            TierRooms([member.pages for member in members]),
            fetch_seconds([member.cost for member in members], page_bytes, recompute=RECOMPUTE_SECONDS),
            ranking,
            page_bytes=page_bytes,
            budget=MoveBudget(len(members), move_bytes_per_second, page_bytes=page_bytes),
            on_forget=self._forget,
        )
        self._health = TierHealth(
            members, self._placement, counters, page_bytes=page_bytes, clock=clock, on_return=self._restore
        )
        self._mover = PageMover(
            members,
            self._placement,
            self._numbers,
            self._health,
            counters,
            page_bytes=page_bytes,
            at=at,
        )
        self._reader = ChainReader(
            members, self._level_of, counters, record_bytes=record_bytes(page_bytes), clock=clock
        )
        self._restore(range(len(members)))

    def close(self) -> None:
        for member in self.members:
            member.tier.close()

    # ---- reading ----

    def lanes(self, page_bytes: int) -> Lanes:
        return Lanes(look=1, read=4, write=1)

    def run_pages(self, page_bytes: int) -> int:
        return max(1, min(RUN_PAGES, RUN_BYTES // page_bytes))

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        return self._reader.count_present(identity, keys)

    def read_run(self, identity: bytes, keys: Sequence[str], stage: Callable[[], Page]) -> Iterator[Page]:
        return self._reader.read_run(identity, keys, stage)

    # ---- writing ----

    def write_run(
        self,
        identity: bytes,
        keys: Sequence[str],
        bodies: Sequence[Page],
        *,
        before: str | None,
        depth: int,
        moment: int,
    ) -> list[bool | Exception]:
        names = [PageName(identity, page_digest(key)) for key in keys]
        parent = None if before is None else PageName(identity, page_digest(before))
        outcomes: list[bool | Exception] = []
        with self._changing(identity, names if parent is None else [parent, *names]):
            for page in reversed(names):
                self._ranking.use(self._numbers.ensure(page))
            for index, (name, body) in enumerate(zip(names, bodies, strict=True)):
                try:
                    outcomes.append(self._store(name, body, parent, depth + index, moment))
                except (OSError, PageMiss) as error:
                    outcomes.append(error)
                parent = name
        return outcomes

    def _store(self, name: PageName, body: Page, parent: PageName | None, depth: int, moment: int) -> bool:
        """
        Raises:
            OSError: it could not be stored, or nothing makes room for it.
        """
        page = self._numbers.ensure(name)
        if self._placement.level_of(page) is not None:
            return False
        front = NO_PAGE if parent is None else parent.page
        record = make_record(name, body, parent=front, depth=depth, moment=moment)
        refusal = OSError(errno.EFBIG, "every page in the chain is worth as much")
        for _ in range(LOOKS):
            steps = self._plan(page, parent)
            if not steps:
                break
            target = steps[-1].target
            assert target is not None
            takers = self._placement.rooms.takers()
            try:
                for step in steps[:-1]:
                    self._mover.move(step)
                self._mover.put(target, name, record)
            except (PageDamaged, FileNotFoundError):
                continue  # a page that was to make room is gone: there is room in its place
            except OSError as error:
                if not self._hand_down() and self._placement.rooms.takers() == takers:
                    raise
                refusal = error
                continue  # a tier has less room than it was given, or takes nothing: planned without it
            self._placement.apply(steps[-1], parent=None if parent is None else self._numbers.ensure(parent))
            self.counters.add("stored_pages", self.members[target].name)
            return True
        raise refusal

    def _hand_down(self) -> bool:
        """Brings tiers that turned out to be smaller back under what they hold; whether there were any."""
        over = self._placement.rooms.over_limits()
        for level in over:
            with suppress(OSError, PageDamaged):  # until the next change
                for step in self._placement.plan_room(level):
                    self._mover.move(step)
        return bool(over)

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        """A sequence was used: its pages come up where that pays.

        Others may store in between: a slow tier takes longer to read a long prompt than anybody waits.
        """
        present = self.count_present(identity, keys)
        names = [PageName(identity, page_digest(key)) for key in keys[:present]]
        with self._changing(identity, names):
            for name in reversed(names):
                self._ranking.use(self._numbers.ensure(name))
            seen = self._bring_up(names, 0)
        while seen < len(names):
            time.sleep(GIVE_WAY_SECONDS)
            with self._changing(identity, names[seen - 1 :]):
                seen = self._bring_up(names, seen)

    def _bring_up(self, names: Sequence[PageName], seen: int) -> int:
        """Moves pages of a sequence up for ``HOLD_SECONDS``, one at least.

        Args:
            names: of the whole sequence.
            seen: pages of it that have been looked at before.

        Returns:
            Pages that have been looked at now: all of them where one is gone, behind which nobody looks.
        """
        end = time.monotonic() + HOLD_SECONDS
        for index in range(seen, len(names)):
            page = self._numbers.ensure(names[index])
            if self._placement.level_of(page) is None:
                break
            for step in self._plan(page, names[index - 1] if index else None):
                self._mover.move(step)
            if time.monotonic() >= end:
                return index + 1
        return len(names)

    def _plan(self, page: int, parent: PageName | None) -> list[Move]:
        front = None if parent is None else self._numbers.ensure(parent)
        return self._placement.plan(page, parent=front, now=self._clock())

    # ---- what was found ----

    def _settle(self) -> None:
        """Takes in what readers have found, and looks after tiers that were left out."""
        for level, name in self._reader.take_faults():
            if name is None:
                self._health.failed(level)
            elif (page := self._numbers.find(name)) is not None and self._placement.level_of(page) == level:
                with suppress(OSError):  # it may have been stored anew meanwhile
                    self.members[level].tier.delete(name)
                self._placement.lose(page)
        self._health.leave_out_hung()
        self._health.probe()
        self._hand_down()

    def _restore(self, levels: Iterable[int]) -> None:
        """Takes in what tiers hold, from the start of sequences on; what has no place there is deleted."""
        pages = by_sequence(
            FoundPage(level, each) for level in levels for each in self.members[level].tier.records()
        )
        for _, each in reversed(pages):
            if self._level_of(each.name) is None:
                self._ranking.use(self._numbers.ensure(each.name))
        refused: dict[PageName, int] = {}
        for level, each in pages:
            parent = front = None
            if each.parent != NO_PAGE:
                front = PageName(each.name.identity, each.parent)
                parent = self._numbers.ensure(front)
            page = self._numbers.ensure(each.name)
            # Above one that found no place, it would keep that one out for ever.
            is_cut_off = front in refused and level <= refused[front]
            if is_cut_off or not self._placement.restore(page, level, parent=parent):
                self.members[level].tier.delete(each.name)
                if self._placement.level_of(page) is None:
                    refused[each.name] = level
            for number in (page, parent):
                if number is not None and number not in self._placement:
                    self._forget(number)

    def _hear(self, identity: bytes) -> None:
        """Takes in what requests asked for; pages that are not in the chain are not remembered."""
        for visit in self._visits():
            for key in visit.keys:
                page = self._numbers.find(PageName(identity, page_digest(key)))
                if page is not None:
                    assert isinstance(self._ranking, ReuseRanking)
                    self._ranking.visited(page, visit.reuse_class, visit.last_access)
                    self._placement.reranked(page)

    # ---- names ----

    def _level_of(self, name: PageName) -> int | None:
        page = self._numbers.find(name)
        return None if page is None else self._placement.level_of(page)

    def _forget(self, page: int) -> None:
        if page in self._held:
            return  # it may get a place yet
        self._ranking.forget(page)
        self._numbers.forget(page)

    @contextmanager
    def _changing(self, identity: bytes, names: Sequence[PageName]) -> Iterator[None]:
        """Nobody else changes places, and these pages stay where they are or come to be.

        Raises:
            OSError: somebody else has been at it for too long.
        """
        since = self._changing_since  # of whom all are waiting for, together no longer than each alone
        left = inf if since is None else since + PATIENCE_SECONDS - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, min(PATIENCE_SECONDS, left))):
            raise OSError(errno.ETIMEDOUT, "a tier of the chain does not answer")
        try:
            self._changing_since = time.monotonic()
            self._settle()
            self._hear(identity)
            self._held = frozenset(map(self._numbers.ensure, names))
            self._placement.hold(self._held)
            try:
                yield
            finally:
                self._placement.release()
                held, self._held = self._held, frozenset()
                for page in held:
                    if page not in self._placement:
                        self._forget(page)
        finally:
            self._changing_since = None
            self._lock.release()

    # ---- what people see ----

    def describe(self, identity: bytes, facts: str) -> None:
        for member in self.members:
            member.tier.describe(identity, facts)

    def snapshot(self) -> list[dict[str, Any]]:
        """The state of each tier, as plain values; any thread may ask."""
        values = self.counters.values()
        size = record_bytes(self._page_bytes)
        return [
            {
                "name": member.name,
                "kind": member.kind,
                "state": "in use" if self._placement.rooms.is_open(level) else "left out",
                "pages": self._placement.rooms.used[level],
                "capacity_pages": member.pages,
                "bytes": self._placement.rooms.used[level] * size,
                "capacity_bytes": member.pages * size,
                "read_bytes_per_second": member.cost.bytes_per_second,
                "note": member.tier.note,
                **{name: amount for (name, tier), amount in values.items() if tier == member.name},
            }
            for level, member in enumerate(self.members)
        ]

    def check_integrity(self) -> None:
        """Asserts that the placement holds together, and that each tier has what it is said to hold."""
        self._placement.check_integrity()
        self._numbers.check_integrity()
        for page, name in self._numbers.items():
            assert page in self._placement
            level = self._placement.level_of(page)
            assert level is None or self.members[level].tier.contains(name)
