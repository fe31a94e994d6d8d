"""Gated tiers: an open gate changes nothing, and no gate leaves a gap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.ranking.write_gate import GateSettings
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.lower_tiers.gated_tiers import GatedReplay, GateKind, Gating, StorageOffer
from sgl_importance_lab.replay.lower_tiers.tiered_replay import (
    TieredSetup,
    TierSize,
    WritePolicy,
    replay_tiers,
)
from sgl_importance_lab.replay.trace import NO_PARENT, Trace

from support.workloads.replay_traces import tree_traces

TIGHT = GateSettings(host_payback=0.05, storage_payback=0.2, displacement=1.0)

gatings = st.builds(
    Gating,
    kind=st.sampled_from(GateKind),
    settings=st.sampled_from((GateSettings(), TIGHT)),
    storage_offer=st.sampled_from(StorageOffer),
    shares=st.just(((Tier.HOST, 0.5), (Tier.STORAGE, 0.5))),
    seed=st.integers(0, 9),
)
capacities = st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 12))


def setup_of(sizes: tuple[int, ...], write_policy: WritePolicy, policy: str = "lru") -> TieredSetup:
    tiers = tuple(
        TierSize(tier, size, policy if tier is not Tier.STORAGE else "lru", bandwidth)
        for tier, size, bandwidth in zip(Tier, sizes, (float("inf"), 1e3, 2e2), strict=True)
    )
    return TieredSetup(tiers, write_policy, 100.0, 10, shared_order=True)


@given(tree_traces, capacities, st.sampled_from(WritePolicy))
def test_an_open_gate_is_no_gate(trace: Trace, sizes: tuple[int, ...], write_policy: WritePolicy):
    setup = setup_of(sizes, write_policy)
    expected = replay_tiers(trace, setup)
    counts = GatedReplay(trace, setup, Gating(GateKind.OPEN)).run()
    if write_policy is WritePolicy.WRITE_BACK:  # there an evicted block counts whole in both
        assert counts.tiers == expected.tiers
    assert [tier.hit_blocks for tier in counts.tiers] == [tier.hit_blocks for tier in expected.tiers]
    assert [tier.written_bytes for tier in counts.tiers] == [tier.written_bytes for tier in expected.tiers]
    assert counts.recomputed_tokens == expected.recomputed_tokens


class CheckedReplay(GatedReplay):
    """Asserts after every request that each copy can be reached."""

    def make_room(self) -> None:
        super().make_room()
        for level, tier in enumerate(self.tiers):
            # What is loaded from storage passes through the host, while its parent may be on the device.
            follows = level == 1 or not self.setup.writes_through
            above = self.tiers[:level] if follows else ()
            for block, parent in enumerate(self._parents):
                if tier.resident[block] and parent != NO_PARENT:
                    held = tier.resident[parent] or any(other.resident[parent] for other in above)
                    assert held, f"block {block} of {tier.size.tier} lies behind a gap"


@settings(max_examples=150, deadline=None)
@given(tree_traces, capacities, st.sampled_from(WritePolicy), gatings, st.sampled_from(("lru", "importance")))
def test_no_gate_leaves_a_gap(
    trace: Trace, sizes: tuple[int, ...], write_policy: WritePolicy, gating: Gating, policy: str
):
    replay = CheckedReplay(trace, setup_of(sizes, write_policy, policy), gating)
    counts = replay.run()
    found = sum(tier.hit_tokens for tier in counts.tiers)
    assert found + counts.recomputed_tokens == trace.input_tokens.sum()


@pytest.mark.parametrize("write_policy", WritePolicy)
def test_a_closed_gate_leaves_the_device_alone(write_policy: WritePolicy):
    from support.workloads.replay_traces import build_trace

    trace = build_trace([[1, 1], [2, 2], [1, 1], [1, 2]])
    closed = Gating(settings=GateSettings(host_payback=2.0, storage_payback=2.0))
    device, host, storage = GatedReplay(trace, setup_of((2, 4, 8), write_policy), closed).run().tiers
    assert host.written_bytes == storage.written_bytes == host.hit_blocks == storage.hit_blocks == 0
    assert device.hit_blocks > 0
