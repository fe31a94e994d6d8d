"""Tiers against one-tier replays, and one small case counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.tiers import Tier
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.lower_tiers.tiered_replay import TieredCounts, replay_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierError, TierSize, WritePolicy
from sgl_importance_lab.replay.policy_registry import POLICY_NAMES, TRACE_FOLLOWERS, create_policy
from sgl_importance_lab.replay.trace import Trace

from support.workloads.replay_traces import BLOCK_TOKENS, build_trace, tree_traces

BYTES_PER_TOKEN = 10
PREFILL = 100.0
HOST_BANDWIDTH = 1000.0
STORAGE_BANDWIDTH = 200.0


def _replay(
    trace: Trace,
    capacities: list[int],
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    policies: tuple[str, str, str] = ("lru", "lru", "lru"),
) -> TieredCounts:
    bandwidths = (float("inf"), HOST_BANDWIDTH, STORAGE_BANDWIDTH)
    sizes = tuple(
        TierSize(tier, capacity, policy, bandwidth)
        for tier, capacity, policy, bandwidth in zip(Tier, capacities, policies, bandwidths, strict=False)
    )
    return replay_tiers(trace, TieredSetup(sizes, write_policy, PREFILL, BYTES_PER_TOKEN))


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=15, deadline=None)
@given(trace=tree_traces, capacity=st.integers(1, 12))
def test_one_tier_is_a_prefix_cache(name: str, trace: Trace, capacity: int) -> None:
    (device,) = _replay(trace, [capacity], policies=(name, "", "")).tiers
    counts = replay_tree(trace, create_policy(name, capacity, trace))
    assert (device.hit_blocks, device.hit_tokens) == (counts.hit_blocks, counts.hit_tokens)
    assert device.loaded_bytes == device.written_bytes == 0


@given(tree_traces, st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_written_through_every_tier_is_an_lru_cache_of_its_own(
    trace: Trace, device: int, host: int, storage: int
) -> None:
    """So tiers together hit what the largest would hit alone."""
    sizes = [device, device + host, device + host + storage]
    tiers = _replay(trace, sizes).tiers
    for level, capacity in enumerate(sizes):
        assert sum(tier.hit_blocks for tier in tiers[: level + 1]) == replay_lru(trace, capacity).hit_blocks


@given(tree_traces, st.integers(1, 6), st.integers(1, 12), st.sampled_from(WritePolicy))
def test_counts_add_up(trace: Trace, device: int, host: int, write_policy: WritePolicy) -> None:
    counts = _replay(trace, [device, host, host], write_policy)
    first, second, third = counts.tiers
    found = sum(tier.hit_tokens for tier in counts.tiers)
    assert found + counts.recomputed_tokens == trace.input_tokens.sum()
    assert third.loaded_bytes == third.hit_tokens * BYTES_PER_TOKEN
    assert second.loaded_bytes == (second.hit_tokens + third.hit_tokens) * BYTES_PER_TOKEN
    assert first.hit_blocks == replay_lru(trace, device).hit_blocks
    seconds = (
        counts.recomputed_tokens / PREFILL
        + second.loaded_bytes / HOST_BANDWIDTH
        + third.loaded_bytes / STORAGE_BANDWIDTH
    )
    assert np.isclose(counts.ttft_seconds.sum(), seconds)


@given(tree_traces, st.integers(1, 6))
def test_boundless_storage_recomputes_only_what_is_new(trace: Trace, device: int) -> None:
    capacity = max(trace.num_blocks, 1)
    for write_policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK):
        counts = _replay(trace, [device, device, capacity], write_policy)
        hits = sum(tier.hit_blocks for tier in counts.tiers)
        assert hits == replay_tree(trace, LruPolicy(capacity)).hit_blocks


def test_write_back_moves_what_the_device_gives_up() -> None:
    trace = build_trace([[1, 1], [2, 2], [1, 1]])
    counts = _replay(trace, [2, 2], WritePolicy.WRITE_BACK)
    device, host = counts.tiers
    block_bytes = BLOCK_TOKENS * BYTES_PER_TOKEN
    assert (device.hit_blocks, host.hit_blocks) == (0, 2)
    # [1 1] went down when [2 2] came, and up again; then [2 2] went down and pushed [1 1] out of the host.
    assert (host.written_bytes, host.loaded_bytes) == (4 * block_bytes, 2 * block_bytes)
    assert counts.recomputed_tokens == 4 * BLOCK_TOKENS
    assert counts.ttft_seconds.tolist() == [0.08, 0.08, 2 * block_bytes / HOST_BANDWIDTH]


def test_write_through_copies_what_was_computed() -> None:
    trace = build_trace([[1, 1], [2, 2], [1, 1]])
    _, host = _replay(trace, [2, 2]).tiers
    # The host gave up [1 1] for [2 2], so [1 1] was computed and copied again.
    assert host.hit_blocks == 0
    assert host.written_bytes == 6 * BLOCK_TOKENS * BYTES_PER_TOKEN


@pytest.mark.parametrize("name", sorted(TRACE_FOLLOWERS))
def test_demoted_blocks_do_not_follow_the_trace(name: str) -> None:
    with pytest.raises(TierError, match="use write_through, or another policy there"):
        _replay(build_trace([[1]]), [1, 1], WritePolicy.WRITE_BACK, policies=("lru", name, ""))


@pytest.mark.parametrize("name", sorted(set(POLICY_NAMES) - TRACE_FOLLOWERS))
@settings(max_examples=10, deadline=None)
@given(trace=tree_traces)
def test_every_other_policy_takes_demoted_blocks(name: str, trace: Trace) -> None:
    counts = _replay(trace, [2, 3, 4], WritePolicy.WRITE_BACK, policies=("lru", name, name))
    assert counts.tiers[0].hit_blocks == replay_lru(trace, 2).hit_blocks
