"""Which code a replay ran: rows of two versions must not stand in one table."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xxhash import xxh3_64

import sgl_importance
import sgl_importance_lab


@cache
def source_digest() -> str:
    """Of all modules of core and laboratory, without their dependencies'; 16 hexadecimal digits."""
    digest = xxh3_64()
    for package in (sgl_importance, sgl_importance_lab):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder.parent)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
