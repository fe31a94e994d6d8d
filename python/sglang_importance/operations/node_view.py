"""One node in full, as JSON: its pages, its pins, the reason of its last move, its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.signal.node_importance import FloatArray, NodeImportance, Origin
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, Slices
from sglang_importance.operations.recent_events import describe_event
from sglang_importance.operations.snapshot import describe_node
from sglang_importance.operations.tiered_pages_view import NodePages, node_pages
from sglang_importance.operations.tree_view import find_node
from sglang_importance.upstream.nodes import key_of, tokens_of

MAX_CELLS = 512
"""Cells of a page strip: with more pages than that, several share a cell."""
HEAD_TOKENS = 4096
TAIL_TOKENS = 64


def node(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """``node``, an id: everything about it. NotFound where it is not in the tree."""
    component = cache.importance
    found = find_node(component, arguments["node"])
    p_reuse, pause = 0.0, Slices()
    stack = [found]
    while stack:  # a prefix is used whenever what follows it is
        below = stack.pop()
        p_reuse = max(p_reuse, component.state.policy.reuse_probability(component.state.tree.metadata(below)))
        stack.extend(below.children.values())
        if pause.is_due():
            yield
    found = find_node(component, found.id)
    return _describe(component, found, p_reuse, node_pages(cache, found))


def prompt(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``node``, an id: the prefix that ends with it, in the form that pin and pre-warm take."""
    component = cache.importance
    found = find_node(component, arguments["node"])
    ids: list[int] = []
    for part in component.state.tree.path(found):
        ids.extend(tokens_of(part))
    return {"input_ids": ids, **_namespace(found)}


def _describe(
    component: ImportanceComponent, node: UnifiedTreeNode, p_reuse: float, pages: NodePages | None
) -> dict[str, Any]:
    metadata = component.state.tree.metadata(node)
    digest = component.state.tree.end_digest(node)
    ids = tokens_of(node)
    last_move = component.state.events.last_of(node.id)
    return {
        **describe_node(component, node, loss=component.leaves.loss(node), p_reuse=p_reuse),
        **_namespace(node),
        "path": [part.id for part in component.state.tree.path(node)],
        "children": len(node.children),
        "pages": metadata.importance.num_pages,
        "digest": digest.hex(),
        "block_type": metadata.block_type.name.lower(),
        "last_move": describe_event(last_move) if last_move is not None else None,
        "pins": [
            {"pin_id": pin.pin_id, "source": pin.source.name.lower(), "tokens": len(pin.tokens)}
            for pin in component.pins.table.holders(digest)
        ],
        "strip": strip(metadata.importance, pages),
        "head_ids": list(ids[:HEAD_TOKENS]),
        "tail_ids": list(ids[max(HEAD_TOKENS, len(ids) - TAIL_TOKENS) :]),
    }


def _namespace(node: UnifiedTreeNode) -> dict[str, str | None]:
    return {"extra_key": key_of(node).extra_key, "cache_salt": key_of(node).cache_salt}


def strip(importance: NodeImportance, pages: NodePages | None = None) -> dict[str, Any]:
    """Body mass and peak along a node, at most MAX_CELLS cells: masses add up in a cell, peaks do not.

    Args:
        importance: of the node.
        pages: what the device knows of them, where they are tiered: ``resident`` is a cell's mean, ``chosen``
            its largest.
    """
    pages_per_cell = -(-importance.num_pages // MAX_CELLS)
    starts = np.arange(0, importance.num_pages, pages_per_cell)

    return {
        "pages_per_cell": pages_per_cell,
        "self_mass": _rounded(np.add.reduceat(importance.body_mass(Origin.SELF), starts)),
        "cross_mass": _rounded(np.add.reduceat(importance.body_mass(Origin.CROSS), starts)),
        "peak": _rounded(np.maximum.reduceat(importance.peak(), starts)),
        **(_residency_strip(pages, starts) if pages is not None else {}),
    }


def _residency_strip(pages: NodePages, starts: npt.NDArray[np.int64]) -> dict[str, list[float]]:
    counts = np.diff(starts, append=len(pages.resident))
    return {
        "resident": _rounded(np.add.reduceat(pages.resident, starts) / counts),
        "chosen": _rounded(np.maximum.reduceat(pages.chosen, starts)),
    }


def _rounded(values: FloatArray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
