"""Ghosts give returning pages their importance, and the reuse estimator the truth."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.ghosts import GhostTable
from sgl_importance.nodes.node_metadata import NodeMetadata

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
