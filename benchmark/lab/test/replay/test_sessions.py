"""What a trace's structure says of its blocks, on traces small enough to read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.reuse_class import BlockType, Transition, reuse_class
from sgl_importance_lab.replay import sessions
from sgl_importance_lab.replay.sessions import BlockFacts, access_classes, block_facts
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

from support.workloads.replay_traces import object_traces, tree_traces

BLOCK = 16


def facts_of(*requests: tuple[list[int], int]) -> tuple[list[list[int]], list[Transition], BlockFacts]:
    """Each request: blocks of its prompt, and blocks that it generates."""
    builder = TraceBuilder("small", BLOCK)
    for path, generated in requests:
        builder.add(path, input_tokens=len(path) * BLOCK, output_tokens=generated * BLOCK)
    trace = builder.build()
    facts = block_facts(trace)
    starts = trace.offsets.tolist()
    types = [facts.block_types[a:b].tolist() for a, b in pairwise(starts)]
    transitions = [Transition(int(facts.transitions[a])) for a in starts[:-1]]
    return types, transitions, facts


def test_the_third_text_behind_a_block_starts_a_session_on_a_shared_prefix() -> None:
    types, transitions, _ = facts_of(([1, 2], 0), ([1, 3], 0), ([1, 4], 0))
    assert transitions == [Transition.COLD, Transition.BRANCH, Transition.NEW_SESSION]
    assert types[0] == [BlockType.USER, BlockType.USER]
    assert types[1] == types[2] == [BlockType.SHARED_PREFIX, BlockType.USER]


def test_a_prompt_that_goes_on_where_one_ended_is_a_next_turn_behind_generated_text() -> None:
    types, transitions, _ = facts_of(([1, 2], 1), ([1, 2, 3, 4], 1))
    assert transitions == [Transition.COLD, Transition.NEXT_TURN]
    assert types[1] == [BlockType.USER, BlockType.USER, BlockType.GENERATED, BlockType.USER]


def test_visits_and_spans_count_from_the_first_request() -> None:
    _, _, facts = facts_of(([1], 0), ([9], 0), ([1, 2], 0), ([1], 0))
    assert facts.accesses.tolist() == [0, 0, 1, 0, 2]
    assert facts.spans.tolist() == [0, 0, 2, 0, 3]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=4), st.sampled_from(AnswerEnd), st.integers(0, 1)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_ends_are_part_of_the_classes_that_a_server_would_give(requests: list) -> None:
    builder = TraceBuilder("ends", BLOCK)
    for path, end, generated in requests:
        blocks = [tuple(path[: depth + 1]) for depth in range(len(path))]
        tokens = len(path) * BLOCK
        builder.add(blocks, input_tokens=tokens, output_tokens=generated * BLOCK, answer_end=end)
    trace = builder.build()
    plain, told = block_facts(trace), block_facts(trace, with_ends=True)
    for request, (_, end, _) in enumerate(requests):
        for access in range(trace.offsets[request], trace.offsets[request + 1]):
            block_type = BlockType(int(told.block_types[access]))
            transition = Transition(int(told.transitions[access]))
            level = int(told.visit_levels[access])
            assert told.reuse_classes[access] == reuse_class(block_type, transition, level, end)
            assert plain.reuse_classes[access] == reuse_class(block_type, transition, level)


@given(trace=st.one_of(tree_traces, object_traces), part=st.integers(1, 30))
def test_a_trace_that_is_looked_at_in_parts_has_the_classes_of_the_whole(trace: Trace, part: int) -> None:
    whole = block_facts(trace)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sessions, "_PART_ACCESSES", part)
        found = access_classes(trace)
    assert np.array_equal(found.numbers, np.unique(whole.reuse_classes))
    assert np.array_equal(found.numbers[found.classes], whole.reuse_classes)
    assert np.array_equal(found.levels[found.classes], whole.visit_levels)
    assert np.array_equal(found.is_evidence, whole.is_evidence)
    given_facts = access_classes(trace, whole)
    assert np.array_equal(given_facts.classes, found.classes)


def test_more_tokens_than_64_bits_count_are_refused() -> None:
    builder = TraceBuilder("small", BLOCK)
    with pytest.raises(ValueError, match="has 9223372036854775808 tokens"):
        builder.add([1], input_tokens=BLOCK, output_tokens=1 << 63)
    builder.add([1], input_tokens=BLOCK)
    assert builder.build().output_tokens.tolist() == [0]
