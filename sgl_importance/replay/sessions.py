"""Sessions and shared blocks of a trace, read off its structure.

The server reads the same facts off its radix tree and its ghosts (``sgl_importance.nodes``); here they are
read off the whole trace, each from nothing but what came before it. They do not depend on the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.replay.trace import NO_PARENT, IntArray, Trace
from sgl_importance.reuse.reuse_class import (
    CLASSES_OF_END,
    GAP_STARTS,
    NUM_VISIT_LEVELS,
    VISIT_STARTS,
    BlockType,
    Transition,
)


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
    block_types = np.zeros(trace.num_accesses, dtype=np.int8)
    transitions = np.zeros(trace.num_accesses, dtype=np.int8)
    accesses = np.zeros(trace.num_accesses, dtype=np.int64)
    spans = np.zeros(trace.num_accesses, dtype=np.int64)
    previous = np.full(trace.num_accesses, NO_PARENT, dtype=np.int64)
    if trace.parents is None:
        _count_accesses(trace.blocks, trace.offsets, trace.num_blocks, accesses, spans)
    else:
        _read_paths(
            trace.blocks,
            trace.offsets,
            trace.num_blocks,
            trace.block_tokens,
            trace.input_tokens,
            trace.output_tokens,
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
        ends = np.repeat(trace.answer_ends.astype(np.int64), np.diff(trace.offsets))
        classes += np.where(block_types == BlockType.SHARED_PREFIX, 0, ends * CLASSES_OF_END)
    is_evidence = _ends_of_runs(trace, classes, previous)
    return BlockFacts(block_types, transitions, accesses, spans, levels, classes, is_evidence)


def visit_levels(accesses: IntArray, spans: IntArray) -> IntArray:
    """``reuse.visit_level`` of each access; int64 [accesses]."""
    levels = np.searchsorted(VISIT_STARTS, accesses, side="right")
    gaps = spans / np.maximum(accesses, 1)
    frequent = levels == len(VISIT_STARTS)
    return np.where(frequent, levels + np.searchsorted(GAP_STARTS, gaps, side="right"), levels)


def _ends_of_runs(trace: Trace, classes: IntArray, previous: IntArray) -> npt.NDArray[np.bool_]:
    """Last block of each run of one class and one previous visit; independent objects are runs of one."""
    ends = np.ones(trace.num_accesses, dtype=np.bool_)
    if trace.parents is not None:
        ends[:-1] = (classes[:-1] != classes[1:]) | (previous[:-1] != previous[1:])
        ends[trace.offsets[1:][np.diff(trace.offsets) > 0] - 1] = True
    return ends


@numba.njit(cache=True)
def _count_accesses(
    blocks: IntArray, offsets: IntArray, num_blocks: int, accesses: IntArray, spans: IntArray
) -> None:
    visits = np.zeros(num_blocks, dtype=np.int64)
    first_visit = np.zeros(num_blocks, dtype=np.int64)
    for request in range(len(offsets) - 1):
        for i in range(offsets[request], offsets[request + 1]):
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
    num_blocks: int,
    block_tokens: int,
    input_tokens: IntArray,
    output_tokens: IntArray,
    block_types: npt.NDArray[np.int8],
    transitions: npt.NDArray[np.int8],
    accesses: IntArray,
    spans: IntArray,
    previous: IntArray,
    codes: _Codes,
) -> None:
    visits = np.zeros(num_blocks, dtype=np.int64)
    first_visit = np.zeros(num_blocks, dtype=np.int64)
    visited_by = np.full(num_blocks, NO_PARENT, dtype=np.int64)
    continuations = np.zeros(num_blocks, dtype=np.int64)
    generated = np.zeros(num_blocks, dtype=np.bool_)
    ended_here = np.full(num_blocks, NO_PARENT, dtype=np.int64)  # last request whose path ended here
    for request in range(len(offsets) - 1):
        start, length = offsets[request], offsets[request + 1] - offsets[request]
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
                continuations[last] += 1
        for position in range(known, length - 1):
            continuations[blocks[start + position]] += 1
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
