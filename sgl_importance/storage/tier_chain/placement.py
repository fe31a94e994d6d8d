"""Which page of a chain lies in which tier, and which moves would pay. Decides; never moves anything.

A page is worth to a tier what it saves there: its predicted rate of reuse, times the seconds by which
fetching it from the tier is faster than from where it would be otherwise (``costs.fetch_seconds``). To bring
a page up, a full tier hands its cheapest page to its neighbour below, that one hands down its own, and so on
until there is room or the last tier gives one up. The page goes where what it saves exceeds by most what the
pages lose that make room; where nothing is gained, nothing moves.

Prefixes are closed at every level: a page never lies below one that continues it. So what the first k tiers
hold is a set of whole prefixes for every k, and a page may leave a tier only once nothing there continues it.

A page that was lost (damaged, or in a tier that failed) keeps its place among its neighbours, *absent*, as
long as others continue it: they are reached again when it has been computed and stored anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_importance.storage.tier_chain.ranking import Ranking
from sgl_importance.storage.tier_chain.tier_rooms import MoveBudget, TierRooms


class Move(NamedTuple):
    """One page changes its place, once its copy in the new one is known to be good.

    Attributes:
        source: tier that it leaves; None for a page that is in none.
        target: tier that it comes to; None for one that is given up.
    """

    page: int
    source: int | None
    target: int | None


class _Room(NamedTuple):
    """Steps that give a tier room for a page, and what they cost: seconds per unit of time from then on."""

    loss: float
    steps: list[Move]


@dataclass(slots=True)
class _PagePlace:
    """A page's place; ``children`` counts the pages that continue it by their tier.

    The level of a page that is absent is that of the first page which continues it.
    """

    level: int
    parent: int | None
    present: bool = False
    children: dict[int, int] = field(default_factory=dict)


class Placement:
    """The places of all pages, which are known by numbers and of one size.

    Args:
        rooms: of the tiers.
        seconds: as ``costs.fetch_seconds`` returns, one more than tiers.
        ranking: of the pages; told here what may leave a tier.
        page_bytes: of each page, for the budget.
        budget: of moves; None for no bound.
        on_forget: called for each page of which nothing is known any more.
    """

    def __init__(
        self,
        rooms: TierRooms,
        seconds: Sequence[float],
        ranking: Ranking,
        *,
        page_bytes: int = 1,
        budget: MoveBudget | None = None,
        on_forget: Callable[[int], None] = lambda page: None,
    ) -> None:
        assert len(seconds) == len(rooms.capacities) + 1
        self.rooms = rooms
        self._seconds = tuple(seconds)
        self._ranking = ranking
        self._page_bytes = page_bytes
        self._budget = budget or MoveBudget(len(rooms.capacities))
        self._on_forget = on_forget
        self._pages: dict[int, _PagePlace] = {}
        self._held: frozenset[int] = frozenset()
        self._kept: set[int] = set()
        """Pages that cannot leave for now: those that continue them lie in a tier that was stopped."""

    def __len__(self) -> int:
        """Number of pages in all tiers."""
        return sum(self.rooms.used)

    # ---- where pages are ----

    def level_of(self, page: int) -> int | None:
        """The tier that a page is in."""
        record = self._pages.get(page)
        return record.level if record is not None and record.present else None

    def __contains__(self, page: int) -> bool:
        """Whether the page has a place, be it as an absent one."""
        return page in self._pages

    def find(self, path: Sequence[int]) -> list[int]:
        """The tier of each page of the longest prefix of a path that is there."""
        found = []
        for page in path:
            level = self.level_of(page)
            if level is None:
                break
            found.append(level)
        return found

    def pages(self, level: int) -> list[int]:
        """The pages of a tier."""
        return [page for page, record in self._pages.items() if record.present and record.level == level]

    # ---- a request ----

    def hold(self, pages: Iterable[int]) -> None:
        """Nothing makes these pages leave their tiers until ``release``."""
        assert not self._held
        self._held = frozenset(pages)
        for page in self._held:
            if (level := self.level_of(page)) is not None:
                self._ranking.leave(level, page)

    def release(self) -> None:
        held, self._held = self._held, frozenset()
        for page in held:
            if page in self._pages:
                self._refresh(page)

    def reranked(self, page: int) -> None:
        """The ranking has learnt something of the page."""
        if page in self._pages:
            self._refresh(page)

    # ---- decisions ----

    def plan(self, page: int, *, parent: int | None, now: float = 0.0) -> list[Move]:
        """The steps that bring a page to where it saves most; none where it should stay where it is.

        In order, each leaves everything in a state that may last: pages that make room go first.

        Args:
            page: in a tier or in none; held.
            parent: the page in front of it, held too; None for the first of a sequence.
            now: seconds by the clock of the budget.
        """
        record = self._pages.get(page)
        source = self.level_of(page)
        start = source if source is not None else len(self.rooms.capacities)
        highest, lowest = 0, start - 1
        if parent is not None:
            above = self.level_of(parent)
            if above is None:
                return []  # nobody could reach it
            highest = above
        if start <= highest:
            return []
        if record is not None and not record.present:
            lowest = record.level  # pages continue it from there on
        best: list[Move] = []
        # Of two equal pages the new one stays: it was used last. One that is there would move for nothing.
        most = 0.0 if source is not None else -1e-30
        rate = self._ranking.rate(page)
        rooms: dict[int, _Room | None] = {start: _Room(0.0, [])}
        for target in self.rooms.usable:
            if not highest <= target <= lowest or self.rooms.is_stopped(target):
                continue
            room = self._room(target, rooms)
            if room is None:
                continue
            gain = rate * (self._seconds[start] - self._seconds[target]) - room.loss
            if gain > most:
                steps = [*room.steps, Move(page, source, target)]
                if self._affords(steps, now):
                    best, most = steps, gain
        return best

    def _room(self, level: int, rooms: dict[int, _Room | None]) -> _Room | None:
        """How a tier gets room for one page; None where there is no way.

        Args:
            rooms: what is known already, which is added to; the tier that the page leaves has room.
        """
        if level in rooms:
            return rooms[level]
        rooms[level] = None
        if self.rooms.has_room(level):
            rooms[level] = _Room(0.0, [])
            return rooms[level]
        below = self.rooms.below(level)
        where = len(self.rooms.capacities) if below is None else below
        victim = self._cheapest(level, where)
        if victim is not None:
            further = _Room(0.0, []) if below is None else self._room(below, rooms)
            if further is not None:
                loss = self._ranking.rate(victim) * (self._seconds[where] - self._seconds[level])
                step = Move(victim, level, below)
                rooms[level] = _Room(further.loss + loss, [*further.steps, step])
        return rooms[level]

    def _cheapest(self, level: int, target: int) -> int | None:
        """The page that leaves a tier first; none goes below pages that continue it, in a tier between."""
        while (page := self._ranking.cheapest(level)) is not None:
            if min(self._pages[page].children, default=target) >= target:
                return page
            self._ranking.leave(level, page)
            self._kept.add(page)
        return None

    def _affords(self, steps: Sequence[Move], now: float) -> bool:
        amounts: dict[int, int] = {}
        for _, source, target in steps:
            if source is not None and target is not None:
                amounts[target] = amounts.get(target, 0) + self._page_bytes
        return self._budget.affords(amounts, now)

    # ---- what was done ----

    def apply(self, step: Move, *, parent: int | None = None) -> None:
        """A step was made. ``parent`` is that of a page that is new in the chain."""
        page, source, target = step
        if source is None:
            assert target is not None
            record = self._pages.get(page)
            if record is None:
                record = self._pages[page] = _PagePlace(target, parent)
                self._count_child(record.parent, target, 1)
            assert not record.present
            if record.parent is None and parent is not None:  # it was found without, after a restart
                record.parent = parent
                self._count_child(parent, record.level, 1)
            record.present = True
            self.rooms.used[target] += 1
            self._place(page, target)
            return
        record = self._pages[page]
        assert record.present
        assert record.level == source
        self._ranking.leave(source, page)
        self.rooms.used[source] -= 1
        if target is None:
            assert not record.children, "pages that continue it would be lost with it"
            record.present = False
            self._refresh(page)
            return
        self._budget.spend(target, self._page_bytes)
        self.rooms.used[target] += 1
        self._place(page, target)

    def lose(self, page: int) -> None:
        """The page is in no tier any more, through a fault."""
        record = self._pages[page]
        assert record.present
        self._ranking.leave(record.level, page)
        self.rooms.used[record.level] -= 1
        record.present = False
        self._refresh(page)

    def close_tier(self, level: int) -> list[int]:
        """The tier failed: its pages are lost, and no other comes to it; returns them."""
        self.rooms.close(level)
        lost = self.pages(level)
        for page in lost:
            self.lose(page)
        return lost

    def open_tier(self, level: int) -> None:
        """The tier works again; ``restore`` says which pages are still in it."""
        self.widen(level)
        self.rooms.open(level)

    def widen(self, level: int) -> None:
        """The tier may have room for its capacity again."""
        self.rooms.widen(level)
        kept, self._kept = self._kept, set()
        for page in kept:
            if page in self._pages:
                self._refresh(page)

    def plan_room(self, level: int) -> list[Move]:
        """The steps by which a tier hands its cheapest page down; none where there is no way."""
        room = self._room(level, {})
        return [] if room is None else room.steps

    def restore(self, page: int, level: int, *, parent: int | None) -> bool:
        """A page was found in a tier, at start or when the tier came back; False where it cannot stay there.

        Told from the start of each sequence on: of a page whose parent is not known yet, the parent is taken
        to be absent.
        """
        record = self._pages.get(page)
        if not self.rooms.has_room(level) or (record is not None and record.present):
            return False
        if record is not None and record.children and level > min(record.children):
            return False
        ancestor = parent
        while ancestor is not None and ancestor in self._pages:
            above = self._pages[ancestor]
            if above.present:
                if above.level > level:
                    return False
                break
            ancestor = above.parent
        if parent is not None and parent not in self._pages:
            self._pages[parent] = _PagePlace(level, None)
        self.apply(Move(page, None, level), parent=parent)
        return True

    # ---- inside ----

    def _place(self, page: int, level: int) -> None:
        record = self._pages[page]
        self._set_level(record, level)
        self._refresh(page)
        if record.parent is not None:
            self._refresh(record.parent)

    def _set_level(self, record: _PagePlace, level: int) -> None:
        if record.level != level:
            self._count_child(record.parent, record.level, -1)
            record.level = level
            self._count_child(record.parent, level, 1)

    def _count_child(self, parent: int | None, level: int, change: int) -> None:
        if parent is None:
            return
        children = self._pages[parent].children
        left = children.get(level, 0) + change
        if left:
            children[level] = left
        else:
            del children[level]

    def _refresh(self, page: int) -> None:
        """The page may have become, or ceased to be, one that may leave its tier.

        What that means for absent pages in front of it is a loop: a sequence may be longer than the stack.
        """
        here: int | None = page
        while here is not None:
            record = self._pages[here]
            if record.present:
                if here in self._held or record.level in record.children:
                    self._ranking.leave(record.level, here)
                else:
                    self._ranking.enter(record.level, here)
                return
            if not record.children:
                del self._pages[here]
                self._ranking.forget(here)
                self._on_forget(here)
                self._count_child(record.parent, record.level, -1)
            elif record.level != min(record.children):
                self._set_level(record, min(record.children))
            else:
                return
            here = record.parent

    def check_integrity(self) -> None:
        """Asserts that no tier is over its capacity, prefixes are closed at every level, and counts agree."""
        used = [0] * len(self.rooms.capacities)
        children: dict[int, dict[int, int]] = {}
        for page, record in self._pages.items():
            if record.present:
                used[record.level] += 1
                assert self.rooms.is_open(record.level)
            if record.parent is not None:
                parent = self._pages[record.parent]
                assert parent.level <= record.level, f"page {page} lies above the one in front of it"
                counts = children.setdefault(record.parent, {})
                counts[record.level] = counts.get(record.level, 0) + 1
        assert used == self.rooms.used
        assert all(count <= most for count, most in zip(used, self.rooms.capacities, strict=True))
        for page, record in self._pages.items():
            assert record.children == children.get(page, {})
            assert record.present or record.children
        for level in range(len(self.rooms.capacities)):
            cheapest = self._ranking.cheapest(level)
            if cheapest is not None:
                record = self._pages[cheapest]
                assert record.present
                assert record.level == level
                assert level not in record.children
                assert cheapest not in self._held
