"""Nodes of a trace: facts that are told replace those of a tree."""

from __future__ import annotations

from collections import Counter

import pytest

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_class import BlockType, Transition
from sgl_importance_lab.replay.trace_nodes import Facts, ToldTracker

PAGE = 16


@pytest.mark.parametrize("is_evidence", [True, False])
def test_facts_that_are_told_replace_those_of_the_tree(is_evidence: bool):
    reuse = ReuseEstimator()
    tracker = ToldTracker(reuse, page_size=PAGE)
    reuse.tick()
    facts = tracker.facts = Facts(BlockType.PARTIAL, accesses=5, span=90, is_evidence=is_evidence)
    node = NodeMetadata(tokens=PAGE, depth=0, page_size=PAGE, clock=reuse.clock)
    tracker.created(node, Transition.COLD)
    assert (node.block_type, node.accesses, node.span) == facts[:3]
    reuse.tick()
    tracker.facts = facts._replace(accesses=9, span=900)
    tracker.accessed(node, Transition.BRANCH)
    assert (node.block_type, node.accesses, node.span) == (BlockType.PARTIAL, 9, 900)
    expected = Counter({(2, node.reuse_class): 1}) if is_evidence else Counter()
    assert Counter(reuse.open_intervals()) == expected
    assert reuse.counts()[0].sum() == is_evidence
