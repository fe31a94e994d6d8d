"""Ghosts give returning pages their importance, and the reuse estimator the truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.ghosts import GhostNode, GhostTable
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.signal.node_importance import FloatArray, NodeImportance

PAGE = 4


def _node(tokens: int, mass: float) -> NodeMetadata:
    node = NodeMetadata(tokens=tokens, depth=0, page_size=PAGE, clock=3)
    pages = np.full(tokens // PAGE, mass)
    node.importance.observe(1, pages, pages, uniform=0.1, weight=1.0, first=True, decay=1.0)
    return node


def test_pages_come_back_with_what_was_known():
    table = GhostTable(10, on_expire=lambda ghost: pytest.fail("nothing is forgotten"))
    digests = chain_digests(root_digest(None, None), list(range(8)), PAGE)
    table.remember(digests, _node(8, 0.5))
    half = _node(PAGE, 0.0)
    ((ghost, pages),) = table.revive(digests[1:], half)
    assert half.importance.body_mass() == pytest.approx([0.5])
    assert (ghost.last_access, pages) == (3, 1)
    assert table.revive(digests, _node(8, 0.0)) == [(ghost, 1)]
    assert len(table) == 0


def test_each_page_comes_back_with_its_own_past():
    table = GhostTable(10, on_expire=lambda ghost: pytest.fail("nothing is forgotten"))
    digests = chain_digests(root_digest(None, None), list(range(8)), PAGE)
    node = NodeMetadata(tokens=8, depth=0, page_size=PAGE, clock=3)
    pages = np.array([0.5, 0.25])
    node.importance.observe(1, pages, pages, uniform=0.1, weight=1.0, first=True, decay=1.0)
    table.remember(digests, node)
    second = NodeMetadata(tokens=PAGE, depth=PAGE, page_size=PAGE, clock=4)
    table.revive(digests[1:], second)
    assert second.importance.body_mass() == pytest.approx([0.25])


def _revived_page_by_page(
    table: GhostTable, digests: list[bytes], importance: NodeImportance
) -> list[tuple[GhostNode, int]]:
    """As ``GhostTable.revive``."""
    returned: list[tuple[GhostNode, int]] = []
    for page, digest in enumerate(digests):
        if (remembered := table._pages.pop(digest, None)) is None:
            break
        ghost, kept = remembered
        importance.restore_pages(page, ghost.vectors[kept, None], ghost.queries)
        known = [at for at, (each, _) in enumerate(returned) if each is ghost]
        if known:
            returned[known[0]] = (ghost, returned[known[0]][1] + 1)
        else:
            returned.append((ghost, 1))
    return returned


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(0, 5), st.booleans()),
        max_size=5,
    ),
    st.integers(1, 12),
    st.integers(0, 12),
)
@example([(0, 3, 1, True)], 3, 12)
@example([(0, 6, 1, False), (2, 2, 5, False)], 12, 12)
def test_pages_come_back_as_if_one_by_one(nodes, pages: int, capacity: int):
    """Of nodes that lay over each other in any order, some of whose pages are forgotten by now."""
    chain = chain_digests(root_digest(None, None), list(range(12 * PAGE)), PAGE)
    tables = [GhostTable(capacity, on_expire=lambda ghost: None) for _ in range(2)]
    for start, length, queries, is_reversed in nodes:
        digests = chain[start : start + length]
        if is_reversed:
            digests = digests[::-1]  # no node's, but the table takes any
        for table in tables:
            node = NodeMetadata(tokens=len(digests) * PAGE, depth=0, page_size=PAGE, clock=0)
            numbers = np.arange(len(digests)) + 100 * start
            node.importance.restore_pages(0, np.tile(numbers[:, None], (1, 8)), queries)
            table.remember(digests, node)
    ours, naive = (NodeImportance(pages) for _ in range(2))
    node = NodeMetadata(tokens=pages * PAGE, depth=0, page_size=PAGE, clock=0)
    node.importance = ours
    returned = tables[0].revive(iter(chain[:pages]), node)
    expected = _revived_page_by_page(tables[1], chain[:pages], naive)
    assert [(ghost.vectors.tolist(), count) for ghost, count in returned] == [
        (ghost.vectors.tolist(), count) for ghost, count in expected
    ]
    np.testing.assert_array_equal(ours.page_vectors(), naive.page_vectors())
    for name in ("queries", "_inherited_queries", "inherited_pages"):
        assert getattr(ours, name) == getattr(naive, name), name
    assert list(tables[0]._pages) == list(tables[1]._pages)


def test_a_node_that_comes_back_whole_is_restored_at_once(monkeypatch: pytest.MonkeyPatch):
    """One slice for each node that it was, not for each page: the scheduler waits for it."""
    table = GhostTable(100, on_expire=lambda ghost: pytest.fail("nothing is forgotten"))
    chain = chain_digests(root_digest(None, None), list(range(50 * PAGE)), PAGE)
    table.remember(chain[:30], _node(30 * PAGE, 0.5))
    table.remember(chain[30:], _node(20 * PAGE, 0.25))
    slices: list[int] = []
    restore = NodeImportance.restore_pages

    def counted(node: NodeImportance, start: int, vectors: FloatArray, queries: int) -> None:
        slices.append(len(vectors))
        restore(node, start, vectors, queries)

    monkeypatch.setattr(NodeImportance, "restore_pages", counted)
    whole = _node(50 * PAGE, 0.0)
    assert [pages for _, pages in table.revive(chain, whole)] == [30, 20]
    assert slices == [30, 20]
    assert whole.importance.body_mass() == pytest.approx([0.5] * 30 + [0.25] * 20)


def test_the_oldest_ghost_is_forgotten_first():
    expired: list[int] = []
    table = GhostTable(2, on_expire=lambda ghost: expired.append(ghost.last_access))
    chains = [chain_digests(root_digest(str(clock)), list(range(PAGE)), PAGE) for clock in range(3)]
    for clock, chain in enumerate(chains):
        table.remember(chain, NodeMetadata(tokens=PAGE, depth=0, page_size=PAGE, clock=clock))
    assert expired == [0]
    assert [table.get_importance(chain[0]) is not None for chain in chains] == [False, True, True]


def test_a_ghost_that_nobody_asks_for_expires_once():
    expired: list[int] = []
    table = GhostTable(2, on_expire=lambda ghost: expired.append(ghost.last_access))
    for chain in range(3):
        table.remember(chain_digests(root_digest(str(chain)), list(range(8)), PAGE), _node(8, 0.1))
    assert expired == [3, 3]
    assert len(table) == 2


def test_chains_depend_on_namespace_prefix_and_every_token():
    tokens = list(range(12))
    base = chain_digests(root_digest("a", None), tokens, PAGE)
    assert len(base) == 3
    assert chain_digests(root_digest("a", None), [*tokens, 99], PAGE) == base
    assert not set(base) & set(chain_digests(root_digest(None, "a"), tokens, PAGE))
    changed = chain_digests(root_digest("a", None), [*tokens[:5], -1, *tokens[6:]], PAGE)
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)
    assert chain_digests(base[0], tokens[4:], PAGE) == base[1:]
