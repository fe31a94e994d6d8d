"""Files of stored pages, for tests that look at them or damage them."""

from __future__ import annotations

from pathlib import Path

from sgl_importance.storage.page_record import page_digest
from sgl_importance.storage.store import PageStore


def page_file(store: PageStore, identity: bytes, key: str) -> Path:
    """Where the store keeps a page, which need not be there."""
    return store.pages / identity.hex() / f"{page_digest(key).hex()}.page"
