"""Every selector by name: those that ship, and those that only comparisons run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_importance_kernels.sparse.bit_tables import KeyStatistics
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sgl_importance_lab.selectors.bounding_boxes import BoundingBoxes
from sgl_importance_lab.selectors.exact_mass import ExactMass
from sgl_importance_lab.selectors.key_blocks import KeyBlocks
from sgl_importance_lab.selectors.mean_key import MeanKey
from sgl_importance_lab.selectors.recent_pages import RecentPages
from sgl_importance_lab.selectors.representative_keys import RepresentativeKeys

ALL_SELECTORS: dict[str, Callable[[int], Selector]] = {
    **SELECTORS,
    "oracle": ExactMass,
    "quest": BoundingBoxes,
    "infllm": KeyBlocks,
    "mean": MeanKey,
    "window": RecentPages,
    "rep": RepresentativeKeys,  # a server takes bits in its place
}
"""Each takes the tokens per page."""


def ready_selector(name: str, keys: torch.Tensor, device: torch.device | str = "cpu") -> Selector:
    """A selector that knows what it must of the model whose keys are given.

    Args:
        name: of ``ALL_SELECTORS``; ``bits`` takes every channel of a query to count alike.
        keys: [layers, pages, page size, KV heads, head dimension].
        device: where its tables are.
    """
    selector = ALL_SELECTORS[name](keys.shape[2])
    if isinstance(selector, MeanAndBits):
        of_tokens = keys.flatten(1, 2)
        selector.calibrate(KeyStatistics.of(of_tokens, torch.ones_like(of_tokens), keys.shape[2]), device)
    return selector
