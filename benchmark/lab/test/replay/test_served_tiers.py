"""Replays of whole nodes in device and host: shadow caches of both, with answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.lower_tiers.served_tiers import replay_served_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_replay import TieredCounts
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierError, TierSize, WritePolicy
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.served_nodes import replay_served
from sgl_importance_lab.replay.trace import Trace

from support.workloads.replay_traces import BLOCK_TOKENS, tree_traces

CHUNK = 2 * BLOCK_TOKENS
policies = pytest.mark.parametrize("policy", ["lru", IMPORTANCE])
write_policies = pytest.mark.parametrize("writes", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])


def replay(trace: Trace, device: int, host: int, policy: str, writes: WritePolicy) -> TieredCounts:
    sizes = TierSize(Tier.DEVICE, device, policy, float("inf")), TierSize(Tier.HOST, host, policy, 10.0)
    setup = TieredSetup(sizes, writes, prefill_tokens_per_second=2.0, bytes_per_token=5, chunk_tokens=CHUNK)
    return replay_served_tiers(trace, setup)


@policies
@write_policies
@settings(max_examples=15, deadline=None)
@given(trace=tree_traces, capacity=st.integers(1, 20))
def test_where_the_device_holds_all_the_host_is_never_asked(
    policy: str, writes: WritePolicy, trace: Trace, capacity: int
) -> None:
    of_tiers = replay(trace, 10**4, capacity, policy, writes)
    alone = replay_served(trace, 10**4, is_importance=policy == IMPORTANCE, chunk_tokens=CHUNK)
    device, host = of_tiers.tiers
    assert (device.hit_tokens, host.hit_tokens, host.loaded_bytes) == (alone.hit_tokens, 0, 0)
    assert (host.written_bytes == 0) or writes is WritePolicy.WRITE_THROUGH


@policies
@write_policies
@settings(max_examples=15, deadline=None)
@given(trace=tree_traces, capacity=st.integers(8, 20))
def test_a_host_that_holds_all_loses_only_what_is_not_worth_a_load(
    policy: str, writes: WritePolicy, trace: Trace, capacity: int
) -> None:
    """sglang computes fewer than ten tokens again rather than load them."""
    endless = replay_served(trace, 10**4, is_importance=False, chunk_tokens=CHUNK)
    counts = replay(trace, capacity, 10**4, policy, writes)
    prompts = trace.input_tokens[(trace.offsets[1:] - trace.offsets[:-1]) <= capacity]
    assert counts.recomputed_tokens + sum(tier.hit_tokens for tier in counts.tiers) == prompts.sum()
    assert counts.refused_requests == trace.num_requests - len(prompts)
    assert counts.refused_tokens == trace.input_tokens.sum() - prompts.sum()
    assert len(counts.ttft_seconds) == len(prompts), "what is refused has no first token"
    if len(prompts) == trace.num_requests:
        lost = endless.hit_tokens - sum(tier.hit_tokens for tier in counts.tiers)
        assert 0 <= lost < 10 * trace.num_requests
    seconds = counts.recomputed_tokens / 2.0 + counts.tiers[1].loaded_bytes / 10.0
    assert counts.ttft_seconds.sum() == pytest.approx(seconds)


def test_what_a_server_does_not_is_refused_with_its_cure() -> None:
    device, host = TierSize(Tier.DEVICE, 4, "lru", 1.0), TierSize(Tier.HOST, 4, "lru", 1.0)
    through = WritePolicy.WRITE_THROUGH
    for sizes, writes, cure in (
        ((device,), through, "give these two"),
        ((device, TierSize(Tier.HOST, 4, IMPORTANCE, 1.0)), through, "name one"),
        ((TierSize(Tier.DEVICE, 4, "fifo", 1.0), TierSize(Tier.HOST, 4, "fifo", 1.0)), through, "name one"),
        ((device, host), WritePolicy.WRITE_THROUGH_SELECTIVE, "use write_through or write_back"),
    ):
        with pytest.raises(TierError, match=cure):
            TieredSetup(sizes, writes, 1.0, 1, chunk_tokens=16)
