"""A chain of storage tiers under one placement, against LRU in every tier and one LRU tier of the same bytes.

Traces: production requests of Mooncake, and recorded coding agents, of which only odd lines are used (the
policy was chosen on even ones), so many sessions alive at a time. All tiers together hold a share of the
trace's unique blocks, divided as the bytes of the file of tiers. Times follow from the numbers of that file
and of ``--prefill-tokens-per-second``: they compare, and forecast nothing. Hits are deterministic.

Sessions begin in several orders: a row is the mean over them, and ``recomputed_over_lru`` the mean ratio of
recomputed tokens to those of LRU in the same tiers, with a 95 % interval over orders (Student's t).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from intervals import interval
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.storage.tier_chain.tier_file import ChainSpec, read_tier_file
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.kv_cache_tester import merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import ReadOptions, refuse_bad_record
from sgl_importance_lab.replay.lower_tiers.chain_ranking import CHAIN_POLICIES
from sgl_importance_lab.replay.lower_tiers.chain_replay import (
    ChainHardware,
    ChainJob,
    ChainRow,
    capacities,
    chain_jobs,
    chain_row,
    common_fetch,
    replay_chain,
)
from sgl_importance_lab.replay.replay_arguments import BYTES_PER_TOKEN, PREFILL_TOKENS_PER_SECOND
from sgl_importance_lab.replay.replay_runner import run_jobs
from sgl_importance_lab.replay.trace import Trace

TIERS = Path(__file__).with_suffix(".toml")


def replay_job(traces: Sequence[Trace], job: ChainJob) -> tuple[ChainRow, tuple[bytes, ...]]:
    """The figures of a job, and the tier of each block that was found, by request."""
    trace, spec = traces[job.trace], job.spec
    blocks = capacities(spec, trace, job.hardware.bytes_per_token, job.fraction)
    speed = spec.move_bytes_per_second
    counts = replay_chain(trace, spec.tiers, blocks, job.policy, job.hardware, move_bytes_per_second=speed)
    return chain_row(trace, job, spec.tiers, blocks, counts, 0.0), counts.found


def one_tier_row(
    trace: Trace, chain: dict[str, Any], spec: ChainSpec, hardware: ChainHardware, alone: float
) -> dict[str, Any]:
    """LRU in one tier of all bytes, as fast as the last of the chain, by the compiled replay."""
    last = spec.tiers[-1]
    blocks = round(chain["gigabytes"] * 1e9 / trace.block_tokens / hardware.bytes_per_token)
    prompt_tokens = int(trace.input_tokens.sum())
    found = replay_lru(trace, blocks).hit_tokens
    fetched = found * hardware.bytes_per_token / last.bytes_per_second
    computed = (prompt_tokens - found) / hardware.prefill_tokens_per_second
    ttft = (fetched + computed) / trace.num_requests
    hours = float(trace.seconds[-1] - trace.seconds[0]) / 3600
    rent = chain["gigabytes"] * last.price_per_gigabyte_hour * hours
    return {
        "trace": chain["trace"],
        "order": chain["order"],
        "policy": "lru, one tier",
        "fraction": chain["fraction"],
        "gigabytes": chain["gigabytes"],
        "recomputed_share": 1 - found / prompt_tokens,
        "fetch_microseconds_per_token": 1e6 * hardware.bytes_per_token / last.bytes_per_second,
        "ttft_mean": ttft,
        "ttft_times_faster_than_computing": alone / ttft,
        "price": rent + (prompt_tokens - found) / 1e6 * hardware.price_per_million_computed,
        "price_of_computing_all": chain["price_of_computing_all"],
        "hit_shares": {last.name: found / prompt_tokens},
        "moved_in_blocks": {},
    }


def mean_over_orders(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each trace, size and policy, out of one for each order of sessions."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["trace"], row["fraction"], row["policy"]].append(row)
    means = []
    for (trace, fraction, policy), of_kind in kinds.items():
        row = {**_mean(of_kind), "fraction": fraction, "orders": len(of_kind)}
        means.append(row)
        ours, lru = (
            {each["order"]: each["recomputed_share"] for each in kinds[trace, fraction, name]}
            for name in (policy, "lru")
        )
        both = sorted(ours.keys() & lru.keys())
        if len(both) > 1:
            row["recomputed_over_lru"] = interval([ours[order] / lru[order] for order in both])
    return means


def _mean(values: Sequence[Any]) -> Any:
    """Of numbers; of what holds numbers by name, one by one; what is no number is alike in all."""
    first = values[0]
    if isinstance(first, dict):
        in_all = [name for name in first if name != "order" and all(name in each for each in values)]
        return {name: _mean([each[name] for each in values]) for name in in_all}
    return fmean(values) if isinstance(first, int | float) else first


def main(
    conversation: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl, or a file like it.")],
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "20,80",
    fractions: Annotated[
        str, typer.Option(help="Comma-separated shares of the unique blocks that all tiers hold.")
    ] = "0.02,0.05,0.1,0.2",
    block_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of a block of the sessions: their prompts are long.")
    ] = 4096,
    tiers_file: Annotated[Path, typer.Option("--tiers", help="The tiers, with their numbers.")] = TIERS,
    price_computed: Annotated[float, typer.Option(min=0, help="Of a million computed tokens.")] = 0.10,
    seeds: Annotated[int, typer.Option(min=1, help="Orders in which sessions begin.")] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    spec = read_tier_file(tiers_file)
    hardware = ChainHardware(PREFILL_TOKENS_PER_SECOND, BYTES_PER_TOKEN, price_computed)
    traces, orders = [read_trace(conversation, ReadOptions())], [0]
    _, sessions = read_sessions(sessions_file, block_tokens, refuse_bad_record)
    odd = [session for session in sessions if session.line % 2]
    for alive in map(int, alive_at_a_time.split(",")):
        name = f"coding agents, {alive} alive"
        for seed in range(seeds):
            traces.append(merge_sessions(name, block_tokens, odd, alive, seed, refuse_bad_record))
            orders.append(seed)
    sizes = [float(size) for size in fractions.split(",")]
    jobs_of_both = chain_jobs(traces, spec, CHAIN_POLICIES, sizes, hardware)
    # The smallest first, of every trace: a run that is cut short has rows of each.
    work = sorted((job for job in jobs_of_both if not job.one_tier), key=lambda job: job.fraction or 0.0)
    done = track(run_jobs(replay_job, traces, work, jobs), total=len(work), description="replaying")
    rows: list[dict[str, Any]] = [{} for _ in work]
    one_tier = []
    beside: dict[tuple[int, float | None], tuple[int, tuple[bytes, ...]]] = {}
    try:
        for index, (row, found) in done:
            trace = traces[work[index].trace]
            alone = row.prompt_tokens / row.requests / hardware.prefill_tokens_per_second
            rows[index] = {
                "trace": row.trace,
                "order": orders[work[index].trace],
                "policy": row.policy,
                "fraction": row.fraction,
                "gigabytes": sum(tier.capacity_blocks for tier in row.tiers)
                * trace.block_tokens
                * hardware.bytes_per_token
                / 1e9,
                "recomputed_share": row.recomputed_tokens / row.prompt_tokens,
                "fetch_microseconds_per_token": row.fetch_microseconds_per_token,
                "ttft_mean": row.ttft_mean,
                "ttft_times_faster_than_computing": alone / row.ttft_mean,
                "price": row.price,
                "price_of_computing_all": row.prompt_tokens / 1e6 * price_computed,
                "hit_shares": {tier.name: tier.hit_tokens / row.prompt_tokens for tier in row.tiers},
                "moved_in_blocks": {tier.name: tier.moved_in_blocks for tier in row.tiers},
            }
            place = work[index].trace, work[index].fraction
            if place in beside:  # the other policy's
                other, others = beside.pop(place)
                share, times = common_fetch(trace, spec.tiers, [others, found], BYTES_PER_TOKEN)
                for each, seconds in zip((other, index), times, strict=True):
                    rows[each] |= {
                        "common_share": share,
                        "common_fetch_microseconds_per_token": 1e6 * seconds,
                    }
            else:
                beside[place] = index, found
            if row.policy == "lru":
                one_tier.append(one_tier_row(trace, rows[index], spec, hardware, alone))
    except KeyboardInterrupt:
        typer.echo("interrupted: the file has the rows that were finished", err=True)
    rows = mean_over_orders([row for row in rows if row] + one_tier)
    columns = ("trace", "policy", "fraction", "recomputed_share", "fetch_microseconds_per_token", "ttft_mean")
    print_rows("Chain of tiers", [{column: row[column] for column in columns} for row in rows])
    typer.echo(f"written to {write_results('tier_chain', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)
