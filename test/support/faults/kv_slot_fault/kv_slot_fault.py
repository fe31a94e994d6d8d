"""A plugin for the negative control of tiered pages: damages one slot of one layer, once.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

LAYER = 1
_damaged = False


def keep_and_damage(keep: Any, slots: Any, layer: int, pages: Any, staged: Any) -> None:
    global _damaged
    before = slots.resident_pages()[layer]
    keep(slots, layer, pages, staged)
    if layer != LAYER or _damaged or slots.resident_pages()[layer] == before:
        return
    slots.values[layer, slots._slot_of[layer, pages[0]].long()] *= -8
    _damaged = True
    logger.info("kv_slot_fault: damaged a slot of layer %d", layer)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sgl_importance_kernels.pages.page_slots.PageSlots._keep", keep_and_damage, HookType.AROUND
    )
