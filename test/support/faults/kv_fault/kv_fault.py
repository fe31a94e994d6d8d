"""A plugin for the negative control: damages one page of one layer, once, on its way back from the host.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

LAYER = 1
_damaged = False


def load_and_damage(
    load: Any,
    host: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer: int,
    *rest: Any,
    **options: Any,
) -> None:
    """Loads a layer; the first time, the values of one page arrive as garbage."""
    global _damaged
    load(host, device_pool, host_indices, device_indices, layer, *rest, **options)
    if layer != LAYER or _damaged or len(device_indices) < 2 * host.page_size:
        return
    page = device_indices[: host.page_size]
    # Random weights attend almost evenly: keys of a wrong slot would hardly show, wrong values do.
    device_pool.v_buffer[layer][page] *= -8
    _damaged = True
    logger.info("kv_fault: damaged %d tokens of layer %d", len(page), layer)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
        load_and_damage,
        HookType.AROUND,
    )
