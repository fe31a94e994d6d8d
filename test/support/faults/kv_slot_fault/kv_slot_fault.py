"""A plugin for the negative control of tiered pages: damages one slot of one layer, once.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

LAYER = 1
_damaged = False


def place_and_damage(place: Any, slots: Any, layer: int, pages: Any, **named: Any) -> Any:
    global _damaged
    places = place(slots, layer, pages, **named)
    kept = places[(places >= slots.num_frames) & (places < slots.num_slots)]
    if layer == LAYER and not _damaged and len(kept):
        slots.values[layer, kept[0]] *= -8
        _damaged = True
        logger.info("kv_slot_fault: damaged a slot of layer %d", layer)
    return places


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sgl_importance_kernels.sparse.page_slots.PageSlots.place", place_and_damage, HookType.AROUND
    )
