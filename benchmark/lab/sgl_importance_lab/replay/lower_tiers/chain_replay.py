"""A trace through a chain of tiers, placed by the server's own code (``storage.tier_chain``).

A request finds each block of its prefix in the tier that has it, up to the first that none has; the rest is
computed. Then its blocks are placed, one after the other. The device counts as a tier where the file
describes one (``hbm``), else every block that is found is fetched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sgl_importance.storage.tier_chain.measure import FetchCost, fetch_seconds
from sgl_importance.storage.tier_chain.placement import Placement
from sgl_importance.storage.tier_chain.tier_file import ChainSpec, TierSpec
from sgl_importance.storage.tier_chain.tier_rooms import MoveBudget, TierRooms
from sgl_importance_lab.replay.lower_tiers.chain_ranking import LRU, trace_ranking
from sgl_importance_lab.replay.trace import Trace

FEWEST_BLOCKS = 2
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class ChainHardware:
    """Costs that are no tier's.

    Attributes:
        prefill_tokens_per_second: rate at which missing tokens are computed.
        bytes_per_token: KV bytes of one token over all layers.
        price_per_million_computed: of computed tokens, in the currency of the tiers' prices.
    """

    prefill_tokens_per_second: float
    bytes_per_token: int
    price_per_million_computed: float = 0.0


@dataclass(frozen=True, slots=True)
class ChainTierCounts:
    """Counts of one tier: ``hit_tokens`` were found in it, ``moved_in_blocks`` came from other tiers."""

    name: str
    kind: str
    capacity_blocks: int
    hit_tokens: int
    moved_in_blocks: int


@dataclass(frozen=True, slots=True)
class ChainCounts:
    """Counts of a replay.

    Attributes:
        fetch_seconds: of each request; float64 [requests].
        ttft_seconds: fetching, then computing the rest, without queueing; float64 [requests].
        found: of each request, the tier of each block that was found, a byte each.
    """

    tiers: tuple[ChainTierCounts, ...]
    recomputed_tokens: int
    fetch_seconds: npt.NDArray[np.float64]
    ttft_seconds: npt.NDArray[np.float64]
    found: tuple[bytes, ...]


def capacities(spec: ChainSpec, trace: Trace, bytes_per_token: int, fraction: float | None) -> list[int]:
    """Blocks of each tier: by the file's bytes, or as parts of a share of the trace's unique blocks."""
    if fraction is None:
        block_bytes = trace.block_tokens * bytes_per_token
        blocks = [tier.capacity // block_bytes for tier in spec.tiers]
    else:
        blocks = [int(tier.capacity / spec.capacity * fraction * trace.num_blocks) for tier in spec.tiers]
    return [max(FEWEST_BLOCKS, count) for count in blocks]


def replay_chain(
    trace: Trace,
    tiers: Sequence[TierSpec],
    blocks: Sequence[int],
    policy: str,
    hardware: ChainHardware,
    *,
    move_bytes_per_second: float = float("inf"),
) -> ChainCounts:
    """Replays all requests, one after the other.

    Args:
        tiers: fastest first.
        blocks: capacity of each.
        policy: one of ``CHAIN_POLICIES``, in every tier.
        move_bytes_per_second: most that moves may write into each tier, by the clock of the trace.
    """
    assert trace.parents is not None, "independent objects have no prefix tree"
    costs = [FetchCost(tier.bytes_per_second, tier.latency_seconds) for tier in tiers]
    block_bytes = trace.block_tokens * hardware.bytes_per_token
    ranking = trace_ranking(policy, trace, len(tiers))
    placement = Placement(
        TierRooms(blocks),
        fetch_seconds(costs, block_bytes, recompute=trace.block_tokens / hardware.prefill_tokens_per_second),
        ranking,
        page_bytes=block_bytes,
        budget=MoveBudget(len(tiers), move_bytes_per_second, page_bytes=block_bytes),
    )
    hit_tokens, moved_in = [0] * len(tiers), [0] * len(tiers)
    fetched, ttft = np.zeros(trace.num_requests), np.zeros(trace.num_requests)
    recomputed, all_found = 0, []
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        found = placement.find(path)
        all_found.append(bytes(found))
        tokens_in = tokens_by_tier(trace, index, found, len(tiers))
        hit_tokens = [before + tokens for before, tokens in zip(hit_tokens, tokens_in, strict=True)]
        fetched[index] = request_fetch_seconds(costs, tokens_in, hardware.bytes_per_token)
        left = int(trace.input_tokens[index]) - sum(tokens_in)
        recomputed += left
        ttft[index] = fetched[index] + left / hardware.prefill_tokens_per_second
        now = float(trace.seconds[index])
        placement.hold(path)
        ranking.request(index)
        first = next((i for i, level in enumerate(found) if level), len(found))  # those ahead are at the top
        for parent, page in islice(zip([None, *path], path, strict=False), first, None):
            for step in placement.plan(page, parent=parent, now=now):
                placement.apply(step, parent=parent if step.page == page else None)
                if step.source is not None and step.target is not None:
                    moved_in[step.target] += 1
        placement.release()
    return ChainCounts(
        tuple(
            ChainTierCounts(tier.name, tier.kind.value, blocks[level], hit_tokens[level], moved_in[level])
            for level, tier in enumerate(tiers)
        ),
        recomputed,
        fetched,
        ttft,
        tuple(all_found),
    )


def tokens_by_tier(trace: Trace, index: int, found: Sequence[int], tiers: int) -> list[int]:
    """Tokens of a request in each of so many tiers, of whose first blocks the tiers are ``found``."""
    tokens_in, left = [0] * tiers, int(trace.input_tokens[index])
    for level in found:
        tokens = min(trace.block_tokens, left)
        left -= tokens
        tokens_in[level] += tokens
    return tokens_in


def request_fetch_seconds(
    costs: Sequence[FetchCost], tokens_in: Sequence[int], bytes_per_token: int
) -> float:
    """Seconds to fetch so many tokens from each tier, one access each."""
    return sum(
        cost.seconds(tokens * bytes_per_token)
        for cost, tokens in zip(costs, tokens_in, strict=True)
        if tokens
    )


def common_fetch(
    trace: Trace, tiers: Sequence[TierSpec], arms: Sequence[Sequence[bytes]], bytes_per_token: int
) -> tuple[float, list[float]]:
    """Of the tokens that every arm finds: their share of all prompt tokens, and each arm's seconds a token.

    An arm that finds more, in slower tiers, has a higher mean over all that it finds; not over these.

    Args:
        arms: ``found`` of each one's ``ChainCounts``.
    """
    costs = [FetchCost(tier.bytes_per_second, tier.latency_seconds) for tier in tiers]
    seconds, common = [0.0] * len(arms), 0
    for index, found in enumerate(zip(*arms, strict=True)):
        shared = min(map(len, found))
        counts = [tokens_by_tier(trace, index, levels[:shared], len(costs)) for levels in found]
        common += sum(counts[0])
        for arm, tokens_in in enumerate(counts):
            seconds[arm] += request_fetch_seconds(costs, tokens_in, bytes_per_token)
    return common / int(trace.input_tokens.sum()), [each / max(common, 1) for each in seconds]


@dataclass(frozen=True, slots=True)
class ChainJob:
    """One replay; ``trace`` is an index into the traces of the run.

    Attributes:
        fraction: share of the trace's unique blocks that all tiers together hold; None for the file's bytes.
        one_tier: all bytes in the last tier, as one.
    """

    trace: int
    spec: ChainSpec
    policy: str
    fraction: float | None
    hardware: ChainHardware
    one_tier: bool = False


@dataclass(frozen=True, slots=True)
class ChainRow:
    """Result of a replay; times are in seconds.

    Attributes:
        fetch_microseconds_per_token: of the tokens that were found.
        price: of the tiers for as long as the trace lasts, and of the computed tokens.
    """

    trace: str
    policy: str
    one_tier: bool
    fraction: float | None
    requests: int
    prompt_tokens: int
    recomputed_tokens: int
    fetch_microseconds_per_token: float
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    price: float
    tiers: tuple[ChainTierCounts, ...]
    seconds: float


def run_chain_job(traces: Sequence[Trace], job: ChainJob) -> ChainRow:
    """Runs one job and derives the figures."""
    trace, spec, hardware = traces[job.trace], job.spec, job.hardware
    tiers: Sequence[TierSpec] = spec.tiers
    blocks = capacities(spec, trace, hardware.bytes_per_token, job.fraction)
    if job.one_tier:
        tiers, blocks = tiers[-1:], [sum(blocks)]
    start = time.perf_counter()
    counts = replay_chain(
        trace, tiers, blocks, job.policy, hardware, move_bytes_per_second=spec.move_bytes_per_second
    )
    return chain_row(trace, job, tiers, blocks, counts, time.perf_counter() - start)


def chain_row(
    trace: Trace,
    job: ChainJob,
    tiers: Sequence[TierSpec],
    blocks: Sequence[int],
    counts: ChainCounts,
    seconds: float,
) -> ChainRow:
    """The figures of a replay of ``job`` over these tiers, of so many blocks each, that took ``seconds``."""
    hardware = job.hardware
    median, tail = np.percentile(counts.ttft_seconds, (50, 95))
    found = sum(tier.hit_tokens for tier in counts.tiers)
    hours = float(trace.seconds[-1] - trace.seconds[0]) / 3600
    block_gigabytes = trace.block_tokens * hardware.bytes_per_token / GIGABYTE
    rent = sum(
        tier.price_per_gigabyte_hour * count * block_gigabytes * hours
        for tier, count in zip(tiers, blocks, strict=True)
    )
    return ChainRow(
        trace=trace.name,
        policy=job.policy,
        one_tier=job.one_tier,
        fraction=job.fraction,
        requests=trace.num_requests,
        prompt_tokens=int(trace.input_tokens.sum()),
        recomputed_tokens=counts.recomputed_tokens,
        fetch_microseconds_per_token=1e6 * float(counts.fetch_seconds.sum()) / max(found, 1),
        ttft_mean=float(counts.ttft_seconds.mean()),
        ttft_p50=float(median),
        ttft_p95=float(tail),
        price=rent + counts.recomputed_tokens / 1e6 * hardware.price_per_million_computed,
        tiers=counts.tiers,
        seconds=seconds,
    )


def chain_jobs(
    traces: Sequence[Trace],
    spec: ChainSpec,
    policies: Sequence[str],
    fractions: Sequence[float],
    hardware: ChainHardware,
) -> list[ChainJob]:
    """Every policy in every tier at every size, and beside them one tier of the same bytes under LRU."""
    arms = [(policy, False) for policy in policies]
    if len(spec.tiers) > 1:
        arms.append((LRU, True))
    sizes: Sequence[float | None] = fractions or [None]
    return [
        ChainJob(index, spec, policy, fraction, hardware, one_tier)
        for index in range(len(traces))
        for fraction in sizes
        for policy, one_tier in arms
    ]
