"""What ``get_importance`` costs: a look-up, its memory, and what following the tree adds to an insert.

Three caches take turns within one run: one whose tree nobody follows (look-ups are switched off), one that
nobody asks, and one that is asked after every insert.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results
from rich.progress import track
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.offline.standalone_cache import build_cache
from sglang_importance.tree.page_lookup import PageSource

PAGE = 16
PROMPT_TOKENS = 1024


class Unfollowed(PageSource):
    """The tree without look-ups."""

    def created(self, node: Any) -> None: ...

    def split(self, new_parent: Any, child: Any) -> None: ...

    def removed(self, node: Any) -> None: ...


class Subject:
    """One cache with ``prompts`` prompts in it, and a supply of new ones."""

    def __init__(self, prompts: int, *, followed: bool, asked: bool) -> None:
        self.cache = build_cache("importance", tokens=(prompts + 8) * PROMPT_TOKENS, page_size=PAGE)
        tree = self.cache.importance.state.tree
        if not followed:
            tree.source = Unfollowed(tree, tree.ghosts)
        self._asked = asked
        self._serial = 0
        for _ in range(prompts):
            self.insert()

    def insert(self) -> float:
        """Seconds to insert a new prompt and to make room for it; the look-up that hashes it included."""
        self._serial += 1
        tokens = array("q", range(self._serial * PROMPT_TOKENS, (self._serial + 1) * PROMPT_TOKENS))
        allocator = self.cache.token_to_kv_pool_allocator
        (last,) = chain_digests(root_digest(None, None), tokens, PAGE)[-1:]
        start = time.perf_counter()
        if allocator.available_size() < PROMPT_TOKENS:
            self.cache.evict(EvictParams(num_tokens=PROMPT_TOKENS))
        slots = allocator.alloc(PROMPT_TOKENS)
        self.cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots))
        if self._asked:
            assert self.cache.get_importance(last) is not None
        return time.perf_counter() - start

    def page_digests(self) -> Iterator[bytes]:
        tree = self.cache.importance.state.tree
        for node in tree.nodes():
            yield from tree.page_digests(node)


def inserts(prompts: int, rounds: int) -> list[dict[str, Any]]:
    subjects = {
        "not followed": Subject(prompts, followed=False, asked=False),
        "nobody asks": Subject(prompts, followed=True, asked=False),
        "asked after each insert": Subject(prompts, followed=True, asked=True),
    }
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in track(range(rounds), f"insert at {prompts} prompts"):
        for name, subject in subjects.items():
            times[name].append(subject.insert() * 1e6)
    gc.unfreeze()
    base = times["not followed"]
    return [
        {
            "prompts": prompts,
            "operation": f"evict and insert {PROMPT_TOKENS} tokens",
            "cache": name,
            "microseconds": statistics.median(values),
            "ratio": statistics.median(each / first for each, first in zip(values, base, strict=True)),
        }
        for name, values in times.items()
    ]


def look_ups(prompts: int) -> list[dict[str, Any]]:
    subject = Subject(prompts, followed=True, asked=False)
    source = subject.cache.importance.state.tree.source
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    while not source.catch_up():
        pass
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    keys = list(subject.page_digests())
    start = time.perf_counter()
    for key in keys:
        subject.cache.get_importance(key)
    known = (time.perf_counter() - start) / len(keys)
    start = time.perf_counter()
    for key in keys:
        subject.cache.get_importance(key[::-1])
    unknown = (time.perf_counter() - start) / len(keys)
    return [
        {"pages": len(keys), "quantity": "microseconds of a look-up, known page", "value": known * 1e6},
        {"pages": len(keys), "quantity": "microseconds of a look-up, unknown page", "value": unknown * 1e6},
        {"pages": len(keys), "quantity": "bytes per page", "value": (after - before) / len(keys)},
    ]


def slice_times(prompts: int) -> list[dict[str, Any]]:
    """The longest that one look-up holds the scheduler."""
    source = Subject(prompts, followed=True, asked=False).cache.importance.state.tree.source
    times = []
    gc.collect()
    while source._unhashed:
        start = time.perf_counter()
        source.catch_up()
        times.append((time.perf_counter() - start) * 1e6)
    pages = len(source.index)
    return [
        {"pages": pages, "quantity": "microseconds of a slice, median", "value": statistics.median(times)},
        {"pages": pages, "quantity": "microseconds of a slice, longest", "value": max(times)},
    ]


def main(
    prompts: Annotated[int, typer.Option(help=f"of {PROMPT_TOKENS} tokens in the tree")] = 1000,
    rounds: Annotated[int, typer.Option(help="alternations; the median is reported")] = 500,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    inserted = inserts(prompts, rounds)
    asked = look_ups(prompts) + slice_times(prompts)
    print_rows("Following the tree", inserted)
    print_rows("Asking", asked)
    print(write_results("get_importance", inserted + asked, out=out))


if __name__ == "__main__":
    typer.run(main)
