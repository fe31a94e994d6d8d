"""Complete pages of a context as a selector sees them, and the products that selectors are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_importance_kernels.sparse import page_scan


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Complete pages of a context in one layer, as a selector sees them.

    Attributes:
        numbers: their logical numbers, int64 [pages].
        vectors: of all pages of the pool, int8 [pool pages, KV heads, vectors, head dimension].
        scales: their unit, float32 [pool pages, KV heads].
        host_keys: of all pages of the pool, [pool pages, page size, KV heads, head dimension].
        uses_triton: whether products are Triton's, or compiled for CPUs.
    """

    numbers: torch.Tensor
    vectors: torch.Tensor
    scales: torch.Tensor
    host_keys: torch.Tensor
    uses_triton: bool = False

    def keys(self) -> torch.Tensor:
        """Every key, float32 [pages, page size, KV heads, head dimension]: a copy from the host."""
        numbers = self.numbers.to(self.host_keys.device)
        return self.host_keys[numbers].to(self.numbers.device).float()

    def largest_dot(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest product with a page's vectors; shapes as in ``Selector.logits``."""
        return self._scan(queries, is_box=False)

    def box_bound(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest product within a page's bounding box; shapes as in ``Selector.logits``."""
        return self._scan(queries, is_box=True)

    def _scan(self, queries: torch.Tensor, *, is_box: bool) -> torch.Tensor:
        tokens, heads, dim = queries.shape
        if self.uses_triton:
            from sgl_importance_kernels.sparse.triton.scan_kernel import scan  # a CPU needs no Triton

            counts = torch.full((tokens,), len(self.numbers), device=queries.device)
            pages = self.numbers[None].expand(tokens, -1)
            logits = scan(queries, self.vectors, self.scales, pages, counts, is_box=is_box)
            return logits.flatten(0, 1)
        kv_heads = self.vectors.shape[1]
        by_kv_head = queries.view(tokens, kv_heads, heads // kv_heads, dim)
        logits = torch.empty(*by_kv_head.shape[:3], len(self.numbers), dtype=torch.float32)
        compiled = page_scan.box_bound if is_box else page_scan.largest_dot
        compiled(
            by_kv_head.numpy(),
            self.vectors.numpy(),
            self.scales.numpy(),
            self.numbers.numpy(),
            logits.numpy(),
        )
        return logits.view(tokens * heads, -1)
