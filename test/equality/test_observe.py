"""``observe`` leaves stock's evictions as they are: same tokens, same number of evicted tokens."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from sgl_importance.placement.hints.hints import Hints

from support.served import script_server
from support.servers import ServerProcess
from support.workloads.exchanges import POOL_FLAGS, POOL_TOKENS, Exchange, replay

pytestmark = pytest.mark.server

EXCHANGES = 40
FLAGS = (*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16")


def test_observe_evicts_as_stock_does(random_model: Path, exchanges: list[Exchange]):
    part = exchanges[:EXCHANGES]
    # The Rust core is stock's default; its LRU order is the same, but observe runs on the Python core.
    python_core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with script_server("--kv-policy", "default", *FLAGS, model=random_model, env=python_core) as stock:
        stock_replay = replay(stock, part, concurrency=1)
        stock_evicted = stock.metric("sglang:evicted_tokens_total")
        check_hints_of_stock(stock)
    with script_server("--kv-policy", "observe", *FLAGS, model=random_model) as observing:
        observed = replay(observing, part, concurrency=1)
        own_count = observing.metric("sglang:kv_importance_evicted_tokens_total", tier="device")
        upstream_count = observing.metric("sglang:evicted_tokens_total")
        check_hints_of_observe(observing)
    print(f"evicted tokens: stock {stock_evicted:.0f}, observe {own_count:.0f}")
    assert observed.differing == stock_replay.differing == []
    assert observed.hit_tokens == stock_replay.hit_tokens
    assert own_count == upstream_count == stock_evicted > 0


def check_hints_of_stock(stock: ServerProcess) -> None:
    """Without our policy the plain form is none that sglang knows, and an envelope has no effect."""
    body = {"input_ids": list(range(40, 80)), "sampling_params": {"max_new_tokens": 2}}
    with pytest.raises(httpx.HTTPStatusError) as refused:
        stock.post("/generate", {**body, "kv_hints": {"report": True}})
    assert "Malformed kv_hints envelope" in refused.value.response.text
    answer = stock.post("/generate", {**body, "kv_hints": Hints(report=True, prefetch=True).envelope()})
    assert answer["meta_info"]["completion_tokens"] == 2
    assert "kv_importance" not in answer["meta_info"]


def check_hints_of_observe(server: ServerProcess) -> None:
    """Hints are taken and reported on, but those that would move something do not."""
    body = {"input_ids": list(range(40, 80)), "sampling_params": {"max_new_tokens": 2}}
    for hint, value in (("drop_after_use", True), ("retain", {"ttl_seconds": 60})):
        answer = server.post("/generate", {**body, "kv_hints": {hint: value, "report": True}})
        outcome = answer["meta_info"]["kv_importance"]["hints"][hint]
        assert outcome == {"applied": False, "reason": "--kv-policy observe keeps stock's evictions"}
