"""What differs between releases of sglang: each form, and the form of the sglang that is installed."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_importance.upstream.differences import (
    host_pool,
    insert_finished,
    insert_unfinished,
    is_chunk,
    lock_match,
    matched_slots,
    release,
    release_requests,
)


def request(*, extend_end: int | None, tokens: int = 100, finished: bool = False) -> Any:
    return SimpleNamespace(
        extend_end=extend_end, full_untruncated_fill_ids=[0] * tokens, finished=lambda: finished
    )


@pytest.mark.parametrize("chunked", [True, False])
def test_a_release_that_says_what_is_a_chunk_is_believed(chunked: bool) -> None:
    params: Any = SimpleNamespace(chunked=chunked)
    assert is_chunk(request(extend_end=100), params) is chunked


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"extend_end": 64}, True),
        ({"extend_end": 100}, False),
        ({"extend_end": 64, "finished": True}, False),
        ({"extend_end": None}, False),
    ],
)
def test_else_a_chunk_ends_before_what_its_round_computes(changes: dict[str, Any], chunk: bool) -> None:
    params: Any = SimpleNamespace(inserted_len=0)
    assert is_chunk(request(**changes), params) is chunk
    assert is_chunk(request(**changes), None) is False


def test_the_installed_release_has_one_of_the_forms() -> None:
    fields = set(InsertParams.__dataclass_fields__)
    assert "chunked" in fields or "inserted_len" in fields
    if "chunked" not in fields:
        source = inspect.getsource(Req)
        assert "self.extend_end" in source
        assert "self.full_untruncated_fill_ids" in source


def test_requests_are_released_in_the_form_that_upstream_takes() -> None:
    manager: Any = SimpleNamespace(rid_to_state={"a": 1, "b": 2})
    manager._release_req_states_on_failure = lambda rids: released.append(rids)
    released: list[Any] = []
    release_requests(manager, ["a", "c"])
    manager._release_req_states_on_failure = lambda request_states: released.append(request_states)
    release_requests(manager, ["a", "c"])
    assert released == [["a", "c"], {"a": 1}]
    (parameter,) = list(inspect.signature(TokenizerManager._release_req_states_on_failure).parameters)[1:]
    assert parameter in ("rids", "request_states")


def test_a_host_pool_holds_the_pages_of_its_device_pool() -> None:
    device = MHATokenToKVPool(
        size=64,
        page_size=16,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    pool = host_pool(device, 2.0, 16, "page_first", pin_memory=False)
    assert pool.kv_buffer.numel() >= 2 * 2 * 64 * 2 * 8 * 3
    assert (pool.head_num, pool.head_dim, pool.layer_num, pool.page_size) == (2, 8, 3, 16)


class _Calls:
    """A cache that writes down what it is asked, with the methods of one form alone."""

    def __init__(self, *methods: str) -> None:
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for name in methods:
            setattr(self, name, partial(self._ask, name))

    def _ask(self, name: str, *args: Any, **named: Any) -> Any:
        self.asked.append((name, args, named))
        return SimpleNamespace(to_dec_params=lambda: "receipt")


def test_up_to_0_5_21_a_request_is_cached_while_it_runs_and_inserted_at_its_end() -> None:
    cache: Any = _Calls("inc_lock_ref", "cache_unfinished_req", "insert_req", "unpin", "on_release")
    request = SimpleNamespace(last_node=7)
    lock_match(cache, request)
    insert_unfinished(cache, request, up_to=64, is_chunk=True)
    insert_finished(cache, request, up_to=90)
    release(cache, request, inserted=True)
    assert request.lock_receipt == "receipt"
    assert cache.asked == [
        ("inc_lock_ref", (7,), {}),
        ("cache_unfinished_req", (request,), {"chunked": True}),
        ("insert_req", (request,), {"up_to": 90}),
        ("unpin", (request,), {}),
        ("on_release", (request,), {"inserted": True}),
    ]


def test_later_a_request_has_checkpoints_and_a_lock_of_its_own() -> None:
    cache: Any = _Calls("lock", "checkpoint", "unlock", "on_release")
    request = SimpleNamespace(last_node=7)
    lock_match(cache, request)
    lock = request.lock
    insert_unfinished(cache, request, up_to=64, is_chunk=True)
    insert_finished(cache, request, up_to=90)
    release(cache, request, inserted=False)
    assert request.lock is None
    assert cache.asked == [
        ("lock", (7,), {}),
        ("checkpoint", (request,), {"up_to": 64}),
        ("checkpoint", (request,), {"up_to": 90}),
        ("unlock", (lock,), {}),
        ("on_release", (request,), {"checkpointed": False}),
    ]


def test_what_a_match_found_is_in_it_or_on_the_path_to_its_node() -> None:
    slots = torch.arange(10)
    cache: Any = SimpleNamespace(path_device_indices={7: slots}.get)
    assert matched_slots(cache, SimpleNamespace(device_indices=slots)) is slots  # type: ignore[arg-type]
    later: Any = SimpleNamespace(last_device_node=7, device_prefix_len=6)
    assert matched_slots(cache, later).tolist() == list(range(6))
