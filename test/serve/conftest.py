"""One server with importance for the whole folder: observing only what a question asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import ServerProcess

API_KEY = "test-key"
PAGE_SIZE = 16


@pytest.fixture(scope="session")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    flags = [
        *("--kv-policy", "importance", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "8192"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        # The question's last tokens are what looks for the record; with a short half-life one question shows.
        *("--kv-importance-window", "2", "--kv-importance-half-life-queries", "0.25"),
    ]
    with ServerProcess(*flags, model=probe_model, api_key=API_KEY) as process:
        yield process
