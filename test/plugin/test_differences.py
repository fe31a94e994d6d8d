"""What differs between releases of sglang: each form, and the form of the sglang that is installed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_importance.upstream.differences import host_pool, is_believed_stored, is_chunk, release_requests


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


@pytest.mark.parametrize("by_pool", [False, True], ids=["one set of all pools", "a set of each pool"])
def test_pages_are_stored_or_on_their_way_in_either_form(*, by_pool: bool) -> None:
    stored, on_their_way = {"a"}, {"b": 1}

    def covers_all(pool: str, hashes: list[str], extra_cover: dict[str, int]) -> bool:
        return pool == "kv" and all(each in stored or each in extra_cover for each in hashes)

    def pool(name: str) -> Any:
        return SimpleNamespace(covered=lambda hashes: covers_all(name, hashes, on_their_way))

    cache: Any = SimpleNamespace(
        storage_existence_cache=SimpleNamespace(**{"pool": pool} if by_pool else {"covers_all": covers_all}),
        buffer_pipeline=SimpleNamespace(**{} if by_pool else {"inflight_backup_hashes": on_their_way}),
    )
    assert is_believed_stored(cache, ["a", "b"])
    assert not is_believed_stored(cache, ["a", "c"])
