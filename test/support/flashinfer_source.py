"""FlashInfer as files: its headers to compile against, its Python source to read. It is not imported."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def flashinfer_package() -> Path | None:
    """Folder of the package: beside FLASHINFER_DATA, installed, or where ``scripts/setup.sh`` unpacks it."""
    if named := os.environ.get("FLASHINFER_DATA"):
        return Path(named).parent
    # By its metadata: among the modules there may be a stand-in.
    with suppress(PackageNotFoundError):
        return Path(str(distribution("flashinfer-python").locate_file("flashinfer")))
    unpacked = Path(sys.prefix) / "flashinfer" / "flashinfer"
    return unpacked if (unpacked / "data").is_dir() else None
