"""A plugin that tells the store of another release of sglang, as an upgrade would.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

RELEASE = "0.5.99"


def register() -> None:
    from sglang_importance.storage import backend

    backend.version = lambda package: RELEASE
