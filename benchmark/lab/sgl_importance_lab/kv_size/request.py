"""What one request keeps at a context length."""

from __future__ import annotations

from sgl_importance_lab.kv_size.deployment import Deployment, LayerBytes, Stage
from sgl_importance_lab.kv_size.model_shape import LayerKind

EVICTION_INTERVAL = 128
"""Decoded tokens after which sglang frees what has left a window (``SGLANG_SWA_EVICTION_INTERVAL``)."""


def page_aligned(tokens: int, page_size: int) -> int:
    """Slots that so many tokens take: their last page is theirs alone."""
    return -(-tokens // page_size) * page_size


def window_slots(window: int, context: int, page_size: int) -> int:
    """Most slots that a request holds in a pool of this window.

    Behind the window lie tokens that are not freed yet, and a page that is cut; ahead of it a page for the
    next tokens (sglang's ``compute_swa_request_cap``, without speculation).
    """
    most = window + EVICTION_INTERVAL + 2 * page_size
    return min(page_aligned(context, page_size), page_aligned(most, page_size))


def layer_request_bytes(layer: LayerBytes, context: int, page_size: int) -> int:
    """On one GPU."""
    if layer.cache.kind is LayerKind.STATE:
        return layer.total
    if layer.cache.window is not None:
        return layer.total * window_slots(layer.cache.window, context, page_size)
    return layer.total * page_aligned(context, page_size)


def unread_request_bytes(layer: LayerBytes, context: int, page_size: int) -> int:
    """Of these, what attention never reads again: tokens behind a window, or copies of shared layers."""
    kept = layer_request_bytes(layer, context, page_size)
    if layer.cache.shared:
        return kept
    if layer.cache.reads is None:
        return 0
    return max(0, kept - layer.total * min(context, layer.cache.reads + 1))


def stage_request_bytes(stage: Stage, deployment: Deployment, context: int) -> int:
    """On one GPU of a stage, with drafts."""
    page = deployment.page_size
    return sum(layer_request_bytes(layer, context, page) for layer in (*stage.layers, *stage.drafts))
