"""What a write gate saves and costs: hits by tier, bytes written, tokens computed again, by tiered replay.

Replays are deterministic: rows can be compared between machines. Every arm ranks device and host by
importance (g = 1) and storage by LRU, as the server does. Arms:

- the write policies without a gate;
- the same behind the server's gate;
- the gate with a higher bar under pressure, or for storage at all times;
- ``random``: a coin with the gate's shares, so that it writes about as many bytes.

The constants of the gate were chosen on the first half of the Mooncake trace and on the traces marked as
tuned. The others had not been replayed with a gate before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from policy import interleaved_sessions, window
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.ranking.write_gate import GateSettings
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.lower_tiers.gated_tiers import GatedReplay, GateKind, Gating, StorageOffer
from sgl_importance_lab.replay.lower_tiers.tiered_replay import (
    TieredCounts,
    TieredSetup,
    TierSize,
    WritePolicy,
)
from sgl_importance_lab.replay.replay_runner import run_jobs
from sgl_importance_lab.replay.trace import Trace

SIZES = {"bounded": (0.02, 0.06, 0.15)}
"""Capacity of device, host and storage as shares of the unique blocks."""
BYTES_PER_SECOND = (float("inf"), 25e9, 3e9)
PREFILL_TOKENS_PER_SECOND = 10_000.0
BYTES_PER_TOKEN = 131_072

OPEN = Gating(GateKind.OPEN)
GATE = Gating(storage_offer=StorageOffer.EVICTED)


def with_settings(**settings: float) -> Gating:
    return replace(GATE, settings=GateSettings(**settings))


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    write_policy: WritePolicy
    gating: Gating


THROUGH, BACK = WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK
ARMS = (
    Arm("open", THROUGH, OPEN),
    Arm("gate", THROUGH, GATE),
    Arm("gate, displacement 1", THROUGH, with_settings(displacement=1.0)),
    Arm("gate, displacement 2", THROUGH, with_settings(displacement=2.0)),
    Arm("gate, payback 0.2", THROUGH, with_settings(storage_payback=0.2)),
    Arm("open", BACK, OPEN),
    Arm("gate", BACK, GATE),
    Arm("gate, displacement 1", BACK, with_settings(displacement=1.0)),
    Arm("gate, payback 0.2", BACK, with_settings(storage_payback=0.2)),
)


@dataclass(frozen=True, slots=True)
class GatingJob:
    """One replay; ``trace`` is an index into the traces of the run."""

    trace: int
    sizes: str
    arm: Arm


def run_gating_job(traces: Sequence[Trace], job: GatingJob) -> TieredCounts:
    trace = traces[job.trace]
    tiers = tuple(
        TierSize(tier, max(1, int(share * trace.num_blocks)), policy, bandwidth)
        for tier, share, policy, bandwidth in zip(
            Tier, SIZES[job.sizes], ("importance", "importance", "lru"), BYTES_PER_SECOND, strict=True
        )
    )
    setup = TieredSetup(
        tiers, job.arm.write_policy, PREFILL_TOKENS_PER_SECOND, BYTES_PER_TOKEN, shared_order=True
    )
    return GatedReplay(trace, setup, job.arm.gating).run()


def written(counts: TieredCounts, tier: Tier) -> int:
    return next(each.written_bytes for each in counts.tiers if each.tier is tier)


def random_arms(jobs: Sequence[GatingJob], counts: Sequence[TieredCounts]) -> Iterator[GatingJob]:
    """A coin beside the gate, with the shares of the bytes that the gate let pass."""
    by_job = dict(zip(jobs, counts, strict=True))
    for job, gated in by_job.items():
        if job.arm.name != "gate" or job.arm.write_policy is not THROUGH:
            continue
        ungated = by_job[replace(job, arm=Arm("open", job.arm.write_policy, OPEN))]
        shares = tuple(
            (tier, min(1.0, written(gated, tier) / max(written(ungated, tier), 1)))
            for tier in (Tier.HOST, Tier.STORAGE)
        )
        # The coin of a tier is tossed for what got into the tier above.
        (_, host), (_, storage) = shares
        tossed = ((Tier.HOST, host), (Tier.STORAGE, min(1.0, storage / max(host, 1e-9))))
        yield replace(job, arm=Arm("random", job.arm.write_policy, Gating(GateKind.RANDOM, shares=tossed)))


def row(trace: Trace, job: GatingJob, counts: TieredCounts, base: TieredCounts) -> dict[str, Any]:
    """Counts of one arm, and what they are beside ``write_through`` without a gate."""
    hits = [tier.hit_tokens for tier in counts.tiers]
    return {
        "trace": trace.name,
        "sizes": job.sizes,
        "write_policy": str(job.arm.write_policy),
        "arm": job.arm.name,
        **{f"{tier.tier}_hit_tokens": tier.hit_tokens for tier in counts.tiers},
        "host_bytes": written(counts, Tier.HOST),
        "storage_bytes": written(counts, Tier.STORAGE),
        "recomputed_tokens": counts.recomputed_tokens,
        "ttft_mean": float(counts.ttft_seconds.mean()),
        "hits_over_base": sum(hits) / sum(tier.hit_tokens for tier in base.tiers),
        "host_bytes_over_base": written(counts, Tier.HOST) / max(written(base, Tier.HOST), 1),
        "storage_bytes_over_base": written(counts, Tier.STORAGE) / max(written(base, Tier.STORAGE), 1),
        "recomputed_over_base": counts.recomputed_tokens / base.recomputed_tokens,
        "ttft_over_base": float(counts.ttft_seconds.mean() / base.ttft_seconds.mean()),
    }


def main(
    mooncake: Annotated[Path, typer.Option(help="mooncake_conversation.jsonl (scripts name its source).")],
    agents: Annotated[
        Path | None, typer.Option(help="Folder with folders of agent sessions (.jsonl).")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    whole = read_trace(mooncake)
    middle = whole.num_requests // 2
    traces = [window(whole, "mooncake, second half", middle, whole.num_requests)]
    if agents is not None:
        tuned = {"miniswe": " (tuned)"}
        for folder in sorted(path for path in agents.iterdir() if path.is_dir()):
            traces.append(interleaved_sessions(folder, folder.name + tuned.get(folder.name, ""), 0))
    work = [GatingJob(index, sizes, arm) for index in range(len(traces)) for sizes in SIZES for arm in ARMS]
    counts = _replay(traces, work, jobs, "replaying")
    controls = list(random_arms(work, counts))
    counts += _replay(traces, controls, jobs, "control arms")
    work += controls
    by_job = dict(zip(work, counts, strict=True))
    base = Arm("open", WritePolicy.WRITE_THROUGH, OPEN)
    rows = [
        row(traces[job.trace], job, by_job[job], by_job[replace(job, arm=base)])
        for job in sorted(work, key=lambda job: (job.trace, job.sizes))
    ]
    print_rows("Write gate, beside write_through without a gate", rows)
    print(f"written: {write_results('gating', rows, out=out)}")


def _replay(
    traces: Sequence[Trace], work: Sequence[GatingJob], processes: int, title: str
) -> list[TieredCounts]:
    found = dict(track(run_jobs(run_gating_job, traces, work, processes), total=len(work), description=title))
    return [found[index] for index in range(len(work))]


if __name__ == "__main__":
    typer.run(main)
