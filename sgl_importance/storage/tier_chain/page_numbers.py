"""The pages of a chain by name, as the small numbers by which placement and ranking know them."""

from __future__ import annotations

from itertools import count

from sgl_importance.storage.tier_chain.kinds.tier_record import PageName


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
