"""The sum of observed attention on the device, updated with each change of the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_importance.signal.node_importance import NodeImportance

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_importance.tree.annotated_tree import AnnotatedTree


def body_mass_of(importance: NodeImportance) -> float:
    """Mean body mass of a node's pages, summed."""
    return float(importance.body_mass().sum())


class BodyMassBook:
    """Body mass of every node on the device that attention was seen of. O(pages of a node) per change.

    Args:
        tree: finds the metadata of nodes.
    """

    def __init__(self, tree: AnnotatedTree) -> None:
        self._tree = tree
        self._masses: dict[int, float] = {}
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._masses)

    def clear(self) -> None:
        self._masses.clear()
        self.total = 0.0

    def update(self, node: UnifiedTreeNode) -> None:
        """The node came to the device, was cut, or attention was folded into it."""
        if node.evicted:
            return
        mass = body_mass_of(self._tree.metadata(node).importance)
        if mass:
            self.total += mass - self._masses.get(node.id, 0.0)
            self._masses[node.id] = mass

    def remove(self, node: UnifiedTreeNode) -> float:
        """The node left the device; returns the body mass that went with it."""
        mass = self._masses.pop(node.id, 0.0)
        # Rounding errors of the sum are dropped with the last node.
        self.total = self.total - mass if self._masses else 0.0
        return mass

    def check_integrity(self) -> None:
        """Asserts that the book agrees with the tree."""
        masses = {
            node.id: body_mass_of(known.importance)
            for node in self._tree.nodes()
            if not node.evicted and (known := self._tree.known(node)) is not None
        }
        expected = {node_id: mass for node_id, mass in masses.items() if mass}
        assert self._masses.keys() == expected.keys(), self._masses.keys() ^ expected.keys()
        for node_id, mass in expected.items():
            assert abs(mass - self._masses[node_id]) < 1e-9 * max(1.0, mass), node_id
        assert abs(self.total - sum(expected.values())) < 1e-6 * max(1.0, self.total)
