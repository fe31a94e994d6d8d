"""A plugin that writes down every victim of an eviction, in order: one file for each scheduler.

``VICTIM_LOG`` names the folder, ``dp<replica>-tp<rank>`` a file of it. Found by sglang through the folder's
dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "VICTIM_LOG"


def _note(tier: str, node: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    file = Path(os.environ[FOLDER]) / f"dp{parallel.dp_rank or parallel.attn_dp_rank}-tp{parallel.tp_rank}"
    with file.open("a") as log:
        log.write(f"{tier} {node.id} {list(node.key.raw_token_ids())}\n")


def _noting(evict: Callable[..., Any], tier: str, find: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def evict_and_note(core: Any, victim: Any, *args: Any, **kwargs: Any) -> Any:
        _note(tier, find(core, victim))
        return evict(core, victim, *args, **kwargs)

    return evict_and_note


def register() -> None:
    if multiprocessing.parent_process() is None or FOLDER not in os.environ:
        return
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore as Core

    Core.evict_device_leaf = _noting(
        Core.evict_device_leaf, "device", lambda core, node: core.node_by_id(node)
    )
    Core._evict_host_leaf = _noting(Core._evict_host_leaf, "host", lambda core, node: node)
