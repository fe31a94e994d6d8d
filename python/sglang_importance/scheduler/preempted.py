"""Who was preempted goes back into the queue, whether or not the request that preempted could be run.

sglang 0.5.21 forgets them where that one still waits, for storage or for room, and nothing else runs: they
are never answered (``Scheduler._get_new_batch_prefill_raw``, mended in 0.5.22).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sgl_importance.misses.reason import NeededBy
from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler


def _around_preemption(
    preempt: Callable[[PrefillAdder, Req], bool], adder: PrefillAdder, request: Req
) -> bool:
    before = len(adder.preempt_list)
    done = preempt(adder, request)
    _of_pass(adder.tree_cache).extend(adder.preempt_list[before:])
    return done


def _around_pass(get_batch: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    preempted = _of_pass(scheduler.tree_cache)
    preempted.clear()
    # A chunk that goes on is not named where its room is made (``chunk_room``).
    chunked = () if scheduler.chunked_req is None else (scheduler.chunked_req,)
    with cast(Any, scheduler.tree_cache).making_room(NeededBy.PREFILL, *chunked):
        plan = get_batch(scheduler, *args, **kwargs)
    for request in preempted:
        if all(each is not request for each in scheduler.waiting_queue):
            scheduler._add_request_to_queue(request)
    return plan


def _of_pass(cache: Any) -> list[Req]:
    preempted: list[Req] = cache.importance.preempted
    return preempted


HOOKS: dict[str, Hook] = {
    "sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule": (
        _around_preemption,
        HookType.AROUND,
    ),
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill": (_around_pass, HookType.AROUND),
}
