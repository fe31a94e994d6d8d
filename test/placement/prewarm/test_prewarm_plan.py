"""The pre-warm plan: bounded, prefix-closed, and in the order that saves most at every point."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.placement.prewarm.prewarm_plan import Candidate, PlannedPath, plan

PAGE = 4
ROOT = b"root"


def node(
    name: str, parent: Candidate | None, tokens: int, value: float, *, rate: float = 1.0, seconds: float = 0.0
) -> Candidate:
    return Candidate(
        digest=name.encode(),
        parent=parent.digest if parent else ROOT,
        depth=parent.depth + parent.tokens if parent else 0,
        tokens=tokens,
        rate=rate,
        saved_seconds=value,
        restore_seconds=seconds,
    )


def make(
    candidates, *, max_tokens: int = 10**9, max_seconds: float = math.inf, present=()
) -> list[PlannedPath]:
    return plan(
        candidates,
        present={ROOT, *present},
        max_tokens=max_tokens,
        max_seconds=max_seconds,
        page_size=PAGE,
    )


@st.composite
def forests(draw, max_nodes: int = 12) -> list[Candidate]:
    nodes: list[Candidate] = []
    for number in range(draw(st.integers(1, max_nodes))):
        parent = draw(st.sampled_from([None, *nodes]))
        nodes.append(
            node(
                f"{number:02d}",
                parent,
                PAGE * draw(st.integers(1, 5)),
                draw(st.integers(0, 50)) / 10,
                rate=draw(st.integers(1, 4)) / 4,
                seconds=draw(st.integers(0, 3)),
            )
        )
    return draw(st.permutations(nodes))


def order(paths: list[PlannedPath]) -> list[bytes]:
    return [digest for path in paths for digest in path.nodes]


@given(forest=forests(), pages=st.integers(0, 40), seconds=st.integers(0, 20))
def test_a_plan_is_bounded_prefix_closed_and_names_nothing_twice(forest, pages: int, seconds: int):
    by_digest = {each.digest: each for each in forest}
    paths = make(forest, max_tokens=PAGE * pages + 3, max_seconds=seconds)
    ends = {ROOT: 0}
    for path in paths:
        first = by_digest[path.nodes[0]]
        assert ends[first.parent] == path.start == first.depth
        for digest in path.nodes:
            assert by_digest[digest].parent in ends
            assert digest not in ends
            ends[digest] = by_digest[digest].depth + by_digest[digest].tokens
        assert path.start < path.stop <= ends[path.nodes[-1]]
        assert path.stop % PAGE == 0
        # Only the last node of the plan may be cut.
        assert path.stop == ends[path.nodes[-1]] or path is paths[-1]
    tokens = sum(path.stop - path.start for path in paths)
    assert tokens <= PAGE * pages
    taken = [by_digest[digest] for digest in order(paths)]
    assert sum(each.restore_seconds for each in taken[:-1]) < max(seconds, 1e-9)
    if sum(each.restore_seconds for each in forest) < seconds:
        assert tokens == min(PAGE * pages, sum(each.tokens for each in forest))


@given(forest=forests(max_nodes=7))
def test_no_other_closed_order_saves_more_over_the_time_that_it_takes(forest):
    """Horn's theorem, by trying all orders: the weighted sum of completion times is the least."""
    by_digest = {each.digest: each for each in forest}
    rates = {each.digest: each.rate for each in forest}
    for each in sorted(forest, key=lambda each: -each.depth):  # a prefix is reused as often as what follows
        if each.parent in rates:
            rates[each.parent] = max(rates[each.parent], rates[each.digest])

    def cost(sequence) -> float:
        total = passed = 0.0
        for digest in sequence:
            each = by_digest[digest]
            passed += each.tokens
            total += rates[digest] * each.saved_seconds * passed
        return total

    def closed(sequence) -> bool:
        seen = {ROOT}
        for digest in sequence:
            if by_digest[digest].parent not in seen:
                return False
            seen.add(digest)
        return True

    best = min(cost(each) for each in itertools.permutations(by_digest) if closed(each))
    assert cost(order(make(forest))) == pytest.approx(best)


def test_what_is_worth_more_per_token_comes_first():
    small, large = node("small", None, 8, 2.0), node("large", None, 80, 4.0)
    assert order(make([large, small])) == [b"small", b"large"]


def test_a_poor_prefix_comes_with_the_rich_one_behind_it():
    poor = node("poor", None, 8, 0.0)
    rich = node("rich", poor, 8, 10.0)
    fair = node("fair", None, 8, 4.0)
    (path, other) = make([fair, rich, poor])
    assert path == PlannedPath((b"poor", b"rich"), 0, 16)
    assert other == PlannedPath((b"fair",), 0, 8)


def test_a_shared_prefix_is_brought_in_once():
    shared = node("shared", None, 80, 1.0)
    tails = [node(f"tail{i}", shared, 8, 1.0) for i in range(3)]
    paths = make([shared, *tails])
    assert sum(path.stop - path.start for path in paths) == 80 + 3 * 8
    assert sorted(path.start for path in paths) == [0, 80, 80]


def test_what_is_present_is_not_brought_in_and_what_follows_it_is():
    first = node("first", None, 8, 1.0)
    second = node("second", first, 8, 1.0)
    assert make([first, second], present=[b"first"]) == [PlannedPath((b"second",), 8, 16)]


def test_what_cannot_be_reached_from_the_root_is_left_out():
    lost = node("lost", None, 8, 1.0)
    orphan = node("orphan", lost, 8, 100.0)
    assert make([orphan]) == []


def test_long_chains_are_ordered_too():
    rng = random.Random(1)
    nodes: list[Candidate] = []
    for number in range(20_000):
        parent = nodes[-1] if nodes and rng.random() < 0.9 else None  # long chains
        nodes.append(node(str(number), parent, PAGE, rng.random()))
    assert len(order(make(nodes))) == 20_000
