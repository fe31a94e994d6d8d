"""What the tree costs without a server, beside stock on both tree cores, by its number of leaves.

Evict one leaf, match, insert, a request that is new and one that is a hit, prompts of 100,000 tokens, a fold
and a snapshot. Every leaf is a page of 16 tokens. Times are the thread's own on the processor, and the caches
take turns within one run: a busy machine is busy for all of them.

    python benchmark/tree.py
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer
from results import print_rows, write_results
from rich.progress import track
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.policy.victim_order import VictimOrder
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.signal.fold import Observation, fold
from sgl_importance_lab.offline.standalone_cache import CacheKind, build_cache
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Job, run_slice
from sglang_importance.operations.snapshot import snapshot
from sglang_importance.operations.tree_view import tree_view

sys.path.append(str(Path(__file__).parents[1] / "test"))

from support.drivers.tree_driver import ScriptedRows, TreeDriver

PAGE = LEAF_TOKENS = 16
PROMPT_TOKENS = 1024
LONG_TOKENS = 100_000
LONG_ROUNDS = 3
SNAPSHOT_ROUNDS = 3
OURS = ("observe", "importance")
KINDS = ("rust-lru", "python-lru", *OURS)


def leaf_key(serial: int, tokens: int = LEAF_TOKENS) -> RadixKey:
    return RadixKey(array("q", [serial] * tokens), None)


def insert(cache: UnifiedRadixCache, key: RadixKey) -> float:
    """Inserts a key with slots of its own; microseconds without those of getting the slots."""
    slots = cache.token_to_kv_pool_allocator.alloc(len(key))
    return microseconds(lambda: cache.insert(InsertParams(key=key, value=slots)))


def microseconds(action: Callable[[], Any]) -> float:
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e6


class Requests(TreeDriver):
    """Requests on a cache that is there already, of either tree core."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self.cache, self.core, self.page_size = cache, cache.tree_core, PAGE
        self.rows = ScriptedRows()
        self._serial = 0
        self._free_slots = [1, 2]
        self.loaded_back = 0

    def served(self, tokens: list[int]) -> None:
        request = self.admit(tokens)
        self.prefill(request)
        self.finish(request)


class Subject:
    """One cache of so many leaves and no room for another, with a supply of keys that it has not seen."""

    def __init__(self, kind: CacheKind, leaves: int) -> None:
        prompts = PROMPT_TOKENS + (2 * LONG_ROUNDS + 1) * LONG_TOKENS
        self.cache = build_cache(
            kind, tokens=leaves * LEAF_TOKENS + prompts, page_size=PAGE, max_context=2 * PROMPT_TOKENS
        )
        self.requests = Requests(self.cache)
        self._random = random.Random(0)
        self._serial = 0
        for _ in range(leaves):
            if kind in OURS:  # each came with a request of its own
                self._component.state.policy.admit()
            insert(self.cache, self._fresh_key())
        self._prompt, self._long = leaf_key(-1, PROMPT_TOKENS), leaf_key(-2, LONG_TOKENS)
        self.long_inserts = [insert(self.cache, self._long)]
        self.long_inserts += [
            insert(self.cache, self._fresh_key(LONG_TOKENS)) for _ in range(2 * LONG_ROUNDS)
        ]
        insert(self.cache, self._prompt)
        assert not self.cache.token_to_kv_pool_allocator.available_size()

    def _fresh_key(self, tokens: int = LEAF_TOKENS) -> RadixKey:
        self._serial += 1
        return leaf_key(self._serial, tokens)

    def _kept(self, key: RadixKey) -> float:
        """Inserts a key and locks it, so that leaves alone are evicted."""
        took = insert(self.cache, key)
        self.cache.inc_lock_ref(self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node)
        return took

    def _evict(self, tokens: int) -> float:
        return microseconds(lambda: self.cache.evict(EvictParams(num_tokens=tokens)))

    def evict_one(self) -> float:
        took = self._evict(1)
        insert(self.cache, self._fresh_key())  # keeps the number of leaves
        return took

    def match(self) -> float:
        return microseconds(lambda: self.cache.match_prefix(MatchPrefixParams(key=self._prompt)))

    def match_long(self) -> float:
        return microseconds(lambda: self.cache.match_prefix(MatchPrefixParams(key=self._long)))

    def insert_new(self) -> float:
        self._evict(LEAF_TOKENS)
        return insert(self.cache, self._fresh_key())

    def insert_long(self) -> float:
        """While the cache was filled: later it would push out the leaves."""
        return self.long_inserts.pop()

    def request_new(self) -> float:
        """A request of one page that is not in the full cache: match, lock, evict, insert, unlock."""
        self._serial += 1
        return microseconds(lambda: self.requests.served([self._serial] * PAGE))

    def request_hit(self) -> float:
        """One whose page is: of the half of the leaves that came last."""
        serial = self._random.randrange(self._serial // 2, self._serial)
        return microseconds(lambda: self.requests.served([serial] * PAGE + [0]))

    # ---- ours ----

    @property
    def _component(self) -> ImportanceComponent:
        return cast(ImportanceRadixCache, self.cache).importance

    def _fold(self, key: RadixKey) -> float:
        state = self._component.state
        end = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        body = np.random.default_rng(0).random(len(key) // PAGE).astype(np.float32)

        def learn() -> None:
            path = state.tree.path_to(end)
            observation = Observation.from_sums(body, body)
            assert observation is not None
            nodes = [state.tree.metadata(node).importance for node in path]
            fold(nodes, observation, query=1, weight=0.5, first=True, half_life_queries=50.0)
            for node in path:
                self._component.body_mass.update(node)
                self._component.leaves.refresh(node)

        return microseconds(learn)

    def fold(self) -> float:
        return self._fold(self._prompt)

    def fold_long(self) -> float:
        return self._fold(self._long)

    @staticmethod
    def _slices(job: Job) -> list[float]:
        slices: list[float] = []
        is_done = False
        while not is_done:
            start = time.thread_time()
            is_done = run_slice(job) is not None
            slices.append((time.thread_time() - start) * 1e6)
        return slices

    def snapshot(self) -> float:
        return sum(self._slices(snapshot(cast(ImportanceRadixCache, self.cache))))

    def snapshot_slice(self) -> float:
        """The longest that a snapshot holds the scheduler."""
        return max(self._slices(snapshot(cast(ImportanceRadixCache, self.cache))))

    def tree_view_slice(self) -> float:
        """The longest that the live page's question holds the scheduler."""
        cache = cast(ImportanceRadixCache, self.cache)
        return max(self._slices(tree_view(cache, root=None, depth=64, min_tokens=0, limit=200)))


def next_victim(leaves: int, rounds: int) -> list[float]:
    """Finds the victim after one more request, among leaves of sixteen classes and 41 values.

    The caches above hold leaves that are all alike; with several kinds of traffic, pins and g they are not.
    """
    draw = random.Random(0)
    reuse = ReuseEstimator()
    order = VictimOrder(reuse)
    for leaf in range(leaves):
        reuse.tick()
        (reuse_class,) = draw.choices(range(16), [0.5**each for each in range(16)])
        order.add(leaf, reuse_class, 2 ** draw.uniform(0, 10), reuse.clock)
    order.peek()
    times = []
    for _ in range(rounds):
        reuse.tick()
        times.append(microseconds(order.peek))
    return times


OPERATIONS = ("evict_one", "match", "insert_new", "request_new", "request_hit")
LONG_OPERATIONS = ("insert_long", "match_long")
OUR_OPERATIONS = ("fold", "fold_long")
SNAPSHOTS = ("snapshot", "snapshot_slice", "tree_view_slice")


def measure(kinds: list[CacheKind], leaves: int, rounds: int) -> list[dict[str, Any]]:
    """Median microseconds of each operation on each cache, which take turns."""
    subjects = {kind: Subject(kind, leaves) for kind in track(kinds, f"caches of {leaves} leaves")}
    gc.collect()
    gc.freeze()  # the collector walks the whole tree: not what is measured
    rows = []
    for names, repeats in (
        (LONG_OPERATIONS, LONG_ROUNDS),
        (OUR_OPERATIONS, LONG_ROUNDS),
        (SNAPSHOTS, SNAPSHOT_ROUNDS),
        (OPERATIONS, rounds),
    ):
        for operation in names:
            times: dict[str, list[float]] = {
                kind: [] for kind in subjects if kind in OURS or names in (LONG_OPERATIONS, OPERATIONS)
            }
            for _ in track(range(repeats), f"{operation} at {leaves} leaves"):
                for kind in times:
                    act = getattr(subjects[cast(CacheKind, kind)], operation)
                    act()  # the other caches took this one's memory out of the processor's
                    times[kind].append(act())
            rows += [row(leaves, operation, kind, times) for kind in times]
    gc.unfreeze()
    victims = {"importance": next_victim(leaves, 4 * rounds)}
    return [*rows, row(leaves, "next_victim", "importance", victims)]


def row(leaves: int, operation: str, kind: str, times: dict[str, list[float]]) -> dict[str, Any]:
    median = statistics.median(times[kind])
    rust = times.get("rust-lru")
    return {
        "leaves": leaves,
        "operation": operation,
        "cache": kind,
        "microseconds": median,
        "worst_microseconds": max(times[kind]),
        "ratio_to_rust_lru": None if rust is None else median / statistics.median(rust),
    }


def main(
    leaves: Annotated[list[int] | None, typer.Option(help="leaves in the tree; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(help="alternations; the median is reported")] = 60,
    cache: Annotated[list[str] | None, typer.Option(help="kind of cache; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    kinds = cast("list[CacheKind]", cache or list(KINDS))
    if unknown := set(kinds) - set(get_args(CacheKind)):
        raise typer.BadParameter(f"no such cache: {', '.join(sorted(unknown))}")
    rows = [row for count in leaves or [1_000, 10_000, 100_000] for row in measure(kinds, count, rounds)]
    print_rows("Radix tree operations", rows)
    print(write_results("tree", rows, out=out))


if __name__ == "__main__":
    typer.run(main)
