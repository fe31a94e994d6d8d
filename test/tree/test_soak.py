"""10,000 mixed operations on the real cache with upstream's host tier, all accounts compared.

``benchmark/soak.py`` runs ten times as many, and a server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drivers.soak_history import Soak

OPERATIONS = 2_500


@pytest.mark.parametrize(
    ("kind", "write_policy", "uses_g"),
    [
        ("importance", "write_through", False),
        ("importance", "write_through", True),
        ("importance", "write_through_selective", True),
        ("importance", "write_back", False),
        ("importance", "write_back", True),
        ("observe", "write_through", False),
    ],
)
def test_a_long_mixed_history_keeps_all_accounts_in_step(kind, write_policy, uses_g, tmp_path: Path) -> None:
    soak = Soak(kind, write_policy, seed=11, record_to=tmp_path, uses_g=uses_g)
    for _ in soak.run(OPERATIONS, check_every=50, idle_every=500):
        counted = soak.checkpoints[-1]
        # The tree's root and upstream's sentinels have no metadata of ours.
        assert counted.objects["NodeMetadata"] == counted.nodes <= counted.objects["UnifiedTreeNode"]
        assert counted.objects["GhostNode"] <= counted.ghosts
        assert counted.objects["Request"] <= 2, "requests that have ended are let go"
        assert counted.objects["QueryFolds"] <= 2
        assert counted.objects["Pin"] == len(soak.driver.component.pins.table)
    events = soak.close()
    assert soak.driver.checked_tokens > 5_000, "cached KV was looked at"
    # What a history that tests nothing would lack.
    for event in (
        "insert device",
        "split device",
        "evict device",
        "evict host",
        "back_up host",
        "load_back device",
    ):
        assert events[event] >= 20, events
    for operation in ("chunk", "abort", "retract", "readmit", "evict_host", "pin", "expired pin"):
        assert soak.happened[operation] >= 5, soak.happened
    assert set(soak.traffic.drawn) == {"turn", "new chat", "scan", "cut"}
