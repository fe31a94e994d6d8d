"""Which nodes deserve a pin that nobody asked for. No measurement has shown that these help."""

from __future__ import annotations

from sgl_importance.ranking.marginal_loss import importance_factor
from sgl_importance.signal.node_importance import NodeImportance

# Eight people who ask different things of one text are not one person who repeats himself.
MIN_DISTINCT_QUERIES = 8
MIN_FACTOR = 1.5


def deserves_pin(importance: NodeImportance) -> bool:
    """Whether many distinct queries gave the node far more of their attention than its size explains."""
    return importance.queries >= MIN_DISTINCT_QUERIES and importance_factor(importance) >= MIN_FACTOR
