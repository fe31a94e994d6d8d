"""Complete pages of a context as a selector sees them, and the products that selectors are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_importance_kernels.jit import njit
from sgl_importance_kernels.sparse import bits_scan
from sgl_importance_kernels.sparse.bit_tables import HEADER_BYTES, BitTables

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = "void(float32[:,:,:,::1], int8[:,:,:,::1], float32[:,::1], int64[::1], float32[:,:,:,::1])"

Floats = npt.NDArray[np.float32]


@njit(_SIGNATURE, **_OPTIONS)
def _largest_dots(
    queries: Floats,
    vectors: npt.NDArray[np.int8],
    scales: Floats,
    pages: npt.NDArray[np.int64],
    logits: Floats,
) -> None:
    """The largest product of each query with the vectors of each page, which are read where they are.

    The int8 vectors of a page and head become float32 once for all queries: products of small whole numbers
    took twice the time.

    Args:
        queries: float32 [tokens, KV heads, queries of each, dimension].
        vectors: of every page of the pool, int8 [pool pages, KV heads, vectors, dimension].
        scales: their unit, float32 [pool pages, KV heads].
        pages: whose vectors count, int64 [pages].
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    count = vectors.shape[2]
    of_page = np.empty((count, dim), np.float32)
    for at in range(len(pages)):
        page = pages[at]
        for head in range(num_heads):
            for vector in range(count):
                for each in range(dim):
                    of_page[vector, each] = vectors[page, head, vector, each]
            for token in range(num_tokens):
                for query in range(group):
                    best = np.float32(-np.inf)
                    for vector in range(count):
                        total = np.float32(0.0)
                        for each in range(dim):
                            total += queries[token, head, query, each] * of_page[vector, each]
                        best = max(best, total)
                    logits[token, head, query, at] = best * scales[page, head]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Complete pages of a context in one layer, as a selector sees them.

    Attributes:
        layer: index among the pool's layers.
        numbers: their logical numbers, int64 [pages].
        kept: of all pages of the pool, int8 [pool pages, KV heads, bytes].
        units: of the numbers in it, float32 [pool pages, KV heads].
        host_keys: of all pages of the pool, [pool pages, page size, KV heads, head dimension].
        uses_triton: whether products are Triton's, or compiled for CPUs.
    """

    layer: int
    numbers: torch.Tensor
    kept: torch.Tensor
    units: torch.Tensor
    host_keys: torch.Tensor
    uses_triton: bool = False

    def keys(self) -> torch.Tensor:
        """Every key, float32 [pages, page size, KV heads, head dimension]: a copy from the host."""
        numbers = self.numbers.to(self.host_keys.device)
        return self.host_keys[numbers].to(self.numbers.device).float()

    def largest_dot(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest product with a page's vectors, on a CPU; shapes as in ``Selector.logits``."""
        by_kv_head, logits = self._room(queries)
        _largest_dots(
            by_kv_head.numpy(),
            self.vectors(queries.shape[2]).numpy(),
            self.units.numpy(),
            self.numbers.numpy(),
            logits.numpy(),
        )
        return logits.flatten(0, 2)

    def largest_of_codes(self, queries: torch.Tensor, tables: BitTables) -> torch.Tensor:
        """The largest product with a key made of mean and codes, on a CPU; as in ``Selector.logits``."""
        by_kv_head, logits = self._room(queries)
        bits_scan.largest_of_codes(
            by_kv_head.numpy(),
            self.kept.view(torch.uint8).numpy(),
            self.units.numpy(),
            tables.widths.numpy(),
            tables.starts.numpy(),
            tables.steps.numpy(),
            self.numbers.numpy(),
            self.host_keys.shape[1],
            queries.shape[2] + HEADER_BYTES,
            logits.numpy(),
        )
        return logits.flatten(0, 2)

    def vectors(self, head_dim: int) -> torch.Tensor:
        """What is kept, as int8 [pool pages, KV heads, vectors, head dimension]."""
        vectors: torch.Tensor = self.kept.unflatten(2, (-1, head_dim))
        return vectors

    def _room(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries by KV head, [tokens, KV heads, queries of each, dimension], and room for their logits."""
        tokens, heads, dim = queries.shape
        kv_heads = self.kept.shape[1]
        by_kv_head = queries.view(tokens, kv_heads, heads // kv_heads, dim)
        return by_kv_head, torch.empty(*by_kv_head.shape[:3], len(self.numbers), dtype=torch.float32)
