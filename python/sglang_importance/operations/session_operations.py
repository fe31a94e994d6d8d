"""The operation on sessions: close one."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.tiers import Tier
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.tree.faults import upstream


def close_session(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``session_id``, ``extra_key`` and ``cache_salt`` of a session, and whether its own KV goes ``at_once``.

    Answers whether it was open, whether ``/open_session`` opened one of this id, and the tokens on device and
    host that only it had asked for: those that are given back first or, at once, those that left. What is
    pinned, or a running request holds, does not.
    """
    component = cache.importance
    name = SessionName(arguments["session_id"], arguments["extra_key"], arguments["cache_salt"])
    faults, tree = component.state.faults, component.state.tree
    nodes = faults.learn(FaultPlace.LEARNING, component.requests.sessions.close, name)
    own = [node for node in nodes or [] if not tree.metadata(node).pin_octaves]
    tokens = _resident(tree, own)
    if own and arguments["at_once"]:
        with component.evicting_only(own), upstream():
            # The host also first: with copies behind it there, a node that leaves the device would be copied.
            _evict_host(cache, own)
            cache.evict(EvictParams(num_tokens=tokens[Tier.DEVICE]))
            _evict_host(cache, own)
        left = _resident(tree, own)
        tokens = {tier: tokens[tier] - left[tier] for tier in tokens}
    return {
        "session_id": name.session_id,
        "was_open": nodes is not None,
        "is_opened": component.requests.sessions.is_opened(name.session_id),
        "given_back_tokens": {tier.value: count for tier, count in tokens.items()},
    }


def _evict_host(cache: ImportanceRadixCache, nodes: Sequence[UnifiedTreeNode]) -> None:
    if on_host := _resident(cache.importance.state.tree, nodes)[Tier.HOST]:
        cache.evict_host(on_host)


def _resident(tree: AnnotatedTree, nodes: Sequence[UnifiedTreeNode]) -> dict[Tier, int]:
    """Tokens of the nodes that a tier holds."""
    there = [(node, tree.metadata(node).tokens) for node in nodes if node in tree]
    return {
        Tier.DEVICE: sum(tokens for node, tokens in there if not node.evicted),
        Tier.HOST: sum(tokens for node, tokens in there if node.backuped),
    }
