"""Pages that tiers hold at a start, or when one came back, in the order in which they are taken in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sgl_importance.storage.tier_chain.kinds.tier_record import NO_PAGE, Listed, PageName


class FoundPage(NamedTuple):
    """What a tier lists, and the level of that tier."""

    level: int
    listed: Listed


def by_sequence(found: Iterable[FoundPage]) -> list[FoundPage]:
    """Sequences that were stored last come first, each from its start on.

    A page counts as stored when the last page was that continues it: where not all find room, what is left is
    whole prefixes, and a prefix that many share is not the first to go because it is old. Of a page that is
    in two tiers, the one in the faster tier comes first.
    """
    pages = sorted(found, key=lambda page: -page.listed.depth)
    last: dict[PageName, int] = {}
    for _, listed in pages:
        moment = last[listed.name] = max(last.get(listed.name, 0), listed.moment)
        if listed.parent != NO_PAGE:
            parent = PageName(listed.name.identity, listed.parent)
            last[parent] = max(last.get(parent, 0), moment)
    return sorted(pages, key=lambda page: (-last[page.listed.name], page.listed.depth, page.level))
