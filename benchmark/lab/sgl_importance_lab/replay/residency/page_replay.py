"""One recording of page lists through one policy of residency: what would have been loaded.

Slots are given as in the server (``sgl_importance_kernels.sparse.slot_table``), driven as its attention
drives them: a prompt reads all pages before it, a generated token those that it wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from sgl_importance.errors import ImportanceError
from sgl_importance.sparse.device_plan import TILE_TOKENS
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.residency.fewest_loads import Read, fewest_loads
from sgl_importance_lab.replay.residency.page_steps import (
    Floats,
    Numbers,
    PageRecording,
    PageStep,
    RequestEnd,
)

if TYPE_CHECKING:
    from sgl_importance_lab.replay.residency.residency_replay import ResidencyReplay

INDEPENDENT_POLICIES = ("lru", "ema", "importance", "lfu")
"""The server's, and what learns from choices."""

PAGE_POLICIES = (*INDEPENDENT_POLICIES, "random", OPTIMUM)
"""All that is replayed."""


class PageReplayError(ImportanceError, ValueError):
    """The recording cannot be replayed so; the message names the cure."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pages a generated token reads.

    Attributes:
        share: of the pages of its context, those of largest attention mass, apart for each layer and KV head.
            0: what the server's selector chose, alike for the heads of a layer.
        bias: a resident page's mass counts (1 + this)-fold, which no server does any more.
    """

    share: float = 0.1
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class PageCounts:
    """What generated tokens read, of each request; arrays are [requests] where nothing else is said.

    Attributes:
        read: pages, counted once for each layer and head that reads them.
        loaded: those that were not on the device.
        streamed: loads of tokens that read all of a context, as those of a prompt do; 0 from the optimum.
        mass: attention mass on them, summed; of all pages it would be ``heads``. 0 where a selector chose.
        heads: tokens x layers x KV heads.
        loaded_by_event: those of ``loaded`` that an event of the recording, a token, read; -1 where it chose
            none. [events]
    """

    read: Numbers
    loaded: Numbers
    streamed: Numbers
    mass: Floats
    heads: Numbers
    loaded_by_event: Numbers


@dataclass(frozen=True, slots=True)
class _Access:
    """Pages that one layer, or one head of it, reads for one token.

    Attributes:
        table: of slots.
        pages: their numbers.
        shares: of attention that they are wanted for; None where all of a context is read.
        open_page: the page that the request fills; -1 where it fills none.
    """

    table: int
    pages: Numbers
    shares: Floats | None
    open_page: int = -1


def num_tables(step: PageStep, selection: Selection) -> int:
    """Caches of page slots: one for each layer, and each KV head where heads want pages of their own."""
    layers, kv_heads, _ = step.wanted.shape
    return int(layers * kv_heads if selection.share else layers)


def longest_context(recording: PageRecording) -> int:
    """Pages of the longest sequence."""
    return max(-(-step.seq_len // recording.page_size) for step in recording.steps)


def check_selection(recording: PageRecording, selection: Selection) -> None:
    """
    Raises:
        PageReplayError: the recording does not say what would be read.
    """
    answers = [step for step in recording.steps if step.is_generated]
    if not answers:
        raise PageReplayError(f"{recording.name}: no token was generated: record while clients ask")
    if not selection.share:
        if all(each is None for step in answers for each in step.read):
            raise PageReplayError(
                f"{recording.name}: no selector chose pages while it was recorded: leave out --chosen"
            )
        return
    for step in answers:
        pages = -(-step.seq_len // recording.page_size)
        if _count(selection.share, pages) > step.wanted.shape[-1]:
            listed = step.wanted.shape[-1] / pages
            raise PageReplayError(
                f"{recording.name}: its lists hold {listed:.0%} of the pages: select at most that, or record "
                f"with trace.pages = {selection.share:g} of --kv-importance-config"
            )


def run_policy(recording: PageRecording, policy: str, num_slots: int, selection: Selection) -> PageCounts:
    """Replays all requests in their order, over slots that are empty at first.

    Args:
        recording: as ``check_selection`` lets pass.
        policy: one of ``PAGE_POLICIES``; the optimum knows no bias.
        num_slots: pages that each layer, or head, keeps.
        selection: what is read.
    """
    assert policy in PAGE_POLICIES, policy
    if policy == OPTIMUM:
        assert not selection.bias
        return _run_optimum(recording, num_slots, selection)
    from sgl_importance_lab.replay.residency.residency_replay import ResidencyReplay  # imports torch

    replay = ResidencyReplay(
        policy,
        num_layers=num_tables(recording.steps[0], selection),
        num_pages=recording.num_pages,
        num_slots=num_slots,
        staging_pages=-(-TILE_TOKENS // recording.page_size),
    )
    counts = _no_counts(recording)
    last_pass = -1
    for index, event in enumerate(recording.events):
        if isinstance(event, RequestEnd):
            replay.forget(_freed(recording, event.request, selection))
            continue
        if event.forward_pass != last_pass:
            replay.begin_pass()
            last_pass = event.forward_pass
        for access in _accesses(recording, event, selection, replay):
            if access.shares is None and event.new_tokens > 1:
                counts.streamed[event.request] += replay.stream(access.table, access.pages)
                continue
            loaded = replay.read(access.table, access.pages, access.shares, open_page=access.open_page)
            if access.shares is None:
                counts.streamed[event.request] += loaded
            else:
                _count_read(counts, index, event, access, loaded, selection)
    replay.check_integrity()
    return counts


def _run_optimum(recording: PageRecording, num_slots: int, selection: Selection) -> PageCounts:
    reads: list[list[Read]] = [[] for _ in range(num_tables(recording.steps[0], selection))]
    of_read: list[list[tuple[int, PageStep, _Access]]] = [[] for _ in reads]
    for index, event in enumerate(recording.events):
        if isinstance(event, RequestEnd):
            continue
        for access in _accesses(recording, event, selection, None):
            pages = access.pages[access.pages != access.open_page]
            reads[access.table].append((pages, access.shares is not None))
            of_read[access.table].append((index, event, access))
    counts = _no_counts(recording)
    for table, of_table in enumerate(reads):
        loads = fewest_loads(of_table, recording.num_pages, num_slots)
        for (index, step, access), loaded in zip(of_read[table], loads, strict=True):
            if access.shares is not None:
                _count_read(counts, index, step, access, loaded, selection)
    return counts


def _accesses(
    recording: PageRecording, step: PageStep, selection: Selection, replay: ResidencyReplay | None
) -> Iterator[_Access]:
    """What a step reads, layer by layer; with a bias it depends on what is resident before each of them.

    Where a selector chose, the step behind an answer reads, too, as it did in the server. What it would want
    is left out: nobody asked for it.
    """
    if step.is_behind and selection.share:
        return
    size = recording.page_size
    pages = recording.requests[step.request].pages
    context = pages[: -(-step.seq_len // size)]
    open_page = int(context[-1])
    tables = num_tables(step, selection)
    if step.new_tokens > 1:
        before = pages[: (step.seq_len - step.new_tokens) // size]
        yield from (_Access(table, before, None) for table in range(tables))
    elif not selection.share:
        for layer, chosen in enumerate(step.read):
            if chosen is None:
                yield _Access(layer, context, None, open_page)
            else:
                yield _Access(layer, context[chosen[0]], chosen[1], open_page)
    elif not step.is_generated:
        yield from (_Access(table, context, None, open_page) for table in range(tables))
    else:
        count = _count(selection.share, len(context))
        layers, kv_heads, _ = step.wanted.shape
        for table, (layer, head) in enumerate(product(range(layers), range(kv_heads))):
            wanted, mass = context[step.wanted[layer, head]], step.mass[layer, head]
            best = np.arange(count)
            if selection.bias:
                assert replay is not None
                resident = replay.is_resident(table, wanted) | (wanted == open_page)
                best = np.argsort(-mass * (1 + selection.bias * resident), kind="stable")[:count]
            yield _Access(table, wanted[best], mass[best], open_page)


def _count(share: float, pages: int) -> int:
    return max(1, math.floor(share * pages))


def _freed(recording: PageRecording, request: int, selection: Selection) -> Numbers:
    """Pages of a request that no tree keeps: its last ones, and all of an answer from chosen pages."""
    ended = recording.requests[request]
    kept = ended.whole_pages if selection.share else ended.input_tokens // recording.page_size
    return ended.pages[kept:]


def _no_counts(recording: PageRecording) -> PageCounts:
    size = len(recording.requests)
    read, loaded, streamed, heads = (np.zeros(size, np.int64) for _ in range(4))
    by_event = np.full(len(recording.events), -1, np.int64)
    return PageCounts(read, loaded, streamed, np.zeros(size, np.float32), heads, by_event)


def _count_read(
    counts: PageCounts, event: int, step: PageStep, access: _Access, loaded: int, selection: Selection
) -> None:
    assert access.shares is not None
    counts.loaded_by_event[event] = max(counts.loaded_by_event[event], 0) + loaded
    counts.read[step.request] += len(access.pages)
    counts.loaded[step.request] += loaded
    counts.heads[step.request] += 1
    if selection.share:
        counts.mass[step.request] += access.shares.sum()
