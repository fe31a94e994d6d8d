"""Shared contexts in a recording: prefixes that many queries have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance_lab.study.recording import Query


@dataclass(frozen=True, slots=True)
class SharedContext:
    """A prefix and the queries behind it, in order.

    Attributes:
        pages: of the prefix, root side first.
        kind: of most of its queries.
    """

    pages: tuple[int, ...]
    queries: tuple[Query, ...]
    kind: str


def shared_contexts(queries: Sequence[Query], *, min_queries: int, min_pages: int) -> list[SharedContext]:
    """The longest prefixes that at least ``min_queries`` queries share.

    A prefix of a longer one that is shared often enough itself is not listed again; its other queries, which
    leave the path earlier, are then not looked at.
    """
    count: Counter[int] = Counter()
    parent: dict[int, int] = {}
    depth: dict[int, int] = {}
    for query in queries:
        before = -1
        for position, page in enumerate(query.prompt_pages.tolist()):
            count[page] += 1
            parent[page] = before
            depth[page] = position + 1
            before = page
    often = {page for page, number in count.items() if number >= min_queries}
    ends = often - {parent[page] for page in often}
    behind: dict[int, list[Query]] = defaultdict(list)
    for query in queries:
        for page in reversed(query.prompt_pages.tolist()):
            if page in ends:
                behind[page].append(query)
                break
    contexts = []
    for end, group in sorted(behind.items()):
        if depth[end] >= min_pages:
            pages = tuple(group[0].prompt_pages[: depth[end]].tolist())
            kind = Counter(query.kind for query in group).most_common(1)[0][0]
            contexts.append(SharedContext(pages, tuple(group), kind))
    return contexts
