"""The drivers of the policy in a replay know the same of every block: one tier or three, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST, ImportanceReplayPolicy
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_nodes import TraceNodes

from support.workloads.replay_traces import build_trace, tree_traces

KNOWN = ("block_type", "transition", "accesses", "span", "reuse_class", "at_risk_as", "last_access", "depth")


def known_of(node: NodeMetadata) -> dict[str, object]:
    return {name: getattr(node, name) for name in KNOWN}


def drive(trace: Trace) -> Iterator[tuple[int, ImportanceReplayPolicy, TraceNodes]]:
    """Both drivers after each request, in a cache that holds everything."""
    single = ImportanceReplayPolicy(max(trace.num_blocks, 1), trace)
    tiered = TraceNodes(trace, UNIFORM_COST)
    seen: set[int] = set()
    for index in range(trace.num_requests):
        single.begin_request(index)
        tiered.begin_request()
        first = int(trace.offsets[index])
        for position, block in enumerate(trace.request(index).tolist()):
            (single.access if block in seen else single.insert)(block)
            tiered.visit(block, first + position, position)
            seen.add(block)
        yield index, single, tiered


@given(tree_traces)
def test_one_tier_and_three_know_the_same_of_each_block(trace: Trace) -> None:
    for index, single, tiered in drive(trace):
        for block in trace.request(index).tolist():
            assert known_of(tiered[block]) == known_of(single.node(block))
    for ours, theirs in zip(tiered.policy.reuse.counts(), single.nodes.policy.reuse.counts(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("others", [0, 299])
def test_the_gap_between_visits_is_known_in_both(others: int) -> None:
    """A document that is asked for twelve times, each time after as many one-off prompts."""
    visits = 12
    trace = build_trace(
        [
            [1] if other < 0 else [2 + other + visit * others]
            for visit in range(visits)
            for other in range(-1, others)
        ]
    )
    facts = block_facts(trace)
    document = int(trace.blocks[0])
    for index, single, tiered in drive(trace):
        if trace.request(index).tolist() == [document]:
            expected = (int(facts.spans[index]), int(facts.reuse_classes[index]))
            for node in (single.node(document), tiered[document]):
                assert (node.span, node.reuse_class) == expected
    assert tiered[document].span == (visits - 1) * (others + 1)
