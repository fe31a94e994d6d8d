"""`sgl-importance replay --tiers`: traces through a chain of storage tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_importance.storage.tier_chain.tier_file import ChainSpec, TierFileError, read_tier_file
from sgl_importance.terminal import fail, show
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.lower_tiers.chain_ranking import CHAIN_POLICIES
from sgl_importance_lab.replay.lower_tiers.chain_replay import (
    FEWEST_BLOCKS,
    ChainHardware,
    ChainRow,
    chain_jobs,
    run_chain_job,
)
from sgl_importance_lab.replay.policy_registry import DEFAULT_POLICIES, OPTIMUM
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_arguments import check_results
from sgl_importance_lab.replay.report.chain_report import chain_table
from sgl_importance_lab.replay.report.console import (
    open_journal,
    parse_policies,
    read_traces,
    run_with_progress,
    write_rows,
)
from sgl_importance_lab.replay.trace import Trace


def replay_chain(
    traces: list[Path],
    tiers_file: Path,
    *,
    policies: str,
    fractions: list[float],
    hardware: ChainHardware,
    options: ReadOptions,
    format_name: str | None,
    skip_bad: bool,
    seeds: Sequence[int],
    json_file: Path | None,
    workers: int | RayCluster,
) -> None:
    """Replays traces, shows a table of each, and writes all rows to a file where one is named.

    Args:
        traces: files of one format.
        tiers_file: describes the chain.
        policies: as the option of the command has them.
        fractions: sizes of all tiers together, as parts of a trace's unique blocks; none for the file's own.
        hardware: what a replay charges for.
        options: how the traces are read.
        format_name: of all of them; None to find out.
        skip_bad: whether bad lines are left out.
        seeds: of the order of single sessions.
        json_file: for the rows; None for none.
        workers: processes, or a cluster.
    """
    check_results(json_file, None)
    spec, arms = _chain_of(tiers_file), _chain_policies(policies)
    read = read_traces(traces, options, format_name, skip_bad=skip_bad, seeds=seeds)
    if not fractions:
        for trace in read:
            _check_capacities(spec, trace, hardware.bytes_per_token)
    work = chain_jobs(read, spec, arms, fractions, hardware)
    journal = open_journal(json_file, ChainRow, read, work)
    rows = run_with_progress(run_chain_job, read, work, workers, journal)
    for trace in read:
        show(chain_table([row for row in rows if row.trace == trace.name]))
    if json_file is not None:
        write_rows(json_file, rows, journal)


def _chain_of(path: Path) -> ChainSpec:
    """The tiers of a file; fails on a bad one."""
    try:
        return read_tier_file(path)
    except TierFileError as error:
        fail(str(error))


def _chain_policies(text: str) -> list[str]:
    """Policies of a chain; the command's own default names the optimum, which a chain goes without."""
    names = parse_policies(text)
    if text == DEFAULT_POLICIES:
        names.remove(OPTIMUM)
    if OPTIMUM in names:
        fail(f"a chain of tiers has no optimum: use {' or '.join(CHAIN_POLICIES)}")
    if unknown := [name for name in names if name not in CHAIN_POLICIES]:
        fail(f"a chain of tiers is not ranked by {unknown[0]}: use {' or '.join(CHAIN_POLICIES)}")
    return names


def _check_capacities(spec: ChainSpec, trace: Trace, bytes_per_token: int) -> None:
    """Fails where a tier holds too few of a trace's blocks for a chain."""
    block_bytes = trace.block_tokens * bytes_per_token
    for tier in spec.tiers:
        if tier.capacity < FEWEST_BLOCKS * block_bytes:
            fail(
                f"tier {tier.name} has {tier.capacity} bytes, a block of {trace.name} takes {block_bytes}: "
                f"give it {FEWEST_BLOCKS * block_bytes}, or sizes by --capacity-fraction"
            )
