"""Room on the device for pages that have no slot."""

from __future__ import annotations

import torch


class Staging:
    """Room on the device for the pages that one partial attention reads, shared by all layers.

    Args:
        num_pages: pages it holds.
        page_shape: tokens per page and KV heads.
        head_dims: numbers of a key's head, and of a value's.
        dtype: of keys and values.
        device: where it is.
    """

    def __init__(
        self,
        num_pages: int,
        page_shape: tuple[int, int],
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.keys, self.values = (
            torch.zeros(num_pages, *page_shape, dim, dtype=dtype, device=device) for dim in head_dims
        )

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        return self.keys.nbytes + self.values.nbytes
