"""Sessions and shared blocks of a trace, read off its structure.

The server reads the same facts off its radix tree and its ghosts (``sgl_importance.nodes``); here they are
read off the whole trace, each from nothing but what came before it. They do not depend on the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.reuse_class import (
    CLASSES_OF_END,
    GAP_STARTS,
    NUM_VISIT_LEVELS,
    VISIT_STARTS,
    BlockType,
    Transition,
)
from sgl_importance_lab.replay.trace import NO_PARENT, IntArray, Trace

_PART_ACCESSES = 1 << 20
"""Of the parts in which a long trace is looked at, unless one request has more."""


class _Codes(NamedTuple):
    """The enumerations as an argument: numba would freeze globals into its cache."""

    user: int = int(BlockType.USER)
    shared_prefix: int = int(BlockType.SHARED_PREFIX)
    generated: int = int(BlockType.GENERATED)
    partial: int = int(BlockType.PARTIAL)
    cold: int = int(Transition.COLD)
    new_session: int = int(Transition.NEW_SESSION)
    branch: int = int(Transition.BRANCH)
    next_turn: int = int(Transition.NEXT_TURN)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts about each access, as they stand after its request.

    Attributes:
        block_types: a BlockType; int8 [accesses].
        transitions: a Transition, the same for all blocks of a request; int8 [accesses].
        accesses: earlier requests that asked for the block; int64 [accesses].
        spans: requests between the block's first visit and this one; int64 [accesses].
        visit_levels: the ``visit_level`` that follows; int64 [accesses].
        reuse_classes: the class that follows; int64 [accesses].
        is_evidence: whether the estimator learns from the block's next visit; bool [accesses]. Blocks of one
            class that were last visited together share one fate: like the tokens of one radix node they count
            once, so what is learnt depends neither on the block size nor on the length of prompts.
    """

    block_types: npt.NDArray[np.int8]
    transitions: npt.NDArray[np.int8]
    accesses: IntArray
    spans: IntArray
    visit_levels: IntArray
    reuse_classes: IntArray
    is_evidence: npt.NDArray[np.bool_]


def block_facts(trace: Trace, *, with_ends: bool = False) -> BlockFacts:
    """Reads the facts off a trace in one pass; of independent objects only their visits are known.

    Args:
        trace: the trace.
        with_ends: whether the end of a request's answer is part of the class of its blocks, from the request
            on. A server's classes have it; replays rank by turns instead, where ends are known.
    """
    return _facts_of(trace, _Paths.of(trace), 0, trace.num_requests, with_ends)


@dataclass(frozen=True, slots=True)
class AccessClasses:
    """What a replay needs of the facts: two of them for each access, in 3 bytes.

    Attributes:
        numbers: the reuse classes that occur, ascending; int64 [classes].
        levels: the visit level of each; int64 [classes].
        classes: class of each access, an index into ``numbers``; uint16 [accesses].
        is_evidence: as in ``BlockFacts``; bool [accesses].
    """

    numbers: IntArray
    levels: IntArray
    classes: npt.NDArray[np.uint16]
    is_evidence: npt.NDArray[np.bool_]


def access_classes(trace: Trace, facts: BlockFacts | None = None) -> AccessClasses:
    """The classes of ``block_facts``, read off the trace part by part: a day's facts would not fit.

    Args:
        trace: the trace.
        facts: where the caller has them, or others than the trace's own.
    """
    numbers = np.zeros(0, dtype=np.int64)
    levels = np.zeros(0, dtype=np.int64)
    classes = np.zeros(trace.num_accesses, dtype=np.uint16)
    is_evidence = np.zeros(trace.num_accesses, dtype=np.bool_)
    for part, found in _parts(trace) if facts is None else ((slice(None), facts),):
        own, first_uses, places = np.unique(found.reuse_classes, return_index=True, return_inverse=True)
        new = ~np.isin(own, numbers)
        numbers = np.concatenate((numbers, own[new]))
        levels = np.concatenate((levels, found.visit_levels[first_uses[new]]))
        order = np.argsort(numbers)
        classes[part] = order[np.searchsorted(numbers, own, sorter=order)][places]
        is_evidence[part] = found.is_evidence
    assert len(numbers) <= np.iinfo(np.uint16).max
    order = np.argsort(numbers)
    rank = np.empty(len(order), dtype=np.uint16)
    rank[order] = np.arange(len(order))
    for start in range(0, len(classes), _PART_ACCESSES):
        classes[start : start + _PART_ACCESSES] = rank[classes[start : start + _PART_ACCESSES]]
    return AccessClasses(numbers[order], levels[order], classes, is_evidence)


def _parts(trace: Trace) -> Iterator[tuple[slice, BlockFacts]]:
    """The facts of some requests after the other, with where their accesses are."""
    paths = _Paths.of(trace)
    first = 0
    while first < trace.num_requests:
        start = int(trace.offsets[first])
        end = int(np.searchsorted(trace.offsets, start + _PART_ACCESSES, side="right")) - 1
        end = max(end, first + 1)  # of a request that is longer than a part
        yield slice(start, int(trace.offsets[end])), _facts_of(trace, paths, first, end, False)
        first = end


class _Paths(NamedTuple):
    """What is known of each block so far: 18 bytes."""

    visits: npt.NDArray[np.int32]
    first_visit: npt.NDArray[np.int32]
    visited_by: npt.NDArray[np.int32]
    ended_here: npt.NDArray[np.int32]  # last request whose path ended here
    continuations: npt.NDArray[np.int8]  # up to 2
    generated: npt.NDArray[np.bool_]

    @staticmethod
    def of(trace: Trace) -> _Paths:
        """Before the first request."""
        blocks = trace.num_blocks
        visits, first_visit = np.zeros(blocks, dtype=np.int32), np.zeros(blocks, dtype=np.int32)
        visited_by, ended_here = (np.full(blocks, NO_PARENT, dtype=np.int32) for _ in range(2))
        return _Paths(
            visits,
            first_visit,
            visited_by,
            ended_here,
            np.zeros(blocks, dtype=np.int8),
            np.zeros(blocks, dtype=np.bool_),
        )


def _facts_of(trace: Trace, paths: _Paths, first: int, end: int, with_ends: bool) -> BlockFacts:
    """The facts of requests ``first`` to ``end``; ``paths`` has those before ``first``, and then these."""
    part = slice(int(trace.offsets[first]), int(trace.offsets[end]))
    blocks, offsets = trace.blocks[part], trace.offsets[first : end + 1] - part.start
    length = len(blocks)
    block_types = np.zeros(length, dtype=np.int8)
    transitions = np.zeros(length, dtype=np.int8)
    accesses = np.zeros(length, dtype=np.int64)
    spans = np.zeros(length, dtype=np.int64)
    previous = np.full(length, NO_PARENT, dtype=np.int64)
    if trace.parents is None:
        _count_accesses(blocks, offsets, first, paths.visits, paths.first_visit, accesses, spans)
    else:
        _read_paths(
            blocks,
            offsets,
            first,
            trace.block_tokens,
            trace.input_tokens,
            trace.output_tokens,
            paths,
            block_types,
            transitions,
            accesses,
            spans,
            previous,
            _Codes(),
        )
    pairs = block_types.astype(np.int64) * len(Transition) + transitions
    levels = visit_levels(accesses, spans)
    classes = pairs * NUM_VISIT_LEVELS + levels
    if with_ends:
        ends = np.repeat(trace.answer_ends[first:end].astype(np.int64), np.diff(offsets))
        classes += np.where(block_types == BlockType.SHARED_PREFIX, 0, ends * CLASSES_OF_END)
    if trace.parents is None:  # independent objects are runs of one
        is_evidence = np.ones(length, dtype=np.bool_)
    else:
        is_evidence = _ends_of_runs(offsets, classes, previous)
    return BlockFacts(block_types, transitions, accesses, spans, levels, classes, is_evidence)


def visit_levels(accesses: IntArray, spans: IntArray) -> IntArray:
    """``reuse.visit_level`` of each access; int64 [accesses]."""
    levels = np.searchsorted(VISIT_STARTS, accesses, side="right")
    gaps = spans / np.maximum(accesses, 1)
    frequent = levels == len(VISIT_STARTS)
    return np.where(frequent, levels + np.searchsorted(GAP_STARTS, gaps, side="right"), levels)


def _ends_of_runs(offsets: IntArray, classes: IntArray, previous: IntArray) -> npt.NDArray[np.bool_]:
    """Last block of each run of one class and one previous visit."""
    ends = np.ones(len(classes), dtype=np.bool_)
    ends[:-1] = (classes[:-1] != classes[1:]) | (previous[:-1] != previous[1:])
    ends[offsets[1:][np.diff(offsets) > 0] - 1] = True
    return ends


@numba.njit(cache=True)
def _count_accesses(
    blocks: IntArray,
    offsets: IntArray,
    first_request: int,
    visits: npt.NDArray[np.int32],
    first_visit: npt.NDArray[np.int32],
    accesses: IntArray,
    spans: IntArray,
) -> None:
    for place in range(len(offsets) - 1):
        request = first_request + place
        for i in range(offsets[place], offsets[place + 1]):
            block = blocks[i]
            if visits[block] == 0:
                first_visit[block] = request
            accesses[i] = visits[block]
            spans[i] = request - first_visit[block]
            visits[block] += 1


@numba.njit(cache=True)
def _read_paths(
    blocks: IntArray,
    offsets: IntArray,
    first_request: int,
    block_tokens: int,
    input_tokens: IntArray,
    output_tokens: IntArray,
    paths: _Paths,
    block_types: npt.NDArray[np.int8],
    transitions: npt.NDArray[np.int8],
    accesses: IntArray,
    spans: IntArray,
    previous: IntArray,
    codes: _Codes,
) -> None:
    visits, first_visit, visited_by, ended_here, continuations, generated = paths
    for place in range(len(offsets) - 1):
        request = first_request + place
        start, length = offsets[place], offsets[place + 1] - offsets[place]
        if length == 0:
            continue
        known = 0
        while known < length and visits[blocks[start + known]] > 0:
            known += 1
        transition = codes.cold
        if known > 0:
            last = blocks[start + known - 1]
            earlier = ended_here[last]
            if continuations[last] >= 2:
                transition = codes.new_session
            elif earlier >= 0:
                transition = codes.next_turn
                first = input_tokens[earlier] // block_tokens
                end = (input_tokens[earlier] + output_tokens[earlier]) // block_tokens
                for position in range(max(known, first), min(end, length)):
                    generated[blocks[start + position]] = True
            else:
                transition = codes.next_turn if generated[last] else codes.branch
            if known < length:
                continuations[last] = min(continuations[last] + 1, 2)
        for position in range(known, length - 1):
            block = blocks[start + position]
            continuations[block] = min(continuations[block] + 1, 2)
        full = min(input_tokens[request] // block_tokens, length)
        for position in range(length):
            block = blocks[start + position]
            if visits[block] == 0:
                first_visit[block] = request
            accesses[start + position] = visits[block]
            spans[start + position] = request - first_visit[block]
            visits[block] += 1
            previous[start + position] = visited_by[block]
            visited_by[block] = request
            transitions[start + position] = transition
            if position >= full:
                block_types[start + position] = codes.partial
            elif continuations[block] >= 2:
                block_types[start + position] = codes.shared_prefix
            elif generated[block]:
                block_types[start + position] = codes.generated
            else:
                block_types[start + position] = codes.user
        if full > 0:
            ended_here[blocks[start + full - 1]] = request
