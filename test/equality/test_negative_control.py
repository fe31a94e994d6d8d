"""The comparison itself is put to the test: one damaged page of one layer must not go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.python_path import FAULTS, python_path
from support.served import script_server
from support.workloads.exchanges import TIER_FLAGS, Exchange, replay

pytestmark = [pytest.mark.server, pytest.mark.nightly]

# Enough for host hits, and for the damaged page to be read; asked in parts, up to the first wrong answer.
EXCHANGES, PART = 160, 20


def test_one_damaged_page_of_one_layer_changes_tokens(random_model: Path, exchanges: list[Exchange]):
    flags = ("--kv-policy", "importance", *TIER_FLAGS, "--page-size", "16")
    with script_server(*flags, model=random_model, env=python_path(FAULTS / "kv_fault")) as server:
        for start in range(0, EXCHANGES, PART):
            differing = replay(server, exchanges[start : start + PART], concurrency=1).differing
            if differing:
                break
        assert server.log().count("kv_fault: damaged 16 tokens of layer 1") == 1
    print(f"{len(differing)} of the answers {start} to {start + PART - 1} differ")
    assert differing
