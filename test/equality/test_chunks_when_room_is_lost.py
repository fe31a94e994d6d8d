"""Who loses room that was counted on waits for it: stock sglang ends, or forgets a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.servers import ServerFailed, ServerProcess
from support.waiting import wait_until
from support.workloads.exchanges import CHUNK_TOKENS, POOL_FLAGS, POOL_TOKENS, VOCABULARY, ask

pytestmark = pytest.mark.server

PROMPT = Random(0).choices(VOCABULARY, k=4 * CHUNK_TOKENS + 100)
ANSWER_TOKENS = 120
FLAGS = (
    *(*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
    *("--max-running-requests", "1", "--enable-priority-scheduling"),
)


@pytest.fixture(scope="module")
def lossy(random_model: Path) -> Iterator[ServerProcess]:
    with script_server(
        *FLAGS, "--kv-policy", "importance", model=random_model, env=python_path(FAULTS / "kv_room_fault")
    ) as server:
        yield server


def test_the_chunk_gets_shorter_then_waits(lossy: ServerProcess) -> None:
    first = ask(lossy, PROMPT, 8)["output_ids"]
    log = lossy.log()
    lossy.flush_cache()
    assert ask(lossy, PROMPT, 8)["output_ids"] == first
    chunks = [
        int(line.split("a chunk of ")[1].split()[0])
        for line in log.splitlines()
        if "kv_room_fault: pass" in line
    ]
    assert chunks == [48, 0, 0, CHUNK_TOKENS]


def test_who_was_preempted_is_answered(lossy: ServerProcess) -> None:
    """Though the request that preempted finds no room in that pass."""

    def ask_with(priority: int, tokens: int) -> list[int]:
        body = {
            "input_ids": PROMPT[priority : priority + 40],
            "priority": priority,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
        }
        answer = httpx.post(f"{lossy.base_url}/generate", json=body, timeout=60, trust_env=False)
        ids: list[int] = answer.raise_for_status().json()["output_ids"]
        return ids

    alone = ask_with(0, ANSWER_TOKENS)
    lossy.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        low = pool.submit(ask_with, 0, ANSWER_TOKENS)
        wait_until(lambda: lossy.metric("sglang:num_running_reqs") > 0 or low.done())
        ask_with(100, 4)
        assert "kv_room_fault: preempted" in lossy.log()
        assert low.result() == alone


@pytest.mark.nightly
def test_stock_ends(random_model: Path) -> None:
    """Once this fails, sglang has mended it: ``cache/chunk_room.py`` can go."""
    lossy = python_path(FAULTS / "kv_room_fault")
    with (
        script_server(*FLAGS, "--kv-policy", "default", model=random_model, env=lossy) as server,
        pytest.raises(ServerFailed, match="Prefill out of memory"),
    ):
        ask(server, PROMPT, 8)
