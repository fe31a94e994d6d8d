"""Selectors that ship, by the names that ``--kv-sparse-selector`` knows them by."""

from __future__ import annotations

from collections.abc import Callable

from sgl_importance_kernels.sparse.selectors.all_keys import AllKeys
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.selector import Selector

SELECTORS: dict[str, Callable[[int], Selector]] = {
    "bits": MeanAndBits,
    "token": AllKeys,
}
"""Each takes the tokens per page."""
