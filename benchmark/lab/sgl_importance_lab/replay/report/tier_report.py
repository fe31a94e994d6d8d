"""Rows and table of a tiered replay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.replay.lower_tiers.served_tiers import replay_served_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_replay import TierCounts, replay_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup
from sgl_importance_lab.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TieredJob:
    """One tiered replay; ``trace`` is an index into the traces of the run, ``seed`` that of policies that
    draw."""

    trace: int
    setup: TieredSetup
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TieredRow:
    """Result of a tiered replay; ``policy`` is that of the device, times are in seconds."""

    trace: str
    policy: str
    write_policy: str
    requests: int
    blocks: int
    prompt_tokens: int
    recomputed_tokens: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    tiers: tuple[TierCounts, ...]
    seconds: float
    refused_requests: int = 0


def run_tiered_job(traces: Sequence[Trace], job: TieredJob) -> TieredRow:
    trace = traces[job.trace]
    start = time.perf_counter()
    if job.setup.chunk_tokens is None:
        counts = replay_tiers(trace, job.setup, seed=job.seed)
    else:
        counts = replay_served_tiers(trace, job.setup)
    seconds = time.perf_counter() - start
    ttft = counts.ttft_seconds if counts.ttft_seconds.size else np.zeros(1)  # every request was refused
    median, tail = np.percentile(ttft, (50, 95))
    return TieredRow(
        trace=trace.name,
        policy=job.setup.sizes[0].policy,
        write_policy=job.setup.write_policy,
        requests=trace.num_requests,
        blocks=trace.num_accesses - counts.refused_blocks,
        prompt_tokens=int(trace.input_tokens.sum()) - counts.refused_tokens,
        recomputed_tokens=counts.recomputed_tokens,
        ttft_mean=float(ttft.mean()),
        ttft_p50=float(median),
        ttft_p95=float(tail),
        tiers=counts.tiers,
        seconds=seconds,
        refused_requests=counts.refused_requests,
    )


def tiered_table(row: TieredRow) -> Table:
    """One line per tier, recomputed tokens below, TTFT in the caption."""
    table = Table(
        "tier",
        Column("policy", min_width=10),
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=plain(f"{row.trace}, {row.policy} on the device, {row.write_policy}", "table.title"),
        caption=f"TTFT without queueing: mean {row.ttft_mean:.3f} s, p50 {row.ttft_p50:.3f} s, "
        f"p95 {row.ttft_p95:.3f} s"
        + (
            f"; longer than the device, so refused and not counted: {row.refused_requests:,} of "
            f"{row.requests:,} requests"
            if row.refused_requests
            else ""
        ),
    )
    for title in ("blocks", "block hits", "M tokens", "token hits", "GB loaded", "GB written"):
        table.add_column(title, justify="right")
    for tier in row.tiers:
        add_texts(
            table,
            tier.tier,
            tier.policy,
            f"{tier.capacity_blocks:,}",
            f"{tier.hit_blocks / max(row.blocks, 1):.4f}",
            f"{tier.hit_tokens / 1e6:,.1f}",
            f"{tier.hit_tokens / max(row.prompt_tokens, 1):.4f}",
            f"{tier.loaded_bytes / 1e9:,.1f}",
            f"{tier.written_bytes / 1e9:,.1f}",
        )
    add_texts(
        table,
        "computed",
        "",
        "",
        "",
        f"{row.recomputed_tokens / 1e6:,.1f}",
        f"{row.recomputed_tokens / max(row.prompt_tokens, 1):.4f}",
        "",
        "",
    )
    return table
