"""``bits``: the mean of a page, and what each of its keys differs by, in a few bits a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sgl_importance_kernels.sparse.bit_tables import (
    FACTORS_PER_DOUBLING,
    HEADER_BYTES,
    LARGEST,
    BitTables,
    KeyStatistics,
)
from sgl_importance_kernels.sparse.bits_scan import CHUNK
from sgl_importance_kernels.sparse.selectors.selector import Selector

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages
    from sgl_importance_kernels.sparse.triton.estimates import Estimates

BITS_PER_CHANNEL = 27 / 16
"""Of a token's codes, as a mean over channels and layers: with mean, factor and unit 7 % of a page's keys and
values in bf16."""


class MeanAndBits(Selector):
    """Estimates a page by the largest product with its keys as they can be made again.

    Of each page and KV head it keeps the mean in int8, and of every key the difference from it, in codes of
    0 to 8 bits a channel. Which channel has how many, and the steps of its codes, are the model's, found once
    (``calibrate``); the page has a factor of its own for all of these steps. Layers have more bits or fewer.

    Args:
        page_size: tokens per page; a multiple of 16.

    Raises:
        ValueError: of another page size; the message names the cure.
    """

    product = "bits"

    def __init__(self, page_size: int) -> None:
        if page_size % CHUNK:
            raise ValueError(
                f"codes of {CHUNK} tokens lie together, and a page of {page_size} would end among them: use "
                f"--page-size {CHUNK}"
            )
        super().__init__(page_size)
        self._tables: BitTables | None = None
        self._bits_of_layers: list[int] = []

    def kept_bytes(self, head_dim: int) -> int:
        return self._bytes(head_dim, self._bits(head_dim))

    def layer_bytes(self, layer: int, head_dim: int) -> int:
        return self._bytes(head_dim, self._bits_of_layers[layer])

    def table_bytes(self, layers: int, kv_heads: int, head_dim: int) -> int:
        return BitTables.num_bytes(layers, kv_heads, head_dim)

    @property
    def is_calibrated(self) -> bool:
        return self._tables is not None

    def calibrate(self, statistics: KeyStatistics, device: torch.device | str = "cpu") -> None:
        """Shares out bits, once, before the first page is kept."""
        assert self._tables is None, "pages that are kept would be read by other tables"
        tables = BitTables.allotted(statistics, self._bits(statistics.variances.shape[-1]))
        self._bits_of_layers = tables.bits
        self._tables = tables.to(device)

    @property
    def all_tables(self) -> BitTables | None:
        return self._tables

    def tables(self, layer: int) -> BitTables:
        """How the codes of a layer lie, [KV heads, head dimension]."""
        assert self._tables is not None, "not calibrated"
        return self._tables.of(layer)

    def keep(self, layer: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self.tables(layer)
        widths, steps = tables.widths, tables.steps
        mean = keys.mean(dim=1)
        means, units = self.in_int8(mean[:, :, None])
        differences = keys - (means.squeeze(2) * units[..., None])[:, None]
        in_steps = differences / steps.where(steps > 0, torch.inf)
        logarithms = self._logarithms(in_steps, widths, tables.usual[widths.long()])
        factors = (logarithms / FACTORS_PER_DOUBLING).exp2()
        codes = (in_steps / factors[:, None, :, None]).floor_() + (1 << widths) // 2
        codes = codes.clamp_(min=0).minimum(((1 << widths) - 1).float()).int()
        rows = self._packed(codes, tables, self._bits_of_layers[layer])
        header = functional.pad(logarithms[..., None].to(torch.int8), (0, HEADER_BYTES - 1))
        return torch.cat([means.squeeze(2), header, rows], dim=2), units

    @staticmethod
    def _packed(codes: torch.Tensor, tables: BitTables, bits: int) -> torch.Tensor:
        """Codes, int32 [pages, page size, KV heads, channels], as they lie, int8 [pages, KV heads, bytes]."""
        pages, size, heads, _ = codes.shape
        token = torch.arange(size, dtype=torch.int32, device=codes.device)[:, None, None]
        at = tables.starts // 8 * size + token
        placed = codes << tables.starts % 8  # in this byte and, where it is larger, the token's next
        # Of channels without bits every code is 0, and may be added anywhere.
        kept = torch.zeros(pages, heads, bits * size // 8 + 1, dtype=torch.int32, device=codes.device)
        for part, byte in ((placed & 0xFF, at), (placed >> 8, at + size)):
            where = byte.clamp(max=kept.shape[2] - 1).movedim(0, 1).flatten(1).long()
            kept.scatter_add_(2, where.expand(pages, -1, -1), part.movedim(1, 2).flatten(2))
        return kept[..., :-1].to(torch.uint8).view(torch.int8)

    @staticmethod
    def _logarithms(in_steps: torch.Tensor, widths: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
        """Of each page's factor, float32 [pages, KV heads], whole: how much more its keys differ than usual.

        Args:
            in_steps: what keys differ by, float32 [pages, page size, KV heads, channels].
            widths: bits of each channel, int32 [KV heads, channels].
            usual: steps of codes of so many bits of a variable of deviation 1, float32 [KV heads, channels].
        """
        squares = (in_steps * usual).square().sum(dim=(1, 3))
        count = in_steps.shape[1] * (widths > 0).sum(dim=1).clamp(min=1)
        deviations = (squares / count).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return (FACTORS_PER_DOUBLING * deviations.log2()).round_().clamp_(-LARGEST, LARGEST)

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        if pages.uses_triton:
            return self.scanned(queries, pages)
        return pages.largest_of_codes(queries, self.tables(pages.layer))

    def scan_rows(
        self,
        queries: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        pages: LayerPages,
        of_rows: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> Estimates:
        from sgl_importance_kernels.sparse.triton.bits_kernel import scan_codes  # a CPU needs no Triton

        tables = self.tables(pages.layer)
        return scan_codes(
            queries, rows, scale, pages.kept, pages.units, tables, of_rows, num_pages, self._page_size
        )

    def _bytes(self, head_dim: int, bits: int) -> int:
        return head_dim + HEADER_BYTES + bits * self._page_size // 8

    def _bits(self, head_dim: int) -> int:
        return int(BITS_PER_CHANNEL * head_dim)
