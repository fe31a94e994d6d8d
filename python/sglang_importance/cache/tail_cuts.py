"""Victims cut from their tails: what is left of a leaf still serves the beginning of its text."""

from __future__ import annotations

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.tail_size import tail_pages
from sglang_importance.cache.node_events import NodeEvents
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of


class TailCuts:
    """Cuts the next victim of a walk before upstream evicts it. The tail keeps the node's id.

    Args:
        events: told of the split, as of every other.
    """

    def __init__(self, state: TreeState, events: NodeEvents) -> None:
        self._state = state
        self._events = events

    def cut(self, node: UnifiedTreeNode, asked: int) -> None:
        """Leaves of the node, a leaf of device or host, only a tail that is worth ``asked`` tokens.

        Nothing is done where that is all of it, or where upstream cannot split it safely.
        """
        learn, core = self._state.faults.learn, self._state.tree.core
        front_tokens = learn(FaultPlace.RANKING, self._front_tokens, node, asked)
        if not front_tokens:
            return
        digests = learn(FaultPlace.RANKING, self._state.tree.page_digests, node)
        used = node.last_access_time
        self._events.split_reason = "tail_cut"
        front, action = core._split_node(key_of(node), node, front_tokens)
        self._events.split_reason = "paths_part"
        assert action is None, "a node whose copy is under way is not cut"
        front.last_access_time = node.last_access_time = used  # nobody asked for it
        if digests is not None:
            learn(FaultPlace.RANKING, self._state.tree.tail_cut, front, node, digests)

    def _front_tokens(self, node: UnifiedTreeNode, asked: int) -> int:
        """Tokens that are to stay."""
        tree, tokens = self._state.tree, len(key_of(node))
        front = tokens - tail_pages(asked, tokens, tree.page_size) * tree.page_size
        return front if front > 0 and self._is_safe(node) else 0

    def _is_safe(self, node: UnifiedTreeNode) -> bool:
        core, metadata = self._state.tree.core, self._state.tree.known(node)
        if metadata is None or metadata.expendable:  # the front would go next
            return False
        if len(core.components) > 1:  # a state of linear attention stays with the tail
            return False
        if core.is_host_memory_buffer_only:  # each split has to be told to the copies that wait
            return False
        if node.write_through_pending_id is not None or node.load_back_pending_id is not None:
            return False
        if any(data.host_lock_ref for data in node.component_data):  # upstream gives the front none
            return False
        # Under write-back the host may give up its copy of either part before the other's.
        return not (core.is_write_back and node.backuped and not node.evicted)
