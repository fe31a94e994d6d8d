"""``observe`` leaves stock's evictions as they are: same tokens, same number of evicted tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import ServerProcess
from workload import POOL_FLAGS, POOL_TOKENS, Exchange, replay

pytestmark = pytest.mark.server

EXCHANGES = 120
FLAGS = (*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16")


def test_observe_evicts_as_stock_does(random_model: Path, exchanges: list[Exchange]):
    part = exchanges[:EXCHANGES]
    # The Rust core is stock's default; its LRU order is the same, but observe runs on the Python core.
    python_core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with ServerProcess("--kv-policy", "default", *FLAGS, model=random_model, env=python_core) as stock:
        stock_replay = replay(stock, part, concurrency=1)
        stock_evicted = stock.metric("sglang:evicted_tokens_total")
    with ServerProcess("--kv-policy", "observe", *FLAGS, model=random_model) as observing:
        observed = replay(observing, part, concurrency=1)
        own_count = observing.metric("sglang:kv_importance_evicted_tokens_total", tier="device")
        upstream_count = observing.metric("sglang:evicted_tokens_total")
    print(f"evicted tokens: stock {stock_evicted:.0f}, observe {own_count:.0f}")
    assert observed.differing == stock_replay.differing == []
    assert observed.hit_tokens == stock_replay.hit_tokens
    assert own_count == upstream_count == stock_evicted > 0
