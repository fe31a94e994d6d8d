"""What the tree costs without a server: evict one leaf, match, insert, beside stock on both tree cores.

The four caches take turns within one run, so that a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from results import print_rows, write_results
from rich.progress import track
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_importance.offline.standalone_cache import CacheKind, build_cache

LEAF_TOKENS = 16
PROMPT_TOKENS = 1024
OPERATIONS = ("evict_one", "match", "insert_new")


def leaf_key(serial: int, tokens: int = LEAF_TOKENS) -> RadixKey:
    return RadixKey(array("q", [serial] * tokens), None)


def insert(cache: UnifiedRadixCache, key: RadixKey) -> None:
    slots = cache.token_to_kv_pool_allocator.alloc(len(key))
    cache.insert(InsertParams(key=key, value=slots))


def microseconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e6


class Subject:
    """One cache, filled, with a supply of keys that it has not seen."""

    def __init__(self, kind: CacheKind, leaves: int) -> None:
        self.cache = build_cache(kind, tokens=(leaves + 256) * LEAF_TOKENS + 64 * PROMPT_TOKENS, page_size=16)
        self.serial = 0
        for _ in range(leaves):
            insert(self.cache, self.fresh_key())
        self.prompt = leaf_key(-1, PROMPT_TOKENS)
        insert(self.cache, self.prompt)

    def fresh_key(self, tokens: int = LEAF_TOKENS) -> RadixKey:
        self.serial += 1
        return leaf_key(self.serial, tokens)

    def evict_one(self) -> float:
        took = microseconds(lambda: self.cache.evict(EvictParams(num_tokens=1)))
        insert(self.cache, self.fresh_key())  # keeps the number of leaves
        return took

    def match(self) -> float:
        return microseconds(lambda: self.cache.match_prefix(MatchPrefixParams(key=self.prompt)))

    def insert_new(self) -> float:
        key = self.fresh_key(PROMPT_TOKENS)
        slots = self.cache.token_to_kv_pool_allocator.alloc(PROMPT_TOKENS)
        took = microseconds(lambda: self.cache.insert(InsertParams(key=key, value=slots)))
        self.cache.match_prefix(MatchPrefixParams(key=self.prompt))
        self.cache.evict(EvictParams(num_tokens=PROMPT_TOKENS))
        while self.cache.token_to_kv_pool_allocator.available_size() < 2 * PROMPT_TOKENS:
            self.cache.evict(EvictParams(num_tokens=PROMPT_TOKENS))
        return took


def measure(leaves: int, rounds: int, operations: tuple[str, ...] = OPERATIONS) -> list[dict[str, Any]]:
    """Median microseconds of each operation on each cache, which take turns."""
    subjects = {kind: Subject(kind, leaves) for kind in get_args(CacheKind)}
    gc.collect()
    gc.freeze()  # the collector walks the whole tree: not what is measured
    rows = []
    for operation in operations:
        times: dict[str, list[float]] = {kind: [] for kind in subjects}
        for _ in track(range(rounds), f"{operation} at {leaves} leaves"):
            for kind, subject in subjects.items():
                getattr(
                    subject, operation
                )()  # the other caches took this one's memory out of the processor's
                times[kind].append(getattr(subject, operation)())
        rust = statistics.median(times["rust-lru"])
        rows += [
            {
                "leaves": leaves,
                "operation": operation,
                "cache": kind,
                "microseconds": statistics.median(values),
                "ratio_to_rust_lru": statistics.median(values) / rust,
            }
            for kind, values in times.items()
        ]
    gc.unfreeze()
    return rows


def main(
    leaves: Annotated[list[int] | None, typer.Option(help="leaves in the tree; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(help="alternations; the median is reported")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    rows = [row for count in leaves or [1_000, 10_000] for row in measure(count, rounds)]
    print_rows("Radix tree operations", rows)
    print(write_results("tree", rows, out=out))


if __name__ == "__main__":
    typer.run(main)
