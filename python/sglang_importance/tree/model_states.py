"""States of linear attention on nodes: one for a whole prefix, beside its KV, at some nodes only.

A request goes on from the deepest state of the prefix that it shares. KV behind that is no hit.
"""

from __future__ import annotations

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.reuse.reuse_class import BlockType
from sglang_importance.tree.annotated_tree import AnnotatedTree


def on_device(node: UnifiedTreeNode) -> bool:
    """Whether the state at the node's end is on the device."""
    return node.component_data[ComponentType.MAMBA].value is not None


def has_copy(node: UnifiedTreeNode) -> bool:
    """Whether the state at the node's end is in host memory, too or only there."""
    return node.component_data[ComponentType.MAMBA].host_value is not None


def lacks_state(node: UnifiedTreeNode) -> bool:
    """Whether neither the node's end nor anything that follows has a state; False of models without."""
    if ComponentType.MAMBA not in node.component_types:
        return False
    below = [node]
    while below:  # what follows a leaf of the device is on the host only; ends of paths mostly have a state
        node = below.pop()
        if on_device(node) or has_copy(node):
            return False
        below.extend(node.children.values())
    return True


def is_passed(tree: AnnotatedTree, node: UnifiedTreeNode) -> bool:
    """Whether one text alone has followed the node so far, with a state further on.

    Then requests go by its own: the next turn of a conversation begins behind the answer, not in front of it.
    """
    while True:
        metadata = tree.metadata(node)
        if metadata.continuations >= 2 or metadata.block_type is BlockType.SHARED_PREFIX:
            return False
        if len(node.children) != 1:
            return False
        (node,) = node.children.values()
        if on_device(node):
            return True
