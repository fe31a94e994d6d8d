"""What sglang's handlers raise at a message costs that message alone; an abort ends one request."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import (
    AbortReq,
    ExpertDistributionReq,
    ExpertDistributionReqType,
    ProfileReq,
    ProfileReqOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.utils import TypeBasedDispatcher

from sglang_importance.scheduler.message_intake import ANSWERING_NO, BATCHES, guard_messages


class Scheduler(SimpleNamespace):
    """As much of sglang's as the guards look at; ``handle`` raises what a test has put there."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(
            chunked_req=None,
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            session_controller=SimpleNamespace(get=lambda name: None),
            server_args=SimpleNamespace(tokenizer_worker_num=1),
            sent=[],
            aborted=[],
            error=None,
        )
        vars(self).update(fields)
        channel = SimpleNamespace(send_output=lambda answer, request: self.sent.append(answer))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=channel)
        kinds = [*BATCHES, *BATCHES.values(), ProfileReq, ExpertDistributionReq]
        handlers: list[tuple[type, Any]] = [(kind, self.handle) for kind in kinds]
        from sglang.srt.managers import io_struct

        handlers += [(getattr(io_struct, name), self.handle) for name in ANSWERING_NO]
        self._request_dispatcher = TypeBasedDispatcher([*handlers, (AbortReq, self.abort_request)])
        guard_messages(self)  # type: ignore[arg-type]

    def handle(self, request: Any) -> Any:
        if self.error is not None:
            raise self.error
        return request

    def abort_request(self, request: AbortReq) -> None:
        held = [*self.waiting_queue, *self.collect_inflight_reqs()]
        self.aborted += [each for each in held if request.abort_all or each.rid.startswith(request.rid)]
        if (queue := getattr(self, "disagg_decode_prealloc_queue", None)) is not None:
            held = queue.retracted_queue
            stays = [not (request.abort_all or each.rid.startswith(request.rid)) for each in held]
            queue.retracted_queue = list(compress(held, stays))

    def collect_inflight_reqs(self) -> set[Any]:
        return set()

    def take(self, message: Any) -> Any:
        return self._request_dispatcher(message)


def request(rid: str, session_params: Any = None) -> Any:
    """msgspec looks at types where it decodes, not here."""
    needed = [field.name for field in msgspec.structs.fields(TokenizedGenerateReqInput) if field.required]
    fields = {**dict.fromkeys(needed), "rid": rid, "session_params": session_params}
    return TokenizedGenerateReqInput(**fields)


@pytest.mark.parametrize("error", [KeyError("a"), RuntimeError("changed size"), ValueError("rid: no")])
def test_a_request_that_cannot_be_taken_in_is_refused_alone(error: Exception) -> None:
    scheduler = Scheduler()
    scheduler.error = error
    assert scheduler.take(request("a")) is None
    (answer,) = scheduler.sent
    assert answer.rid == "a"
    assert answer.finished_reason["status_code"] == 400
    assert str(error).strip("'") in answer.finished_reason["message"]
    scheduler.error = None
    assert scheduler.take(request("b")).rid == "b"


def failing_in(file: Path) -> Scheduler:
    """Whose handler of requests raises below a function of this file."""

    def fail(message: Any) -> None:
        raise AssertionError("it is broken")

    names: dict[str, Any] = {}
    exec(compile("def handle(request, fail): fail(request)", str(file), "exec"), names)
    scheduler = Scheduler()
    scheduler.handle = lambda request: names["handle"](request, fail)
    scheduler._request_dispatcher._mapping[TokenizedGenerateReqInput] = scheduler.handle
    guard_messages(scheduler)  # type: ignore[arg-type]
    return scheduler


@pytest.mark.parametrize(
    "module", ["sglang.srt.mem_cache.unified_radix_cache", "sglang_importance.cache.component"]
)
def test_what_the_radix_cache_raises_stays_fatal(module: str) -> None:
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    scheduler = failing_in(Path(found.origin))
    with pytest.raises(AssertionError, match="it is broken"):
        scheduler.take(request("a"))
    assert not scheduler.sent


@pytest.mark.parametrize("folder", ["sglang_importance", "mem_cache"])
def test_where_sglang_is_installed_makes_nothing_fatal(folder: str) -> None:
    scheduler = failing_in(Path(f"/srv/{folder}/.venv/sglang/srt/managers/scheduler.py"))
    assert scheduler.take(request("a")) is None
    assert len(scheduler.sent) == 1


def test_an_id_in_flight_comes_from_no_other_worker() -> None:
    """Two at their ends in one step would end sglang's detokenizer."""
    scheduler = Scheduler(waiting_queue=[SimpleNamespace(rid="a")])
    assert scheduler.take(request("a")).rid == "a", "the one worker has looked"
    scheduler.server_args.tokenizer_worker_num = 2
    assert scheduler.take(request("a")) is None
    assert scheduler.sent[0].finished_reason["message"].startswith("rid: ")
    assert scheduler.take(request("b")).rid == "b"


@pytest.mark.parametrize("rid", ["\0", "\0a"])
def test_no_id_is_the_beginning_of_all(rid: str) -> None:
    scheduler = Scheduler(waiting_queue=[SimpleNamespace(rid=each) for each in (rid, "a", "ab")])
    scheduler.take(AbortReq(rid=rid))
    assert [each.rid for each in scheduler.aborted] == [rid]


def test_an_abort_finds_the_id_itself_and_leaves_the_others_theirs() -> None:
    held = [SimpleNamespace(rid=rid) for rid in ("a", "ab", "a/1", "b")]
    scheduler = Scheduler(waiting_queue=held)
    scheduler.take(AbortReq(rid="a"))
    assert [each.rid for each in scheduler.aborted] == ["a"]
    assert [each.rid for each in held] == ["a", "ab", "a/1", "b"]
    scheduler.aborted.clear()
    scheduler.abort_request(AbortReq(rid="a"))  # sglang's own call
    assert [each.rid for each in scheduler.aborted] == ["a"]
    scheduler.aborted.clear()
    scheduler.take(AbortReq(abort_all=True))
    assert len(scheduler.aborted) == 4


class Named:
    """A waiting request that counts how often its id is read and written."""

    def __init__(self, rid: str) -> None:
        self._rid = rid
        self.reads = self.writes = 0

    @property
    def rid(self) -> str:
        self.reads += 1
        return self._rid

    @rid.setter
    def rid(self, rid: str) -> None:
        self.writes += 1
        self._rid = rid


def test_an_abort_touches_no_request_whose_id_begins_otherwise() -> None:
    held = [Named(f"{number}-a") for number in range(10, 30)]
    scheduler = Scheduler(waiting_queue=held)
    scheduler.take(AbortReq(rid="1"))
    assert not scheduler.aborted
    assert [each.writes for each in held] == [2] * 10 + [0] * 10


def test_the_search_for_an_id_in_flight_ends_where_it_is_found() -> None:
    held = [Named(str(number)) for number in range(20)]
    scheduler = Scheduler(waiting_queue=held)
    scheduler.server_args.tokenizer_worker_num = 2
    assert scheduler.take(request("3")) is None
    assert [each.reads for each in held] == [1] * 4 + [0] * 16


@pytest.mark.parametrize("abort", [AbortReq(rid="a"), AbortReq(abort_all=True)], ids=["one", "all"])
def test_a_cache_hears_of_retracted_requests_that_a_decode_server_aborts(abort: AbortReq) -> None:
    retracted = SimpleNamespace(queue=[], retracted_queue=[SimpleNamespace(rid=rid) for rid in ("a", "ab")])
    heard: list[str] = []
    cache = SimpleNamespace(importance=SimpleNamespace(gave_up_waiting=heard.append))
    scheduler = Scheduler(disagg_decode_prealloc_queue=retracted, tree_cache=cache)
    scheduler.take(AbortReq(rid="b"))
    assert not heard
    scheduler.take(abort)
    assert heard == (["a", "ab"] if abort.abort_all else ["a"])


def test_a_session_refuses_what_would_hide_its_requests() -> None:
    node = SimpleNamespace(req=SimpleNamespace(cache_salt=None, extra_key=None, finished_reason=None))
    session = SimpleNamespace(streaming=False, req_nodes={"a": node})
    scheduler = Scheduler(session_controller=SimpleNamespace(get={"s": session}.get))

    def said(own: str, **params: Any) -> str:
        scheduler.sent.clear()
        named = SimpleNamespace(id="s", rid=None, replace=None)
        vars(named).update(params)
        scheduler.take(request(own, session_params=named))
        return scheduler.sent[0].finished_reason["message"] if scheduler.sent else ""

    assert said("a").startswith("rid: ")
    assert said("b", replace=True).startswith("session_params.replace: ")
    assert said("b", replace=True, rid="a") == said("b") == ""
    node.req.finished_reason = FINISH_ABORT("too long", 400)
    assert said("b", rid="a").startswith("session_params.rid: that request was refused")
    node.req.finished_reason = FINISH_ABORT()  # by its client, who may go on from what was answered
    assert said("b", rid="a") == ""
    node.req.cache_salt = "another's"
    assert said("b", rid="a").startswith(
        "session_params.rid: the session has no such request of this cache_salt"
    )


def test_an_operator_is_told_what_did_not_work() -> None:
    scheduler = Scheduler()
    scheduler.error = FileNotFoundError("no such folder")
    answer = scheduler.take(ProfileReq())
    assert isinstance(answer, ProfileReqOutput)
    assert not answer.success
    assert "no such folder" in answer.message
    with pytest.raises(FileNotFoundError):  # its answer has no place for it: routes refuse it before
        scheduler.take(ExpertDistributionReq(action=ExpertDistributionReqType.START_RECORD))
