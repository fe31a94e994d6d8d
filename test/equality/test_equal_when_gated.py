"""A gate ahead of host and storage changes what is copied, never what is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_importance.metrics_table import PREFIX

from support.served import script_server
from support.workloads.exchanges import TIER_FLAGS, Exchange, replay

pytestmark = pytest.mark.server

# Under the selective policy all that is on offer has come back before: it takes longer until some is refused.
ASKED = {"write_through": 90, "write_through_selective": 160, "write_back": 90}


@pytest.mark.parametrize("write_policy", ASKED)
def test_tokens_equal_those_without_a_radix_cache(
    random_model: Path, exchanges: list[Exchange], write_policy: str
):
    flags = ("--page-size", "16", "--hicache-write-policy", write_policy)
    with script_server(
        *("--kv-policy", "importance", "--kv-importance-gate", "on", *TIER_FLAGS, *flags), model=random_model
    ) as server:
        assert replay(server, exchanges[: ASKED[write_policy]], concurrency=8).differing == []
        offered, refused, written = (
            {tier: server.metric(f"{PREFIX}{series}_tokens_total", tier=tier) for tier in ("host", "storage")}
            for series in ("offered", "refused", "written")
        )
        hits = {tier: server.metric(f"{PREFIX}hit_tokens_total", tier=tier) for tier in ("device", "host")}
        print(f"{write_policy}: offered {offered}, refused {refused}, written {written}, hits {hits}")
        assert 0 < refused["host"] < offered["host"]
        assert offered["storage"] > 0
        assert written["host"] > 0
        assert written["storage"] > 0
        if write_policy != "write_back":
            # There what the host holds children of is copied unasked. A backup can fail for want of memory.
            for tier in ("host", "storage"):
                assert written[tier] <= offered[tier] - refused[tier], tier
        assert hits["device"] > 0
        assert hits["host"] > 0
        assert "Traceback" not in server.log()
