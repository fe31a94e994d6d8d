"""Messages that only an idle scheduler may follow wait until it is idle, or are refused; stock sglang ends.

A weight update comes when all requests have their answers. The scheduler may still run: for a client that has
left, or one step ahead of the last answer. sglang then loads the weights, cannot flush the cache, and ends.
Behind a pause that retracts, nothing runs, but copies to and from a host tier may be under way, which sglang
only looks at where it schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import io_struct

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

Handler = Callable[[Any], Any]

NEEDING_IDLENESS = (
    *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromDistributedReqInput"),
    *("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromIPCReqInput", "ReleaseMemoryOccupationReqInput"),
)
COPIES = ("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup")
"""Of a cache with a host tier, by what sglang calls its books."""
HELD = (
    "requests are held where they are (pause_generation, mode in_place), and the cache cannot be flushed: "
    "pause with mode retract or abort, or send flush_cache: false"
)


class IdleMessages:
    """What waits for a scheduler to be idle.

    Of several ranks each decides alone, and all the same: they take in and run the same requests in step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Any = scheduler
        self._waiting: deque[tuple[Handler, Any]] = deque()

    def when_idle(self, handle: Handler) -> Handler:
        """Around a handler of the dispatcher; None where the answer comes later."""

        def handle_when_idle(request: Any) -> Any:
            if not getattr(request, "flush_cache", True) or (not self._waiting and self._is_idle()):
                return handle(request)
            output: Any = getattr(io_struct, type(request).__name__.removesuffix("Input") + "Output")
            if "success" in output.__struct_fields__ and self._holds_requests():
                return output(success=False, message=HELD)
            self._waiting.append((handle, request))
            return None

        return handle_when_idle

    def _holds_requests(self) -> bool:
        """Whether a pause keeps the scheduler from being idle, and not only copies that end by themselves."""
        return bool(self._scheduler._engine_paused) and not self._is_idle() and not self._copies()

    def _copies(self) -> bool:
        """Whether a host tier or storage is still being written or read."""
        if not self._scheduler.enable_hierarchical_cache:
            return False
        cache = self._scheduler.tree_cache
        pipeline = cache.buffer_pipeline
        return any(map(len, (getattr(cache, name) for name in COPIES))) or not (
            pipeline is None or pipeline.is_idle()
        )

    def _end_copies(self) -> None:
        """What the loop of a paused scheduler leaves out; who waits computes what was on its way to it."""
        cache = self._scheduler.tree_cache
        for request in self._scheduler.waiting_queue:
            cache.stop_prefetching(request.cache_request_handle)
        cache.check_hicache_events()

    def follow(self) -> None:
        """What the scheduler does once a turn of its loop: whatever waits is done if it is idle."""
        if self._waiting and self._scheduler._engine_paused and self._copies():
            self._end_copies()
        while self._waiting and self._is_idle():
            handle, request = self._waiting.popleft()
            answer = handle(request)
            self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)

    def _is_idle(self) -> bool:
        # As ``Scheduler.flush_cache`` looks.
        return bool(self._scheduler.is_fully_idle(ignore_waiting=self._scheduler._engine_paused))


def wait_for_idleness(scheduler: Scheduler) -> None:
    """Puts the wait around the handlers of a scheduler; its loop looks for it where it looks for flushes."""
    arguments: Any = scheduler.server_args  # sglang puts its fields together at import
    if arguments.enable_dp_attention:
        return  # its ranks run different requests: one would load weights while another wants it in a step
    messages = IdleMessages(scheduler)
    handlers: dict[type, Handler] = scheduler._request_dispatcher._mapping
    for name in NEEDING_IDLENESS:
        kind = getattr(io_struct, name)
        handlers[kind] = messages.when_idle(handlers[kind])
    check_flush = scheduler.flush_wrapper.check_pending

    def check_pending() -> None:
        check_flush()
        messages.follow()

    scheduler.flush_wrapper.check_pending = check_pending  # type: ignore[method-assign]  # on this instance
