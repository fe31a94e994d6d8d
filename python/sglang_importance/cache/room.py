"""For whom room is being made while the cache evicts, and for what it is emptied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sgl_importance.misses.reason import Cause, NeededBy, Room
from sglang_importance.upstream.hooks import Hook, HookType

UNKNOWN = Room(NeededBy.UNKNOWN)


class RoomNeed:
    """The work of the scheduler that is under way, as far as it needs room.

    Attributes:
        flush_cause: of a flush that comes now.
    """

    def __init__(self) -> None:
        self.flush_cause = Cause.FLUSH
        self._work = NeededBy.UNKNOWN
        self._requests: Sequence[Any] = ()

    @contextmanager
    def needed_by(self, work: NeededBy, requests: Sequence[Any]) -> Iterator[None]:
        """While the work runs, room is made for these requests, which have a ``rid``."""
        before = self._work, self._requests
        self._work, self._requests = work, requests
        try:
            yield
        finally:
            self._work, self._requests = before

    def room(self) -> Room:
        """For whom an eviction makes room now."""
        if not self._requests:
            return UNKNOWN
        return Room(self._work, self._requests[0].rid, len(self._requests) - 1)


def _during(work: NeededBy) -> Callable[..., Any]:
    """A hook around a method of a batch that takes memory."""

    def around(method: Callable[..., Any], batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        # Of our cache where it keeps accounts; a draft model's may be another.
        need: RoomNeed | None = getattr(batch.tree_cache, "room_need", None)
        if need is None:
            return method(batch, *args, **kwargs)
        with need.needed_by(work, batch.reqs):
            return method(batch, *args, **kwargs)

    return around


def _around_flush_after_update(flush: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    need: RoomNeed | None = getattr(updater.scheduler.tree_cache, "room_need", None)
    if need is None:
        return flush(updater, *args, **kwargs)
    need.flush_cause = Cause.WEIGHT_UPDATE
    try:
        return flush(updater, *args, **kwargs)
    finally:
        need.flush_cause = Cause.FLUSH


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_decodes = _during(NeededBy.DECODE)

HOOKS: dict[str, Hook] = {
    f"{_BATCH}.prepare_for_extend": (_during(NeededBy.PREFILL), HookType.AROUND),
    f"{_BATCH}.prepare_for_decode": (_decodes, HookType.AROUND),
    f"{_BATCH}.check_decode_mem": (_decodes, HookType.AROUND),
    f"{_UPDATER}.flush_cache_after_weight_update": (_around_flush_after_update, HookType.AROUND),
}
