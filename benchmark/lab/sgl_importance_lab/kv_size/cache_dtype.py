"""How one element of K, V or a latent is stored: its bytes, and those of the scales beside it.

Names and layouts are those of sglang's ``--kv-cache-dtype`` (``srt/mem_cache/kv_cache_dtype.py`` of 0.5.21).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sgl_importance_lab.kv_size.fields import SizeError


class Scales(StrEnum):
    """Which scales lie beside the elements."""

    NONE = "none"
    MXFP8 = "mxfp8"
    FP4 = "fp4"


_BLOCK = {Scales.MXFP8: 32, Scales.FP4: 16}
"""Elements of one head that share a scale of one byte."""


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """A way to store a cache.

    Attributes:
        name: as ``--kv-cache-dtype`` has it.
        itemsize: bytes of an element; of two where ``scales`` is FP4, which packs them.
        scales: of blocks of elements.
    """

    name: str
    itemsize: int
    scales: Scales = Scales.NONE

    def row_bytes(self, width: int) -> int:
        """Bytes of ``width`` elements of one head or latent, without scales."""
        if self.scales is not Scales.FP4:
            return width * self.itemsize
        return width // 2

    def scale_bytes(self, width: int) -> int:
        """Bytes of the scales of ``width`` elements."""
        return width // _BLOCK[self.scales] if self.scales in _BLOCK else 0

    def check_width(self, width: int, what: str) -> None:
        """
        Raises:
            SizeError: blocks of this dtype do not divide the row.
        """
        # sglang's nvfp4 kernels read 64 elements at a time, whatever a block of scales has.
        unit = 64 if self.name == "nvfp4" else _BLOCK.get(self.scales, 1)
        if width % unit:
            raise SizeError(
                f"--dtype {self.name} needs a multiple of {unit} and {what} is {width}: take fp8_e4m3"
            )


_ALL = (
    CacheDtype("float32", 4),
    CacheDtype("bfloat16", 2),
    CacheDtype("float16", 2),
    CacheDtype("fp8_e4m3", 1),
    CacheDtype("fp8_e5m2", 1),
    CacheDtype("mxfp8", 1, Scales.MXFP8),
    CacheDtype("fp4_mx_block16", 1, Scales.FP4),
    CacheDtype("nvfp4", 1, Scales.FP4),
)
DTYPES = {dtype.name: dtype for dtype in _ALL} | {"bf16": _ALL[1]}
AUTO = "auto"
BFLOAT16 = DTYPES["bfloat16"]


def cache_dtype(name: str) -> CacheDtype:
    """
    Raises:
        SizeError: nobody knows the name.
    """
    if name not in DTYPES:
        raise SizeError(f"unknown --dtype {name}: take {AUTO}, {', '.join(DTYPES)}")
    return DTYPES[name]
