"""What a scheduler does with a message that sglang cannot take in: it is refused, and the others go on.

sglang lets every exception of its handlers end the server. What a handler of requests raises before it has
touched KV comes from what a client wrote; what it raises in the radix cache stays fatal.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

import sglang_importance

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Any]

BATCHES = {
    BatchTokenizedGenerateReqInput: TokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput: TokenizedEmbeddingReqInput,
}
ANSWERING_NO = ("ProfileReq", "ExpertDistributionReq", "CheckWeightsReqInput", "SlowDownReqInput")
"""Of the operator, by name: they change neither weights nor KV, and their answer can say that nothing came of
them."""
_FATAL = tuple(
    f"{folder}/"
    for folder in (Path(io_struct.__file__).parents[1] / "mem_cache", *sglang_importance.__path__)
)


def guard_messages(scheduler: Scheduler) -> None:
    """Puts a guard around the handlers of a scheduler's dispatcher, in their places."""
    handlers: dict[type, Handler] = scheduler._request_dispatcher._mapping
    for kind in BATCHES.values():
        handlers[kind] = _refusing(scheduler, handlers[kind])
    for batch, kind in BATCHES.items():
        handlers[batch] = _one_by_one(handlers[kind])
    abort: Any = _telling_of_retracted(scheduler, _aborting_one(scheduler, scheduler.abort_request))
    handlers[AbortReq] = scheduler.abort_request = abort  # type: ignore[method-assign]  # sglang calls both
    for name in ANSWERING_NO:
        kind = getattr(io_struct, name)
        handlers[kind] = _answering_no(handlers[kind])


def _refusing(scheduler: Scheduler, handle: Handler) -> Handler:
    def handle_or_refuse(request: Any) -> Any:
        try:
            _check_id(scheduler, request)
            _check_session(scheduler, request)
            return handle(request)
        except Exception as error:
            if _is_fatal(error):
                raise
            reason: Any = {"type": "abort", "status_code": 400, "message": _line(error)}
            answer = AbortReq(
                rid=request.rid, http_worker_ipc=request.http_worker_ipc, finished_reason=reason
            )
            scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
            return None

    return handle_or_refuse


def _one_by_one(handle: Handler) -> Handler:
    def handle_batch(requests: Any) -> None:
        for request in requests:
            handle(request)

    return handle_batch


def _check_id(scheduler: Scheduler, request: Any) -> None:
    """A tokenizer worker knows its own requests' ids; two that are alike would end sglang's detokenizer.

    Raises:
        ValueError: a request with this id is not answered yet.
    """
    arguments: Any = scheduler.server_args  # sglang puts its fields together at import
    if arguments.tokenizer_worker_num > 1 and any(each.rid == request.rid for each in _live(scheduler)):
        raise ValueError("rid: is the id of a request that is not answered yet: give another")


def _check_session(scheduler: Scheduler, request: Any) -> None:
    """sglang keeps the requests of an open session by their ids: a second one would hide the first.

    Raises:
        ValueError: the request cannot go on from what the session holds.
    """
    params: Any = getattr(request, "session_params", None)
    session = scheduler.session_controller.get(params.id) if params is not None else None
    if session is None or session.streaming:
        return
    last = session.req_nodes.get(params.rid)
    if last is not None and (last.req.cache_salt, last.req.extra_key or None) != _namespace(request):
        raise ValueError(
            "session_params.rid: the session has no such request of this cache_salt, extra_key and adapter"
        )
    if last is not None and getattr(last.req.finished_reason, "status_code", None) is not None:
        # sglang has put one token in its prompt's place, and would go on from that.
        raise ValueError("session_params.rid: that request was refused: go on from the one before")
    if request.rid in session.req_nodes:
        raise ValueError("rid: the session has answered a request with this id: give another")
    if params.replace and params.rid is None and session.req_nodes:
        raise ValueError(
            "session_params.replace: needs the rid of the request to go on from, or a new session"
        )


def _namespace(request: Any) -> tuple[str | None, str | None]:
    """Salt and key that sglang's ``Req`` will have: an adapter's id stands behind the key."""
    return request.cache_salt or None, (request.extra_key or "") + (request.lora_id or "") or None


def _aborting_one(scheduler: Scheduler, abort: Handler) -> Handler:
    """sglang ends every request whose id begins with the one that is aborted: other clients' too."""

    def abort_one(request: AbortReq) -> Any:
        if request.abort_all:
            return abort(request)
        alike = {id(each): each for each in _live(scheduler) if each.rid.startswith(request.rid)}
        with _hidden(each for each in alike.values() if each.rid != request.rid):
            return abort(request)

    return abort_one


def _telling_of_retracted(scheduler: Scheduler, abort: Handler) -> Handler:
    """A decode server forgets a retracted request without a word to its cache."""

    def abort_and_tell(request: AbortReq) -> Any:
        before = _retracted(scheduler)
        answer = abort(request)
        if before:
            left = set(map(id, _retracted(scheduler)))
            cache: Any = scheduler.tree_cache
            for each in before:
                if id(each) not in left:
                    cache.importance.gave_up_waiting(each.rid)
        return answer

    return abort_and_tell


def _retracted(scheduler: Scheduler) -> list[Any]:
    return list(getattr(getattr(scheduler, "disagg_decode_prealloc_queue", None), "retracted_queue", ()))


@contextmanager
def _hidden(requests: Iterator[Any]) -> Iterator[None]:
    """Requests without an id, which begins like nothing else."""
    ids = [(each, each.rid) for each in requests]
    for each, _ in ids:
        each.rid = ""
    try:
        yield
    finally:
        for each, rid in ids:
            each.rid = rid


def _live(scheduler: Scheduler) -> Iterator[Any]:
    """Every request that an abort looks at, some twice."""
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    yield from scheduler.collect_inflight_reqs()
    yield from getattr(scheduler, "disagg_prefill_inflight_queue", None) or ()
    for name in (
        "disagg_prefill_bootstrap_queue",
        "disagg_decode_prealloc_queue",
        "disagg_decode_transfer_queue",
    ):
        queue = getattr(scheduler, name, None)
        for each in (*getattr(queue, "queue", ()), *getattr(queue, "retracted_queue", ())):
            yield getattr(each, "req", each)


def _answering_no(handle: Handler) -> Handler:
    def handle_or_say_no(request: Any) -> Any:
        try:
            return handle(request)
        except Exception as error:
            if _is_fatal(error):
                raise
            output: Any = getattr(io_struct, f"{type(request).__name__}Output", None)
            fields = getattr(output, "__struct_fields__", ())
            if "success" not in fields:
                raise
            return output(success=False, message=_line(error))

    return handle_or_say_no


def _is_fatal(error: Exception) -> bool:
    """Whether it was raised below the handler's own reading: in the radix cache, or in our part of it."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.startswith(_FATAL) for file in files if not file.endswith("/message_intake.py"))


def _line(error: Exception) -> str:
    if type(error) is ValueError:
        return " ".join(str(error).split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.warning(
        "KV importance: sglang cannot take in a message: %s at %s:%d",
        type(error).__name__,
        place.filename,
        place.lineno,
    )
    said = " ".join(str(error).split())[:200]
    return f"sglang cannot take this in ({type(error).__name__}: {said})"
