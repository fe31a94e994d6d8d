"""A server whose pages lie in a chain of tiers: the right tokens from each, also after it was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sgl_importance.metrics_table import PREFIX, TIER

from support.servers import ServerProcess
from support.store_bench import PAGE_TOKENS, PROMPT_PAGES, answer, count, flush, store_flags, wait_for_memory
from support.waiting import wait_until

pytestmark = pytest.mark.server

ASKED = 16


def tier_count(server: ServerProcess, name: str, tier: str) -> float:
    try:
        return server.metric(f"{PREFIX}{TIER}{name}_total", tier=tier)
    except KeyError:
        return 0


def test_a_chain_of_tiers(models: list[Path], references: list[list[list[int]]], tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text(
        '[[tier]]\nkind = "dram"\ncapacity = "1MB"\n'
        f'[[tier]]\nkind = "cxl"\ncapacity = "1MB"\nfolder = "{tmp_path / "cxl"}"\ninject_latency_us = 10\n'
        f'[[tier]]\nkind = "nvme"\ncapacity = "1MB"\nfolder = "{tmp_path / "nvme"}"\n'
        '[[tier]]\nkind = "hicache"\nbackend = "file"\ncapacity = "50MB"\nconfig = {max_size = "100M"}\n'
        f'folder = "{tmp_path / "index"}"\n'
    )
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "upstream")}
    flags = (
        *store_flags(tmp_path / "store"),
        "--kv-policy",
        "importance",
        "--kv-importance-tiers",
        str(file),
    )

    def ask(server: ServerProcess, index: int) -> int:
        reply = answer(server, index)
        assert reply["output_ids"] == references[0][index], f"wrong tokens for prompt {index}"
        return (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)

    wait_for_memory()
    with ServerProcess(*flags, model=models[0], env=env) as server:
        for index in range(ASKED):
            ask(server, index)
        wait_until(lambda: count(server, "written_pages") >= ASKED * PROMPT_PAGES)
        flush(server)
        # Last stored first: what comes up takes the place of what lies in the fastest tier.
        served = [ask(server, index) for index in reversed(range(ASKED))]
        assert served == [PROMPT_PAGES * PAGE_TOKENS] * ASKED
        hits = {tier: tier_count(server, "hit_pages", tier) for tier in ("dram", "cxl", "nvme", "hicache")}
        assert all(hits.values()), hits
        assert sum(hits.values()) >= ASKED * PROMPT_PAGES
        assert ask(server, ASKED - 1) == 0, "it is on the device"
        assert hits == {tier: tier_count(server, "hit_pages", tier) for tier in hits}, "a tier was asked"
        chain = server.get("/kv_importance", limit=1)["store_tiers"]
        assert chain["ranking"] == "predicted reuse"
        assert [tier["state"] for tier in chain["tiers"]] == ["in use"] * 4
        assert all(tier["pages"] for tier in chain["tiers"])

        def is_on_the_live_page() -> bool:  # pages may still move from tier to tier behind the answers
            shown = server.get("/kv_importance/tree", limit=1)["store_tiers"]
            return bool(shown == server.get("/kv_importance", limit=1)["store_tiers"])

        wait_until(is_on_the_live_page)
        os.killpg(server.pid, signal.SIGKILL)
    wait_for_memory()
    with ServerProcess(*flags, "--kv-importance-prewarm", "off", model=models[0], env=env) as server:
        (dram, *rest) = server.get("/kv_importance", limit=1)["store_tiers"]["tiers"]
        assert dram["pages"] == 0
        assert all(tier["pages"] for tier in rest), rest
        served = [ask(server, index) for index in range(ASKED)]
        assert max(served) == PROMPT_PAGES * PAGE_TOKENS, "the killed server left nothing that can be reached"
