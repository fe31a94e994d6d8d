"""What a trace's structure says of its blocks, on traces small enough to read."""

from __future__ import annotations

from itertools import pairwise

from sgl_importance.replay.sessions import BlockFacts, block_facts
from sgl_importance.replay.trace import TraceBuilder
from sgl_importance.reuse.reuse_class import BlockType, Transition

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
