"""Attention of one token to pages where they lie, on a CPU."""

from __future__ import annotations

import torch

from sgl_importance_kernels.pages.decode_attention import attend_pages
from sgl_importance_kernels.pages.staging import Staging


class RunningAttention:
    """The attention of a token to the pages added so far.

    Args:
        queries: of the token, [1, heads, head dimension].
        kv_heads: of keys and values.
        value_dim: numbers of a value's head.
        scale: factor on the logits.
    """

    def __init__(self, queries: torch.Tensor, kv_heads: int, value_dim: int, scale: float) -> None:
        self._queries = queries.float().view(kv_heads, -1, queries.shape[-1]).contiguous()
        self._scale = scale
        self._largest = torch.full(self._queries.shape[:2], -torch.inf)
        self._sums = torch.zeros(self._queries.shape[:2])
        self._outputs = torch.zeros(*self._queries.shape[:2], value_dim)

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        staging: Staging,
        places: torch.Tensor,
        num_tokens: int,
    ) -> None:
        """Adds pages, in order.

        Args:
            keys: of a layer, float32 [slots, page size, KV heads, head dimension].
            values: likewise, with the dimension of values.
            staging: what lies behind the slots.
            places: of the pages: a slot, or behind all slots, a page of the staging buffer; int64 [pages].
            num_tokens: of the pages; only the last one may be partial.
        """
        attend_pages(
            self._queries.numpy(),
            keys.numpy(),
            values.numpy(),
            staging.keys.numpy(),
            staging.values.numpy(),
            places.numpy(),
            num_tokens,
            self._scale,
            self._largest.numpy(),
            self._sums.numpy(),
            self._outputs.numpy(),
        )

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum, as a part for ``PartialAttention``."""
        output = self._outputs / self._sums[..., None]
        log_sum = self._largest + self._sums.log()
        return output.view(1, -1, output.shape[-1]), log_sum.view(1, -1)
