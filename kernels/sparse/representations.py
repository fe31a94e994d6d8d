"""What the device keeps of every page's keys, so that a query can be told which pages to read."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.sparse.layer_pages import LayerPages
from sgl_importance_kernels.sparse.selectors.selector import Selector

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.triton.estimates import Estimates


class Representations:
    """What a selector keeps of the complete pages of every layer: bytes, and a unit for a page and KV head.

    They follow pages by their logical number, so that requests which share a prefix share them. They are
    built when a page is complete, or before the pass behind that; those of a page that somebody else wrote on
    the host, or that was complete before the selector was calibrated, when it is first asked for.

    Args:
        selector: says what is kept.
        host_keys: of each layer, [pages, page size, KV heads, head dimension].
        device: where they are.
        uses_triton: whether queries meet them in Triton, or compiled for CPUs.

    Attributes:
        times_forgotten: how often pages were forgotten: what was built before may be missing since.
    """

    def __init__(
        self,
        selector: Selector,
        host_keys: tuple[torch.Tensor, ...],
        device: torch.device | str,
        *,
        uses_triton: bool = False,
    ) -> None:
        self.selector = selector
        self.times_forgotten = 0
        self.uses_triton = uses_triton
        self._host_keys = host_keys
        num_pages, _, heads, dim = host_keys[0].shape
        layers, size = len(host_keys), selector.kept_bytes(dim)
        self._keeps = size > 0
        self._table_bytes = selector.table_bytes(layers, heads, dim)
        by_page = (layers, num_pages if self._keeps else 0)
        self._kept = torch.zeros(layers * num_pages * heads * size, dtype=torch.int8, device=device)
        self._units = torch.zeros(*by_page, heads, dtype=torch.float32, device=device)
        self._is_built = torch.zeros(by_page, dtype=torch.bool, device=device)

    @property
    def num_bytes(self) -> int:
        """Device bytes, with those of the selector's tables."""
        return self._kept.nbytes + self._units.nbytes + self._is_built.nbytes + self._table_bytes

    @cached_property
    def _of_layers(self) -> list[torch.Tensor]:
        """What is kept of each layer, int8 [pages, KV heads, bytes]: layers may differ in bytes."""
        layers, num_pages, heads = self._units.shape
        dim = self._host_keys[0].shape[3]
        sizes = [self.selector.layer_bytes(layer, dim) if self._keeps else 0 for layer in range(layers)]
        assert sum(sizes) * num_pages * heads <= len(self._kept), "more than the device plan counts"
        ends = [end * num_pages * heads for end in accumulate(sizes)]
        parts = self._kept.tensor_split(ends)
        return [part.view(num_pages, heads, size) for part, size in zip(parts, sizes, strict=False)]

    def build(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Represents complete pages of a layer.

        Args:
            layer: index among the pool's layers.
            pages: int64 [pages]; 0 for none.
            keys: [pages, page size, KV heads, head dimension].
        """
        if not self._keeps or not len(pages) or not self.selector.is_calibrated:
            return
        if self._has_kernel:
            self._keep(layer, keys[None], torch.arange(len(pages), device=pages.device), pages)
            return
        self._of_layers[layer][pages], self._units[layer, pages] = self.selector.keep(layer, keys.float())
        self._is_built[layer, pages] = pages > 0

    def build_from_frames(self, keys: torch.Tensor, frames: torch.Tensor, pages: torch.Tensor) -> None:
        """Represents pages that frames hold in all layers.

        Args:
            keys: of all slots, [layers, slots, page size, KV heads, head dimension].
            frames: int64 [pages].
            pages: int64 [pages]; 0 for none.
        """
        if self._has_kernel:
            self._keep(0, keys, frames, pages)
            return
        for layer, of_layer in enumerate(keys):
            self.build(layer, pages, of_layer[frames])

    @property
    def _has_kernel(self) -> bool:
        """Whether Triton makes what is kept: as soon as tables say how."""
        return self.uses_triton and self.selector.all_tables is not None

    def _keep(self, first_layer: int, keys: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor) -> None:
        from sgl_importance_kernels.sparse.triton.keep_kernel import keep_pages  # a CPU needs no Triton

        tables = self.selector.all_tables
        assert tables is not None
        keep_pages(
            keys.contiguous(),
            rows,
            pages,
            tables,
            self._kept,
            *self._layout,
            self._units,
            self._is_built,
            first_layer=first_layer,
            most_bytes=self._most_bytes,
        )

    @cached_property
    def _most_bytes(self) -> int:
        """Of a page and head, in the layer that keeps most."""
        return max(part.shape[2] for part in self._of_layers)

    @cached_property
    def _layout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each layer begins in what is kept, int64 [layers], and bytes of a page and head, int32."""
        parts = self._of_layers
        ends = list(accumulate(part.numel() for part in parts))
        device = self._kept.device
        return (
            torch.tensor([0, *ends[:-1]], dtype=torch.int64, device=device),
            torch.tensor([part.shape[2] for part in parts], dtype=torch.int32, device=device),
        )

    def of(self, layer: int, pages: torch.Tensor) -> LayerPages:
        """Complete pages of a layer, int64 [pages], with what is kept of them."""
        if self._keeps:
            self._build_missing(layer, pages[~self._is_built[layer, pages]])
        return self._as_built(layer, pages)

    def _as_built(self, layer: int, pages: torch.Tensor) -> LayerPages:
        return LayerPages(
            layer,
            pages,
            self._of_layers[layer],
            self._units[layer],
            self._host_keys[layer],
            uses_triton=self.uses_triton,
        )

    def ensure(self, pages: torch.Tensor) -> None:
        """Builds what is missing of complete pages, int64 [pages], in every layer."""
        if not self._keeps:
            return
        is_missing = ~self._is_built[:, pages]
        for layer in is_missing.any(dim=1).nonzero().flatten().tolist():
            self._build_missing(layer, torch.unique(pages[is_missing[layer]]))

    def _build_missing(self, layer: int, pages: torch.Tensor) -> None:
        if len(pages):
            keys = self._host_keys[layer][pages.to(self._host_keys[layer].device)]
            self.build(layer, pages, keys.to(self._kept.device))

    @property
    def can_scan(self) -> bool:
        """Whether Triton scans the rows of a step together."""
        return self.uses_triton and self.selector.product is not None

    def scan(
        self,
        layer: int,
        queries: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        pages: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> Estimates:
        """Estimates for the requests of a step, each with pages of its own that are built; asynchronous.

        Args:
            layer: index among the pool's layers.
            queries: [tokens, heads, head dimension], contiguous.
            rows: which of the tokens, int64 [rows].
            scale: as attention scales them.
            pages: of each row, int64 [rows, most pages].
            num_pages: how many of them each row has, int64 [rows].
        """
        return self.selector.scan_rows(queries, rows, scale, self._as_built(layer, pages), pages, num_pages)

    def step_logits(
        self, layer: int, queries: torch.Tensor, pages: torch.Tensor, num_pages: torch.Tensor
    ) -> torch.Tensor:
        """Estimates for the requests of a decode step, each with pages of its own that are built: request by
        request, and how many pages each has is asked of the device.

        Args:
            layer: index among the pool's layers.
            queries: scaled as attention scales them, float32 [rows, heads, head dimension].
            pages: of each row, int64 [rows, most pages].
            num_pages: how many of them each row has, int64 [rows].

        Returns:
            float32 [rows, heads, most pages], -inf behind the pages of a row.
        """
        logits = torch.full((*queries.shape[:2], pages.shape[1]), -torch.inf, device=queries.device)
        for row, count in enumerate(num_pages.tolist()):
            own = self._as_built(layer, pages[row, :count])
            logits[row, :, :count] = self.selector.logits(queries[row : row + 1], own)
        return logits

    def forget(self, pages: torch.Tensor) -> None:
        """The pages were freed, or written on the host by somebody else."""
        self.times_forgotten += 1
        if self._keeps:
            self._is_built[:, pages] = False

    def clear(self) -> None:
        """Forgets every page."""
        self.times_forgotten += 1
        self._is_built.fill_(False)

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is kept is what the keys on the host give."""
        if not self._keeps:
            return
        for layer, keys in enumerate(self._host_keys):
            pages = self._is_built[layer].nonzero().flatten()
            if not len(pages):
                continue
            found, units = self._of_layers[layer][pages], self._units[layer, pages]
            of_host = keys[pages.to(keys.device)].to(self._kept.device)
            if self._has_kernel:
                self.build(layer, pages, of_host)
                expected = self._of_layers[layer][pages], self._units[layer, pages]
            else:
                expected = self.selector.keep(layer, of_host.float())
            assert torch.equal(found, expected[0]), "kept of other keys"
            assert torch.equal(units, expected[1]), "units of other keys"
