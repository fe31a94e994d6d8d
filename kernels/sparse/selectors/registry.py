"""Selectors by the names that ``--kv-sparse-selector`` knows them by."""

from __future__ import annotations

from collections.abc import Callable

from sgl_importance_kernels.sparse.selectors.all_keys import AllKeys
from sgl_importance_kernels.sparse.selectors.bounding_boxes import BoundingBoxes
from sgl_importance_kernels.sparse.selectors.exact_mass import ExactMass
from sgl_importance_kernels.sparse.selectors.key_blocks import KeyBlocks
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.mean_key import MeanKey
from sgl_importance_kernels.sparse.selectors.recent_pages import RecentPages
from sgl_importance_kernels.sparse.selectors.representative_keys import RepresentativeKeys
from sgl_importance_kernels.sparse.selectors.selector import Selector

SELECTORS: dict[str, Callable[[int], Selector]] = {
    "bits": MeanAndBits,
    "rep": RepresentativeKeys,
    "quest": lambda page_size: BoundingBoxes(),
    "infllm": KeyBlocks,
    "mean": lambda page_size: MeanKey(),
    "window": lambda page_size: RecentPages(),
    "token": AllKeys,
    "oracle": lambda page_size: ExactMass(),
}
"""Each takes the tokens per page."""
