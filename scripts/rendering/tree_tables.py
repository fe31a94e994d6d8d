"""What the tree costs, from ``benchmark/results/tree.json``."""

from __future__ import annotations

from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_CACHES = {"rust-lru": "LRU, Rust core", "python-lru": "LRU, Python core", "observe": "observe"}
_CACHES |= {"importance": "importance"}
_OPERATIONS = {
    "evict_one": "evict one leaf",
    "match": "match 1,024 tokens",
    "match_long": "match 100,000 tokens",
    "insert_new": "insert one page",
    "insert_long": "insert 100,000 tokens",
    "request_new": "a request of one page, new",
    "request_hit": "the same, a hit",
    "next_victim": "find the victim after a request, leaves of many kinds",
    "fold": "fold scores of 1,024 tokens",
    "fold_long": "fold scores of 100,000 tokens",
    "snapshot": "snapshot, all slices",
    "snapshot_slice": "snapshot, longest slice",
    "tree_view_slice": "the live page's tree, longest slice",
}


def tree_table() -> str:
    """Microseconds of each operation by cache, with few leaves, more and many."""
    rows = results("tree")["rows"]
    found = {(row["operation"], row["leaves"], row["cache"]): row["microseconds"] for row in rows}
    counts = sorted({row["leaves"] for row in rows})

    def shown(operation: str, cache: str) -> str:
        times = [found.get((operation, leaves, cache)) for leaves in counts]
        return " / ".join(f"{each:,.0f}" for each in times if each is not None)

    lines = [
        [name, *(shown(operation, cache) for cache in _CACHES)] for operation, name in _OPERATIONS.items()
    ]
    return _table([" / ".join(f"{leaves:,}" for leaves in counts) + " leaves", *_CACHES.values()], lines)
