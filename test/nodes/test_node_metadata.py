"""What a node keeps of its past when it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.reuse_class import BlockType

PAGE = 4


def node_with_prior_segments(*prior_segments: tuple[int, int], tokens: int) -> NodeMetadata:
    """Each past: pages, and visits before the return."""
    node = NodeMetadata(tokens=tokens, depth=0, page_size=PAGE, clock=100)
    for pages, accesses in prior_segments:
        shared = BlockType.SHARED_PREFIX if accesses > 5 else BlockType.USER
        node.recall(pages * PAGE, accesses=accesses, span=10 * accesses, block_type=shared)
    return node


def test_a_new_suffix_of_a_popular_prefix_is_not_popular() -> None:
    node = node_with_prior_segments((2, 30), tokens=3 * PAGE)
    node.accesses += 1  # one visit of the whole since its return
    prefix = node.split(2 * PAGE, PAGE)
    assert (prefix.accesses, prefix.block_type) == (31, BlockType.SHARED_PREFIX)
    assert (node.accesses, node.span, node.block_type) == (1, 0, BlockType.USER)


def test_each_part_keeps_its_own_past() -> None:
    node = node_with_prior_segments((2, 30), (2, 3), tokens=5 * PAGE)
    first = node.split(PAGE, PAGE)
    second = node.split(PAGE, PAGE)
    assert [part.accesses for part in (first, second, node)] == [30, 30, 3]
    third = node.split(2 * PAGE, PAGE)
    assert [part.accesses for part in (third, node)] == [3, 0]


def test_a_suffix_that_many_texts_follow_stays_shared() -> None:
    node = node_with_prior_segments((1, 30), tokens=2 * PAGE)
    node.continuations = 2
    node.split(PAGE, PAGE)
    assert node.block_type is BlockType.SHARED_PREFIX


@given(
    prior_segments=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=4),
    new_pages=st.integers(1, 3),
    own_visits=st.integers(0, 3),
    data=st.data(),
)
def test_every_page_keeps_its_visits_through_any_cuts(
    prior_segments, new_pages: int, own_visits: int, data
) -> None:
    pages = sum(length for length, _ in prior_segments) + new_pages
    node = node_with_prior_segments(*prior_segments, tokens=pages * PAGE)
    node.accesses += own_visits
    expected = [accesses for length, accesses in prior_segments for _ in range(length)] + [0] * new_pages
    first = 0
    for cut in sorted(data.draw(st.sets(st.integers(1, pages - 1)))) if pages > 1 else []:
        prefix = node.split((cut - first) * PAGE, PAGE)
        assert prefix.accesses == expected[first] + own_visits
        assert prefix.span == 10 * expected[first]
        first = cut
    assert node.accesses == expected[first] + own_visits
