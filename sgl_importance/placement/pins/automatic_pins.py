"""Choice of the nodes that are pinned without a request for it. No measurement has shown that this helps."""

from __future__ import annotations

from sgl_importance.policy.marginal_loss import importance_factor
from sgl_importance.signal.node_importance import NodeImportance

# Eight distinct queries are hardly one user who repeats a question.
MIN_DISTINCT_QUERIES = 8
MIN_FACTOR = 1.5


def deserves_pin(importance: NodeImportance) -> bool:
    """Whether many distinct queries gave the node far more attention than its size explains."""
    return importance.queries >= MIN_DISTINCT_QUERIES and importance_factor(importance) >= MIN_FACTOR
