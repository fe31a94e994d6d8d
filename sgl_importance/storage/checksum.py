"""CRC-32C (Castagnoli), by the C library behind ``google-crc32c``."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

with warnings.catch_warnings():
    # It warns where only its Python fallback is there; ``checksum_problem`` says so in one line of our own.
    warnings.simplefilter("ignore", RuntimeWarning)
    import google_crc32c


def crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """CRC-32C of contiguous bytes; reads an array in place. Holds the GIL (at about 20 GB/s)."""
    value: int = google_crc32c.value(data)
    return value


def checksum_problem() -> str | None:
    """The reason why this machine cannot check pages at the speed of its disk; None where it can.

    The C library picks SSE 4.2 or the ARMv8 CRC instructions at run time and has portable code for other
    processors. The package's Python fallback is a thousand times slower than either.
    """
    if google_crc32c.implementation == "c":
        return None
    return "google-crc32c runs without its C library here: install a google-crc32c wheel for this platform"
