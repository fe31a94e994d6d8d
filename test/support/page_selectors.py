"""Selectors as a server has them behind its launch."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.bit_tables import KeyStatistics
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sgl_importance_kernels.sparse.selectors.selector import Selector


def ready_selector(name: str, keys: torch.Tensor, device: str = "cpu") -> Selector:
    """A selector that knows what it must of the model whose keys are given.

    Args:
        name: as ``--kv-sparse-selector``.
        keys: [layers, pages, page size, KV heads, head dimension].
        device: where its tables are.
    """
    selector = SELECTORS[name](keys.shape[2])
    if isinstance(selector, MeanAndBits):
        of_tokens = keys.flatten(1, 2)
        selector.calibrate(KeyStatistics.of(of_tokens, torch.ones_like(of_tokens), keys.shape[2]), device)
    return selector
