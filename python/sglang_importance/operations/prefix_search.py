"""Finds the place of a prompt in the tree, and changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, Slices
from sglang_importance.upstream.nodes import key_of, tokens_of


def find(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """``tokens`` of a prompt, and the ``extra_key`` and ``cache_salt`` to look under, or ``any_namespace``.

    Of all namespaces the one that holds most of the prompt answers. Other than a request, the search also
    goes into a part of a page: a few words find the prompts that begin with them.
    """
    wanted = array("q", arguments["tokens"])
    namespace = arguments["extra_key"], arguments["cache_salt"]
    pause = Slices()
    path: list[dict[str, Any]] = []
    matched = 0
    siblings = list(cache.python_core.root_node.children.values())
    if not arguments["any_namespace"]:
        siblings = [node for node in siblings if _namespace(node) == namespace]
    while siblings and matched < len(wanted):
        best: UnifiedTreeNode | None = None
        best_length = 0
        rest = wanted[matched:]
        for node in siblings:
            length = common_prefix(rest, tokens_of(node))
            if length > best_length:
                best, best_length = node, length
            if pause.is_due():
                yield
        if best is None:
            break
        matched += best_length
        path.append({"id": best.id, "tokens": len(key_of(best)), "matched_tokens": best_length})
        if best_length < len(key_of(best)):
            break
        siblings = list(best.children.values())
    return {"tokens": len(wanted), "matched_tokens": matched, "path": path}


def _namespace(node: UnifiedTreeNode) -> tuple[str | None, str | None]:
    return key_of(node).extra_key or None, key_of(node).cache_salt or None


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading items that are equal."""
    length = min(len(left), len(right))
    if left[:1] != right[:1]:
        return 0
    if left[:length] == right[:length]:
        return length
    low, high = 1, length  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
