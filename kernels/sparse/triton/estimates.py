"""What a scan leaves for a choice: logits of queries and pages, and sums of parts of each query's."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Estimates(NamedTuple):
    """Of the rows of a step; float32 each.

    Attributes:
        logits: [rows, heads, most pages], -inf behind the pages of a row.
        largest: of the pages of one tile, [rows, heads, tiles].
        sums: of exponentials relative to it, likewise.
    """

    logits: torch.Tensor
    largest: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, most: int, block_pages: int, device: torch.device) -> Estimates:
        """Room for them."""
        tiles = triton.cdiv(most, block_pages)
        real = {"dtype": torch.float32, "device": device}
        return cls(
            torch.empty(rows, heads, most, **real),
            *(torch.empty(rows, heads, tiles, **real) for _ in range(2)),
        )


@triton.jit
def store_estimates(logits, head_row, is_query, at, max_pages, part, num_parts, Logits, Largest, Sums):
    """Stores a tile of logits [queries, pages], and what each query's sum to."""
    out = Logits + head_row[:, None] * max_pages + at[None, :]
    tl.store(out, logits, mask=is_query[:, None] & (at < max_pages)[None, :])
    largest = tl.max(logits, axis=1)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    of_part = head_row * num_parts + part
    tl.store(Largest + of_part, largest, mask=is_query)
    tl.store(Sums + of_part, tl.sum(tl.exp(logits - anchor[:, None]), axis=1), mask=is_query)
