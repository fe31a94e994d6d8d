"""What a selector is: for each page, an estimate of the largest logit that a query finds in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages


class Selector(ABC):
    """One way of estimating. Its estimates may change tokens; where pages are never does.

    Attributes:
        vectors_per_page: vectors that the device keeps of a page's keys, for each KV head.
        unit_tokens: tokens that are chosen or left together; pages, where it is no more than one of them.
        product: what of a query and a page's vectors it goes by: the largest ``dot``, or the bound of the
            ``box`` that they are corners of; None where it goes by something else.
    """

    vectors_per_page: int = 0
    unit_tokens: int = 1
    product: Literal["dot", "box"] | None = None

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


class LargestDot(Selector):
    """Estimates a page by the largest product of a query with the vectors that are kept of it."""

    product = "dot"

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        return pages.largest_dot(queries)
