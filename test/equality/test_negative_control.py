"""The comparison itself is put to the test: one damaged page of one layer must not go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.workloads.exchanges import TIER_FLAGS, Exchange, replay

pytestmark = pytest.mark.server

# Enough for host hits, and for the damaged page to be read.
EXCHANGES = 160


def test_one_damaged_page_of_one_layer_changes_tokens(random_model: Path, exchanges: list[Exchange]):
    flags = ("--kv-policy", "importance", *TIER_FLAGS, "--page-size", "16")
    with script_server(*flags, model=random_model, env=python_path(FAULTS / "kv_fault")) as server:
        differing = replay(server, exchanges[:EXCHANGES], concurrency=1).differing
        assert server.log().count("kv_fault: damaged 16 tokens of layer 1") == 1
    print(f"{len(differing)} of {EXCHANGES} answers differ")
    assert differing
