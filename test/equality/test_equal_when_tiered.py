"""Tiered pages, read whole, answer with the very tokens of a server that has no radix cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from sgl_importance.metrics_table import PREFIX
from sglang_importance.launch.server_findings import server_findings

from support.config_file import config_flags
from support.nightly_cases import rest_nightly
from support.python_path import FAULTS, python_path
from support.served import script_server
from support.servers import ServerProcess
from support.tiered import tiered_server
from support.workloads.exchanges import (
    POOL_FLAGS,
    VOCABULARY,
    Exchange,
    ask,
    replay,
    replay_long_answers_at_once,
)

pytestmark = pytest.mark.server

SCORES = config_flags(signal={"g": "on"})
LONG_PROMPT_TOKENS = 8000


@pytest.mark.parametrize("least", rest_nightly([150, 300]), ids="at least {}".format)
def test_tokens_equal_those_without_a_radix_cache(
    random_model: Path, exchanges: list[Exchange], tmp_path: Path, least: int
) -> None:
    """Over evictions, storage hits and retractions."""
    assert len(exchanges) >= least
    middle = len(exchanges) // 2
    store = (
        *SCORES,
        "--kv-importance-store",
        str(tmp_path),
        "--hicache-storage-prefetch-policy",
        "wait_complete",
    )
    with tiered_server(random_model, *store) as server:
        crowded = replay_long_answers_at_once(server, exchanges)
        alone = replay(server, exchanges[:middle], concurrency=1)
        together = replay(server, exchanges[middle:], concurrency=8)
        again = replay(server, exchanges[-40:], concurrency=8)
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        document = server.get("/kv_importance?limit=1")
        read, loaded = (server.metric(f"{PREFIX}pages_{name}_total") for name in ("read", "loaded"))
    parts, pages = (crowded, alone, together, again), document["pages"]
    (finding,) = (finding for finding in server_findings(document) if finding.subject == "tiered pages")
    assert "8 requests at a time" in finding.detail
    print([part.retractions for part in parts], [dict(part.hit_tokens) for part in parts], pages)
    assert [part.differing for part in parts] == [[], [], [], []]
    assert crowded.retractions > 0
    for tier in ("device", "storage"):
        assert all(part.hit_tokens[tier] > 0 for part in (alone, together, again))
    assert 0 < loaded < read
    assert sum(pages["device_bytes"].values()) <= pages["device_budget_bytes"]
    longest = max(len(exchange.prompt) for exchange in exchanges)
    assert longest > 4 * pages["device_tokens_per_layer"]


@pytest.mark.nightly
def test_prompts_of_sixteen_times_the_slots_are_answered_as_by_stock(random_model: Path) -> None:
    """Eight at a time, half of them over a document that they share."""
    draws = Random(0)
    document = draws.choices(VOCABULARY, k=LONG_PROMPT_TOKENS - 64)
    shared = [document + draws.choices(VOCABULARY, k=64) for _ in range(4)]
    prompts = shared + [draws.choices(VOCABULARY, k=LONG_PROMPT_TOKENS) for _ in range(4)]
    room = ("--max-total-tokens", str(10 * LONG_PROMPT_TOKENS))

    def answers(server: ServerProcess) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [
                reply["output_ids"] for reply in pool.map(lambda prompt: ask(server, prompt, 48), prompts)
            ]

    stock = ("--kv-policy", "default", "--disable-radix-cache", *POOL_FLAGS)
    with script_server(*stock, *room, model=random_model) as server:
        expected = answers(server)
    with tiered_server(random_model, *SCORES, *room, "--kv-device-tokens", "720") as server:
        cold, warm = answers(server), answers(server)
        pages = server.get("/kv_importance?limit=1")["pages"]
    assert 16 * pages["device_tokens_per_layer"] <= LONG_PROMPT_TOKENS
    assert cold == expected
    assert warm == expected


@pytest.mark.nightly
def test_one_damaged_slot_of_one_layer_changes_tokens(random_model: Path, exchanges: list[Exchange]) -> None:
    with tiered_server(random_model, *SCORES, env=python_path(FAULTS / "kv_slot_fault")) as server:
        for start in range(0, 80, 10):
            differing = replay(server, exchanges[start : start + 10], concurrency=1).differing
            if differing:
                break
        assert server.log().count("kv_slot_fault: damaged a slot of layer 1") == 1
    print(f"{len(differing)} of the answers {start} to {start + 9} differ")
    assert differing
