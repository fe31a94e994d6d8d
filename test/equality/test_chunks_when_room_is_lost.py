"""Who loses room that was counted on waits for it: stock sglang ends, or forgets a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.servers import ServerFailed, ServerProcess
from support.workloads.exchanges import CHUNK_TOKENS, POOL_FLAGS, POOL_TOKENS, VOCABULARY, ask

pytestmark = pytest.mark.server

PROMPT = Random(0).choices(VOCABULARY, k=4 * CHUNK_TOKENS + 100)
ANSWER_TOKENS = 400
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

    low = {
        "input_ids": PROMPT[:40],
        "priority": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS},
        "stream": True,
    }
    high = {"input_ids": PROMPT[50:90], "priority": 100, "sampling_params": {"max_new_tokens": 4}}

    def answer(lines: Iterator[str]) -> list[int]:
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return list(chunks[-1]["output_ids"])

    with httpx.Client(base_url=lossy.base_url, timeout=60, trust_env=False) as client:
        with client.stream("POST", "/generate", json=low) as reply:
            alone = answer(reply.iter_lines())
        for _ in range(10):  # until the other request has come while it runs
            with client.stream("POST", "/generate", json=low) as reply:
                lines = reply.iter_lines()
                next(lines)  # it runs, and is the only one that may
                assert client.post("/generate", json=high).status_code == 200
                assert answer(lines) == alone
            if "kv_room_fault: preempted" in lossy.log():
                return
    raise AssertionError("nobody was preempted")


def test_a_prompt_that_fits_no_empty_pool_is_refused(lossy: ServerProcess) -> None:
    """sglang takes it in, and everybody behind it waits for ever."""

    def status(tokens: int) -> int:
        body = {"input_ids": (2 * PROMPT)[:tokens], "sampling_params": {"max_new_tokens": 1}}
        return httpx.post(f"{lossy.base_url}/generate", json=body, timeout=60, trust_env=False).status_code

    assert [status(POOL_TOKENS - left) for left in (8, 16, 17)] == [400, 400, 200]


@pytest.mark.nightly
def test_stock_ends(random_model: Path) -> None:
    """Once this fails, sglang has mended it: ``scheduler/chunk_room.py`` can go."""
    lossy = python_path(FAULTS / "kv_room_fault")
    with (
        script_server(*FLAGS, "--kv-policy", "default", model=random_model, env=lossy) as server,
        pytest.raises(ServerFailed, match="Prefill out of memory"),
    ):
        ask(server, PROMPT, 8)
