"""What a selector is: for each page, an estimate of the largest logit that a query finds in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch

from sgl_importance_kernels.sparse.bit_tables import LARGEST, BitTables

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages
    from sgl_importance_kernels.sparse.triton.estimates import Estimates


class Selector(ABC):
    """One way of estimating. Its estimates may change tokens; where pages are never does.

    Args:
        page_size: tokens per page.

    Attributes:
        vectors_per_page: vectors that the device keeps of a page's keys, for each KV head.
        product: what of a query and of what is kept it goes by: the largest ``dot`` with a vector, or the
            largest with a key made of ``bits``; None where it goes by something else.
    """

    vectors_per_page: int = 0
    product: Literal["dot", "bits"] | None = None

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def kept_bytes(self, head_dim: int) -> int:
        """What the device keeps of a page, for each KV head, beside one float32 (the unit of its numbers)."""
        return self.vectors_per_page * head_dim

    def layer_bytes(self, layer: int, head_dim: int) -> int:
        """What it is in one layer, once the selector is calibrated; ``kept_bytes`` or less as a mean."""
        return self.kept_bytes(head_dim)

    def table_bytes(self, layers: int, kv_heads: int, head_dim: int) -> int:
        """What it keeps beside all pages."""
        return 0

    @property
    def all_tables(self) -> BitTables | None:
        """How codes lie in all layers, where that is what is kept."""
        return None

    @property
    def is_calibrated(self) -> bool:
        """Whether pages can be kept."""
        return True

    def keep(self, layer: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept of complete pages.

        Args:
            layer: index among the pool's layers.
            keys: float32 [pages, page size, KV heads, head dimension].

        Returns:
            int8 [pages, KV heads, bytes], and the unit of its numbers, float32 [pages, KV heads].
        """
        vectors, units = self.in_int8(self.represent(keys))
        return vectors.flatten(2), units

    @staticmethod
    def in_int8(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors [pages, KV heads, count, head dimension] in int8, with one unit for a page and KV head."""
        units = vectors.abs().amax(dim=(-2, -1)).clamp_(min=torch.finfo(torch.float32).tiny) / LARGEST
        return (vectors / units[..., None, None]).round_().to(torch.int8), units

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        """The vectors of complete pages.

        Args:
            keys: float32 [pages, page size, KV heads, head dimension].

        Returns:
            float32 [pages, KV heads, vectors_per_page, head dimension].
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of a page")

    @abstractmethod
    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        """Estimates.

        Args:
            queries: scaled as attention scales them, float32 [tokens, heads, head dimension].
            pages: complete pages of a context.

        Returns:
            float32 [tokens * heads, pages]; only differences within a row mean something.
        """

    def scan_rows(
        self,
        queries: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        pages: LayerPages,
        of_rows: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> Estimates:
        """Estimates in Triton for rows with pages of their own, where there is a ``product``; asynchronous.

        Args:
            queries: [tokens, heads, head dimension].
            rows: which of the tokens, int64 [rows].
            scale: as attention scales them.
            pages: what is kept; its ``numbers`` do not matter.
            of_rows: pages of each row, int64 [rows, most pages].
            num_pages: how many of them each row has, int64 [rows].
        """
        raise NotImplementedError(f"{type(self).__name__} goes by no product")

    def scanned(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        """As ``logits``, by ``scan_rows``."""
        rows = torch.arange(len(queries), device=queries.device)
        of_rows = pages.numbers.expand(len(rows), -1)
        found = self.scan_rows(queries, rows, 1.0, pages, of_rows, torch.full_like(rows, len(pages.numbers)))
        return found.logits.flatten(0, 1)


class LargestDot(Selector):
    """Estimates a page by the largest product of a query with the vectors that are kept of it."""

    product: Literal["dot", "bits"] | None = "dot"

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        return self.scanned(queries, pages) if pages.uses_triton else pages.largest_dot(queries)

    def scan_rows(
        self,
        queries: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        pages: LayerPages,
        of_rows: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> Estimates:
        from sgl_importance_kernels.sparse.triton.scan_kernel import scan  # a CPU needs no Triton

        vectors = pages.vectors(queries.shape[2])
        return scan(queries, rows, scale, vectors, pages.units, of_rows, num_pages)
