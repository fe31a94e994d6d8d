"""The definition of the signal, in plain torch."""

from sgl_importance_kernels.reference.page_scores import (
    PageScores,
    attention_probabilities,
    combine_layers,
    layer_page_scores,
    pages_of,
)

__all__ = [
    "PageScores",
    "attention_probabilities",
    "combine_layers",
    "layer_page_scores",
    "pages_of",
]
