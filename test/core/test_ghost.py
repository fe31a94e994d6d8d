"""Ghosts give returning pages their importance, and the reuse estimator the truth."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_importance.ghost import GhostTable, chain_digests, root_digest
from sgl_importance.node import NodeMetadata

PAGE = 4


def _node(tokens: int, mass: float) -> NodeMetadata:
    node = NodeMetadata(tokens=tokens, depth=0, page_size=PAGE, clock=3)
    pages = np.full(tokens // PAGE, mass)
    node.importance.observe(1, pages, pages, uniform=0.1, weight=1.0, first=True, decay=1.0)
    return node


class _Log(list):
    def table(self, capacity_pages: int) -> GhostTable:
        return GhostTable(
            capacity_pages,
            on_return=lambda ghost, node, pages: self.append(("return", ghost.resolved, pages)),
            on_expire=lambda ghost: self.append(("expire", ghost.last_access)),
        )


def test_pages_come_back_with_what_was_known():
    log = _Log()
    table = log.table(10)
    digests = chain_digests(root_digest(None, None), list(range(8)), PAGE)
    table.remember(digests, _node(8, 0.5))
    half = _node(PAGE, 0.0)
    assert table.revive(digests[1:], half) == 1
    assert half.importance.body_mass() == pytest.approx([0.5])
    assert table.revive(digests, _node(8, 0.0)) == 1
    assert log == [("return", False, 1), ("return", True, 1)]
    assert len(table) == 0


def test_a_ghost_that_nobody_asks_for_expires_once():
    log = _Log()
    table = log.table(2)
    for chain in range(3):
        table.remember(chain_digests(root_digest(str(chain)), list(range(8)), PAGE), _node(8, 0.1))
    assert log == [("expire", 3), ("expire", 3)]
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
