"""FlashInfer as files: its headers to compile against, its Python source to read. It is not imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def flashinfer_package() -> Path | None:
    """Folder of the package: beside FLASHINFER_DATA, installed, or where ``scripts/setup.sh`` unpacks it."""
    if named := os.environ.get("FLASHINFER_DATA"):
        return Path(named).parent
    package = importlib.util.find_spec("flashinfer")
    if package is not None and package.origin is not None:
        return Path(package.origin).parent
    unpacked = Path(sys.prefix) / "flashinfer" / "flashinfer"
    return unpacked if (unpacked / "data").is_dir() else None
