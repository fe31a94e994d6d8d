"""Which code a replay ran: rows of two versions must not stand in one table."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xxhash import xxh3_64

import sgl_importance


@cache
def source_digest() -> str:
    """Of all modules of the core; 16 hexadecimal digits. Releases of its dependencies are not in it."""
    digest = xxh3_64()
    folder = Path(sgl_importance.__path__[0])
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
