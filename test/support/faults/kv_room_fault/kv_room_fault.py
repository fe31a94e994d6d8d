"""A plugin that takes room away, once between two chunks of a prompt, and once from a request that preempts.

Copies to lower tiers lock pages so.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

LEFT_TOKENS = 48
PASSES = 3
_taken: Any = None
_passes = 0
_refused = False


def take_room_for_some_passes(add_chunked_req: Any, adder: Any, request: Any) -> Any:
    global _taken, _passes
    allocator = adder.token_to_kv_pool_allocator
    if _passes == 0:
        _taken = allocator.alloc(allocator.available_size() - LEFT_TOKENS)
    elif _passes == PASSES:
        allocator.free(_taken)
    before = len(adder.can_run_list)
    left = add_chunked_req(adder, request)
    if _passes <= PASSES:
        admitted = _chunk_tokens(request) if len(adder.can_run_list) > before else 0
        logger.info("kv_room_fault: pass %d, a chunk of %d tokens", _passes, admitted)
    _passes += 1
    return left


def refuse_who_has_preempted(add_one_req: Any, adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    global _refused
    if adder.preempt_list and not _refused:
        _refused = True
        logger.info("kv_room_fault: preempted %s", [each.rid for each in adder.preempt_list])
        return AddReqResult.NO_TOKEN
    return add_one_req(adder, request, *args, **kwargs)


def _chunk_tokens(request: Any) -> int:
    """Length of the chunk that was just admitted: a range up to sglang 0.5.21, a number in later releases."""
    extent = getattr(request, "extend_range", None)
    return int(request.extend_len if extent is None else extent.length)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    HookRegistry.register(f"{adder}.add_one_req", refuse_who_has_preempted, HookType.AROUND)

    HookRegistry.register(f"{adder}.add_chunked_req", take_room_for_some_passes, HookType.AROUND)
