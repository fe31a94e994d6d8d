"""A chain of storage tiers under one placement, against LRU in every tier and one LRU tier of the same bytes.

Traces: production requests of Mooncake, and recorded coding agents, of which only odd lines are used (the
policy was chosen on even ones), so many sessions alive at a time. All tiers together hold a share of the
trace's unique blocks, divided as the bytes of the file of tiers. Times follow from the numbers of that file
and of ``--prefill-tokens-per-second``: they compare, and forecast nothing. Hits are deterministic.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.replay.chain_ranking import CHAIN_POLICIES
from sgl_importance.replay.chain_replay import ChainHardware, chain_jobs, run_chain_job
from sgl_importance.replay.formats.detect import read_trace
from sgl_importance.replay.formats.kv_cache_tester import merge_sessions, read_sessions
from sgl_importance.replay.formats.line_reader import ReadOptions, refuse_bad_record
from sgl_importance.replay.replay_arguments import BYTES_PER_TOKEN, PREFILL_TOKENS_PER_SECOND
from sgl_importance.replay.replay_runner import run_jobs
from sgl_importance.tier_chain.tier_file import read_tier_file

TIERS = Path(__file__).with_suffix(".toml")
FRACTIONS = (0.02, 0.05, 0.1, 0.2)
BLOCK_TOKENS = 4096
"""Of the sessions, whose prompts are long: joined, their blocks take an eighth of the time."""


def main(
    conversation: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl, or a file like it.")],
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "20,80",
    tiers_file: Annotated[Path, typer.Option("--tiers", help="The tiers, with their numbers.")] = TIERS,
    price_computed: Annotated[float, typer.Option(min=0, help="Of a million computed tokens.")] = 0.10,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    spec = read_tier_file(tiers_file)
    hardware = ChainHardware(PREFILL_TOKENS_PER_SECOND, BYTES_PER_TOKEN, price_computed)
    traces = [read_trace(conversation, ReadOptions())]
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    odd = [session for session in sessions if session.line % 2]
    for alive in map(int, alive_at_a_time.split(",")):
        name = f"coding agents, {alive} alive"
        traces.append(merge_sessions(name, BLOCK_TOKENS, odd, alive, 0, refuse_bad_record))
    work = chain_jobs(traces, spec, CHAIN_POLICIES, FRACTIONS, hardware)
    done = track(run_jobs(run_chain_job, traces, work, jobs), total=len(work), description="replaying")
    rows: list[dict[str, Any]] = [{} for _ in work]
    for index, row in done:
        alone = row.prompt_tokens / row.requests / hardware.prefill_tokens_per_second
        rows[index] = {
            "trace": row.trace,
            "policy": "lru, one tier" if row.one_tier else row.policy,
            "fraction": row.fraction,
            "gigabytes": sum(tier.capacity_blocks for tier in row.tiers)
            * traces[work[index].trace].block_tokens
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
    columns = ("trace", "policy", "fraction", "recomputed_share", "fetch_microseconds_per_token", "ttft_mean")
    print_rows("Chain of tiers", [{column: row[column] for column in columns} for row in rows])
    typer.echo(f"written to {write_results('tier_chain', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)
