"""A plugin for the negative control of selectors: what was computed from chosen pages enters the tree.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import sys
from typing import Any


def find_everything(limit: Any, dense_prefix: Any, params: Any) -> Any:
    limit(dense_prefix, params)
    return params


def insert_everything(insertable: Any, *args: Any) -> int:
    return sys.maxsize


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dense_prefix = "sglang_importance.cache.dense_prefix.DensePrefix"
    HookRegistry.register(f"{dense_prefix}.insertable", insert_everything, HookType.AROUND)
    HookRegistry.register(f"{dense_prefix}.limit", find_everything, HookType.AROUND)
