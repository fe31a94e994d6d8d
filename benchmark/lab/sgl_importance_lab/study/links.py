"""What steps wait when pages come over a link: bandwidth, and what a copy costs however small it is."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.storage.tier_chain.measure import FetchCost

HEAD_DIM, ELEMENT_BYTES = 128, 2
"""Of a KV head as large models have them, in bfloat16. The embedded models' are smaller."""

PCIE_BYTES_PER_SECOND = 64e9  # PCIe 5.0 x16, nominal
COPY_SECONDS = 6e-6
"""Of one cudaMemcpyAsync: 5 to 7 microseconds (DualPath, arXiv 2602.21548, section 5.2)."""


@dataclass(frozen=True, slots=True)
class Link:
    """How pages come to where steps read them.

    Attributes:
        cost: bandwidth, and the latency of an access.
        accesses_per_unit: copies of a page, or of one head of it; 0 where all that a layer's step lacks comes
            in one access.
        block_bytes: the least that is read at a time.
    """

    cost: FetchCost
    accesses_per_unit: int
    block_bytes: int = 1

    def seconds(self, units: int, batches: int, unit_bytes: int) -> float:
        """Seconds that steps wait.

        Args:
            units: pages, or heads of pages.
            batches: steps of a layer that any of them came for.
            unit_bytes: keys and values of one.
        """
        blocks = -(-unit_bytes // self.block_bytes)
        return self.cost.seconds(units * blocks * self.block_bytes, units * self.accesses_per_unit or batches)


BY_COPY, BY_GATHER, FROM_FLASH = "copy by copy", "one gather a layer", "from flash"
LINKS = {
    # Keys and values are in tensors of their own: two copies.
    BY_COPY: Link(FetchCost(PCIE_BYTES_PER_SECOND, COPY_SECONDS), accesses_per_unit=2),
    # A kernel that reads pinned host memory; a launch is taken to cost what a copy does.
    BY_GATHER: Link(FetchCost(PCIE_BYTES_PER_SECOND, COPY_SECONDS), accesses_per_unit=0),
    # Micron 9550 MAX, data sheet: 14 GB/s, 60 us, 3.3 million reads of 4 KiB a second: as many bytes again.
    FROM_FLASH: Link(FetchCost(14e9, 60e-6), accesses_per_unit=0, block_bytes=4096),
}


def unit_bytes(page_size: int, heads: int) -> int:
    """Keys and values of so many heads of a page."""
    return page_size * heads * HEAD_DIM * ELEMENT_BYTES * 2
