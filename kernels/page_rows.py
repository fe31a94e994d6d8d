"""Rows that producers add page scores to, one per request slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

EMPTY_BODY = torch.finfo(torch.float32).tiny
"""Body probability below which a query token has no body mass: denormals keep no proportions."""


class PageRows(NamedTuple):
    """Sums and maxima over the query tokens of each request slot; all float32, on one device.

    Attributes:
        body: sum of the body mass per page, [slots, max_pages].
        peak: maximum of the page's peak, [slots, max_pages].
        mass: sum of the attention mass of all pages, [slots]; a check, since each query token adds 1.
    """

    body: torch.Tensor
    peak: torch.Tensor
    mass: torch.Tensor

    @classmethod
    def zeros(cls, slots: int, max_pages: int, device: torch.device | str) -> PageRows:
        shapes = ((slots, max_pages), (slots, max_pages), (slots,))
        if torch.device(device).type == "cpu":
            # numpy asks the system for zero pages, which cost memory only once they are written.
            return cls(*(torch.from_numpy(np.zeros(shape, dtype=np.float32)) for shape in shapes))
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes))

    @staticmethod
    def bytes_needed(slots: int, max_pages: int) -> int:
        return 4 * slots * (2 * max_pages + 1)

    def any(self) -> bool:
        """Whether anything was added."""
        return any(bool(tensor.any()) for tensor in self)
