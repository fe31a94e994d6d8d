"""Threads of attention to a KV pool: as many as torch has, whatever is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from sgl_importance_kernels import pool_attention
from sgl_importance_kernels.pool_attention import CHUNK_TOKENS, attend_pool

THREADS, DIM = 4, 8


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    pool_attention._helpers.cache_clear()
    yield
    pool_attention._helpers().shutdown()
    pool_attention._helpers.cache_clear()


@pytest.mark.usefixtures("helpers")
def test_all_lengths_of_contexts_share_the_same_threads() -> None:
    before = set(threading.enumerate())
    for chunks in range(2, 2 * THREADS):
        keys = torch.randn(chunks * CHUNK_TOKENS, 1, DIM)
        queries, context = torch.randn(1, 1, DIM), torch.arange(len(keys))
        outputs, _ = attend_pool(queries, keys, keys, [context], 1.0)
        weights = (keys[:, 0] @ queries[0, 0]).softmax(0)
        torch.testing.assert_close(outputs[0, 0], weights @ keys[:, 0], atol=1e-4, rtol=1e-4)
    assert 0 < len(set(threading.enumerate()) - before) < THREADS
