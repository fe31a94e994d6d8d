"""Room behind writes to storage counts as evictable, and is not: who needs it waits, where stock sglang ends.

Under ``write_back`` a node's end went to the host and is being written to storage; the host has no room for
the node's beginning. It can be neither copied nor dropped until that write has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.servers import ServerFailed, ServerProcess
from support.workloads.exchanges import POOL_FLAGS, POOL_TOKENS, VOCABULARY, ask

pytestmark = pytest.mark.server

PAGE = 64
# The end of the first two fills the host; the third needs the room of their beginnings.
PROMPTS = [Random(tokens).choices(VOCABULARY, k=tokens) for tokens in (1900, 1700, 1899)]


@contextmanager
def slow_disk(model: Path, folder: Path, policy: str) -> Iterator[ServerProcess]:
    env = python_path(FAULTS / "kv_held_store_fault") | {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)
    }
    flags = (
        *(*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", str(PAGE)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.25", "--hicache-write-policy", "write_back"),
        *("--hicache-storage-backend", "file", "--kv-policy", policy),
    )
    with script_server(*flags, model=model, env=env) as server:
        yield server


def test_the_prompt_waits_for_the_disk(random_model: Path, tmp_path: Path) -> None:
    with slow_disk(random_model, tmp_path, "importance") as server:
        answers = [ask(server, each, 8)["output_ids"] for each in PROMPTS]
        log = server.log()
        assert "kv_held_store_fault: wait 3, 0 tokens free, 1024 evictable" in log
        assert log.count("subtree drop declined") < 6, "an eviction in each pass that waits"
        server.flush_cache()
        assert [ask(server, each, 8)["output_ids"] for each in PROMPTS] == answers


@pytest.mark.nightly
def test_stock_ends(random_model: Path, tmp_path: Path) -> None:
    """Once this fails, sglang has mended it: ``ImportanceRadixCache.can_free`` can go."""
    with slow_disk(random_model, tmp_path, "default") as server:
        for each in PROMPTS[:-1]:
            ask(server, each, 8)
        with pytest.raises(ServerFailed, match="Prefill out of memory"):
            ask(server, PROMPTS[-1], 8)
