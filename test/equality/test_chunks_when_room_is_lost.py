"""A long prompt that loses room between two chunks waits for it, where stock sglang ends."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.servers import ServerFailed
from support.workloads.exchanges import CHUNK_TOKENS, POOL_FLAGS, POOL_TOKENS, VOCABULARY, ask

pytestmark = pytest.mark.server

PROMPT = Random(0).choices(VOCABULARY, k=4 * CHUNK_TOKENS + 100)
FLAGS = (*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16")


def test_the_chunk_gets_shorter_then_waits(random_model: Path) -> None:
    lossy = python_path(FAULTS / "kv_room_fault")
    with script_server(*FLAGS, "--kv-policy", "importance", model=random_model) as server:
        expected = ask(server, PROMPT, 8)["output_ids"]
    with script_server(*FLAGS, "--kv-policy", "importance", model=random_model, env=lossy) as server:
        assert ask(server, PROMPT, 8)["output_ids"] == expected
        log = server.log()
        assert ask(server, PROMPT, 8)["output_ids"] == expected
    chunks = [
        int(line.split("a chunk of ")[1].split()[0])
        for line in log.splitlines()
        if "kv_room_fault: pass" in line
    ]
    assert chunks == [48, 0, 0, CHUNK_TOKENS]


@pytest.mark.nightly
def test_stock_ends(random_model: Path) -> None:
    """Once this fails, sglang has mended it: ``cache/chunk_room.py`` can go."""
    lossy = python_path(FAULTS / "kv_room_fault")
    with (
        script_server(*FLAGS, "--kv-policy", "default", model=random_model, env=lossy) as server,
        pytest.raises(ServerFailed, match="Prefill out of memory"),
    ):
        ask(server, PROMPT, 8)
