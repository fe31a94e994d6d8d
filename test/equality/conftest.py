"""The model whose tokens betray damage, and the answers of a server that reuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import write_random_llama
from support.served import script_server
from support.workloads.exchanges import POOL_FLAGS, Exchange, record_exchanges


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="session")
def exchanges(random_model: Path, request: pytest.FixtureRequest) -> list[Exchange]:
    """Every prompt with the tokens that stock sglang answers without a radix cache; by day half of them."""
    is_night = any(item.get_closest_marker("nightly") for item in request.session.items)
    with script_server(
        *("--kv-policy", "default", "--disable-radix-cache", *POOL_FLAGS, "--max-total-tokens", "16384"),
        model=random_model,
    ) as server:
        assert server.get("/server_info")["dtype"] == "float32"
        # Half of them by another seed, which has prompts as long as any of all.
        recorded = record_exchanges(server) if is_night else record_exchanges(server, every=2, seed=2)
        assert all(server.generate(e.prompt)["meta_info"]["cached_tokens"] == 0 for e in recorded[:2])
    return recorded
