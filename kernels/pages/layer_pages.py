"""Complete pages of a context as a selector sees them, and the products that selectors are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_importance_kernels.pages import page_scan


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Complete pages of a context in one layer, as a selector sees them.

    Attributes:
        numbers: their logical numbers, int64 [pages].
        vectors: of all pages of the pool, int8 [pool pages, KV heads, vectors, head dimension].
        scales: their unit, float32 [pool pages, KV heads].
        host_keys: of all pages of the pool, [pool pages, page size, KV heads, head dimension].
    """

    numbers: torch.Tensor
    vectors: torch.Tensor
    scales: torch.Tensor
    host_keys: torch.Tensor

    def keys(self) -> torch.Tensor:
        """Every key, float32 [pages, page size, KV heads, head dimension]: a copy from the host."""
        return self.host_keys[self.numbers].float()

    def largest_dot(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest product with a page's vectors; shapes as in ``Selector.logits``."""
        return self._scan(page_scan.largest_dot, queries)

    def box_bound(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest product within a page's bounding box; shapes as in ``Selector.logits``."""
        return self._scan(page_scan.box_bound, queries)

    def _scan(self, scan: Callable[..., Any], queries: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = queries.shape
        kv_heads = self.vectors.shape[1]
        by_kv_head = queries.view(tokens, kv_heads, heads // kv_heads, dim)
        logits = torch.empty(*by_kv_head.shape[:3], len(self.numbers), dtype=torch.float32)
        scan(
            by_kv_head.numpy(),
            self.vectors.numpy(),
            self.scales.numpy(),
            self.numbers.numpy(),
            logits.numpy(),
        )
        return logits.view(tokens * heads, -1)
