"""What a machine with a GPU would meet, as far as it is seen without one."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance import plugin
from sglang_importance.launch.flags import select_cache
from sglang_importance.sparse.pool import TieredKVPool
from sglang_importance.storage import weights
from sglang_importance.tree.nominal_costs import token_bytes

from support.device_counts import DeviceCounts

SHAPE: dict[str, Any] = {
    "page_size": 4,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 24,
    "layer_num": 3,
    "enable_memory_saver": False,
}


@pytest.mark.parametrize(
    ("changes", "page_size"),
    [
        ({}, 16),
        ({"speculative_algorithm": "NGRAM"}, None),
        ({"speculative_algorithm": "NGRAM", "page_size": 64}, 64),
        ({"speculative_algorithm": "NGRAM", "attention_backend": "flashinfer"}, 16),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, 16),
        ({"speculative_algorithm": "NGRAM", "device": "cpu"}, 16),
        ({"speculative_algorithm": "EAGLE"}, 16),
    ],
)
def test_trees_of_drafts_keep_pages_of_one_token(
    changes: dict[str, Any], page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = argparse.Namespace(**{"page_size": None, "device": "cuda", **changes})
    select_cache(args, ImportanceOptions(policy="importance"))
    assert args.page_size == page_size


@pytest.mark.parametrize("status", [0, 2])
def test_pinned_pages_take_their_own_bytes_where_they_are(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        assert flags == 0
        pinned.append((address, size))
        return status

    let_go: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=let_go.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    if status:
        with pytest.raises(RuntimeError, match="use a smaller --max-total-tokens"):
            TieredKVPool(100, device="cuda", **SHAPE)
        return
    pool = TieredKVPool(100, device="cuda", **SHAPE)
    assert pool.k_buffer is not None
    assert pool.v_buffer is not None
    assert pinned == [(part.data_ptr(), part.nbytes) for part in (*pool.k_buffer, *pool.v_buffer)]
    assert not let_go
    pool.k_buffer.clear()
    gc.collect()
    assert let_go, "or memory that comes to lie there could not be pinned"
    assert set(let_go) < {address for address, _ in pinned}


def test_a_token_has_the_bytes_of_its_row_whatever_the_pool_says_of_its_size() -> None:
    pool = MHATokenToKVPool(100, device="cpu", enable_alt_stream=False, **SHAPE)
    assert token_bytes(pool, 100) == token_bytes(pool, 17) == 3 * 2 * 2 * 24 * 2


@pytest.mark.parametrize("is_scheduler", [True, False])
def test_only_a_scheduler_gets_the_hooks_of_schedulers(
    is_scheduler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: list[Any] = []
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(plugin, "declare", declared.append)
    if is_scheduler:
        monkeypatch.setitem(sys.modules, plugin.SCHEDULER_MODULE, object())
    else:
        monkeypatch.delitem(sys.modules, plugin.SCHEDULER_MODULE, raising=False)
    plugin.register()
    assert len(declared) == is_scheduler


def test_transposed_weights_are_not_copied_for_their_fingerprint() -> None:
    """As fp8 weights lie: a copy of the largest would come when the KV pool has taken the memory."""
    weight = torch.randn(64, 32).to(torch.float8_e4m3fn).t()
    counts = DeviceCounts()
    with counts.counting():
        weights._sums(weight)
    assert not {"clone", "copy_", "_to_copy"} & set(counts.launches)
    assert weights._sums(weight) != weights._sums(weight.clone().fill_(1.0))
