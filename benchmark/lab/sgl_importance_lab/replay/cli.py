"""`sgl-importance replay`: hit rates of eviction policies on recorded or public traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sgl_importance.observe.shadow.shadow_pair import SERVER_CHUNK_TOKENS
from sgl_importance.terminal import existing_file, fail, show, some_path
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.chain_command import replay_chain
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.lower_tiers.chain_replay import ChainHardware
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierError, TierSize, WritePolicy
from sgl_importance_lab.replay.policy_registry import DEFAULT_POLICIES, OPTIMUM
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_arguments import (
    BYTES_PER_TOKEN,
    HOST_GBPS,
    PREFILL_TOKENS_PER_SECOND,
    STORAGE_GBPS,
    BytesPerToken,
    FormatName,
    HostGbps,
    Jobs,
    PrefillTokensPerSecond,
    SkipBad,
    StorageGbps,
    Tokenizer,
    check_results,
    workers_of,
)
from sgl_importance_lab.replay.replay_runner import Job, ReplayMode, Row, run_job
from sgl_importance_lab.replay.report.console import (
    MOST,
    check_traces,
    open_journal,
    parse_numbers,
    parse_policies,
    parse_seeds,
    read_traces,
    run_with_progress,
    write_rows,
)
from sgl_importance_lab.replay.report.plot import plot_rows
from sgl_importance_lab.replay.report.replay_report import results_table
from sgl_importance_lab.replay.report.tier_report import TieredJob, TieredRow, run_tiered_job, tiered_table
from sgl_importance_lab.replay.residency.page_command import parse_page_policies, replay_pages
from sgl_importance_lab.replay.residency.page_replay import PAGE_POLICIES, Selection
from sgl_importance_lab.replay.trace import Trace

app = typer.Typer(
    help="Replay traces: the hit rate of each eviction policy, and its distance from the optimum.",
    pretty_exceptions_enable=False,
    subcommand_metavar="",
)

# A group stops looking for options at the first argument, and traces come before options.
_OPTIONS_AFTER_TRACES = {"allow_interspersed_args": True}
_TIERS = "Tiers"
_PAGES = "Pages in tiers"
_CHAIN = "Chain of storage tiers"

_OF_PAGES, _OF_CHAIN, _OF_TIERS, _OF_SWEEP = "--pages", "--tiers", "--device-blocks", ""
_USED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("selected", "chosen", "resident_bias"), (_OF_PAGES,)),
    "price_computed": (_OF_CHAIN,),
    **dict.fromkeys(
        ("host_policy", "storage_policy", "write_policy", "host_gbps", "storage_gbps"), (_OF_TIERS,)
    ),
    **dict.fromkeys(("prefill_tokens_per_second", "bytes_per_token"), (_OF_CHAIN, _OF_TIERS)),
    **dict.fromkeys(
        ("format_name", "skip_bad", "tokenizer", "block_tokens", "alive", "seed"),
        (_OF_CHAIN, _OF_TIERS, _OF_SWEEP),
    ),
}
"""Parameters that not every replay uses, with the options of those that do."""


@app.callback(invoke_without_command=True, context_settings=_OPTIONS_AFTER_TRACES)
def replay_command(
    context: typer.Context,
    traces: Annotated[list[Path], typer.Argument(parser=some_path, metavar="TRACE", help="Files to replay.")],
    policies: Annotated[
        str, typer.Option(help="Comma-separated policies; belady is the optimum.")
    ] = DEFAULT_POLICIES,
    capacity_blocks: Annotated[
        str | None, typer.Option(help="Comma-separated capacities in blocks.", metavar="N,N...")
    ] = None,
    capacity_fraction: Annotated[
        str | None,
        typer.Option(help="Comma-separated capacities, as parts of the unique blocks.", metavar="F,F..."),
    ] = None,
    format_name: FormatName = None,
    object_level: Annotated[
        bool, typer.Option("--object-level", help="Treat blocks as independent, as general simulators do.")
    ] = False,
    node_granular: Annotated[
        bool,
        typer.Option(
            "--node-granular",
            help="Evict whole radix nodes, one for each prefill chunk, and refuse what is longer than the "
            "cache, as a server does. Without it single blocks go: no server hits as much.",
        ),
    ] = False,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --node-granular: the server's --chunked-prefill-size; "
            f"{SERVER_CHUNK_TOKENS} if absent.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=some_path, metavar="PATH", help="Write the rows to this file."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot", parser=some_path, metavar="PATH", help="Draw hit rate versus budget; adds the optimum."
        ),
    ] = None,
    jobs: Jobs = None,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block; what the format says if absent.")
    ] = None,
    alive: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions alive at a time, for traces of single sessions; 20 if absent."),
    ] = None,
    seed: Annotated[
        str,
        typer.Option(
            metavar="N,N...", help="Of the order in which these sessions begin, and of policies that draw."
        ),
    ] = "0",
    device_blocks: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_TIERS, help="Replay tiers; capacity of the device in blocks."),
    ] = None,
    host_blocks: Annotated[
        int, typer.Option(min=0, rich_help_panel=_TIERS, help="Capacity of the host in blocks.")
    ] = 0,
    storage_blocks: Annotated[
        int, typer.Option(min=0, rich_help_panel=_TIERS, help="Capacity of the storage in blocks.")
    ] = 0,
    host_policy: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_TIERS,
            help="Policy of the host; lru if absent, and with --node-granular that of the device.",
        ),
    ] = None,
    storage_policy: Annotated[
        str, typer.Option(rich_help_panel=_TIERS, help="Policy of the storage.")
    ] = "lru",
    write_policy: Annotated[
        WritePolicy, typer.Option(rich_help_panel=_TIERS, help="How blocks come to the lower tiers.")
    ] = WritePolicy.WRITE_THROUGH,
    host_gbps: HostGbps = HOST_GBPS,
    storage_gbps: StorageGbps = STORAGE_GBPS,
    prefill_tokens_per_second: PrefillTokensPerSecond = PREFILL_TOKENS_PER_SECOND,
    bytes_per_token: BytesPerToken = BYTES_PER_TOKEN,
    pages: Annotated[
        bool,
        typer.Option(
            "--pages",
            rich_help_panel=_PAGES,
            help="Replay which pages tokens read (recorded with trace.pages of --kv-importance-config) "
            f"through the policies of residency: {', '.join(PAGE_POLICIES)}. Capacities are pages that each "
            "layer and KV head keeps, or parts of the longest context.",
        ),
    ] = False,
    selected: Annotated[
        float,
        typer.Option(
            min=0.0001,
            max=1,
            rich_help_panel=_PAGES,
            help="Share of its context's pages that a generated token reads: those with the most attention.",
        ),
    ] = 0.1,
    chosen: Annotated[
        bool,
        typer.Option(
            "--chosen", rich_help_panel=_PAGES, help="It reads what the recording server's selector chose."
        ),
    ] = False,
    resident_bias: Annotated[
        str,
        typer.Option(
            rich_help_panel=_PAGES,
            metavar="X,X...",
            help="Resident pages count (1 + X)-fold when pages are selected.",
        ),
    ] = "0",
    tiers_file: Annotated[
        Path | None,
        typer.Option(
            "--tiers",
            parser=existing_file,
            metavar="FILE",
            rich_help_panel=_CHAIN,
            help="Replay the chain of storage tiers that this TOML file describes.",
        ),
    ] = None,
    price_computed: Annotated[
        float, typer.Option(min=0, max=1e9, rich_help_panel=_CHAIN, help="Of a million computed tokens.")
    ] = 0.0,
) -> None:
    """Replay traces: the hit rate of each eviction policy, and its distance from the optimum."""
    check_traces(traces)
    workers = workers_of(jobs)
    seeds = parse_seeds(seed)
    tier_sizes = device_blocks is not None or bool(host_blocks) or bool(storage_blocks)
    if chunk_tokens is not None and not node_granular:
        fail("--chunk-tokens says how long nodes are: it needs --node-granular")
    for option, policy in (("--host-policy", host_policy), ("--storage-policy", storage_policy)):
        if policy is not None:
            _only_policy(option, policy)
    if pages:
        if any((object_level, node_granular, plot_file, tiers_file, tier_sizes)):
            fail("--pages replays page lists: leave out --plot, and the modes and sizes of other replays")
        _refuse_unused(context, _OF_PAGES)
        if chosen and _is_given(context, "selected"):
            fail("what a selector chose is chosen: leave out one of --chosen and --selected")
        _replay_pages(
            traces,
            parse_page_policies(policies),
            parse_numbers("--capacity-blocks", capacity_blocks, int),
            parse_numbers("--capacity-fraction", capacity_fraction, float),
            Selection(0 if chosen else selected),
            parse_numbers("--resident-bias", resident_bias, float, may_be_zero=True),
            json_file,
            workers,
        )
        return
    names = parse_policies(policies)
    blocks = parse_numbers("--capacity-blocks", capacity_blocks, int)
    fractions = parse_numbers("--capacity-fraction", capacity_fraction, float)
    if tiers_file is not None:
        if blocks or any((object_level, node_granular, plot_file, tier_sizes)):
            fail("--tiers takes sizes from its file or --capacity-fraction: leave out other sizes and modes")
        _refuse_unused(context, _OF_CHAIN)
        replay_chain(
            traces,
            tiers_file,
            policies=policies,
            fractions=fractions,
            hardware=ChainHardware(prefill_tokens_per_second, bytes_per_token, price_computed),
            options=ReadOptions(tokenizer, block_tokens, object_level, alive),
            format_name=format_name,
            skip_bad=skip_bad,
            seeds=seeds,
            json_file=json_file,
            workers=workers,
        )
        return
    if [bool(blocks), bool(fractions), device_blocks is not None].count(True) != 1:
        fail("say how large the cache is: one of --capacity-blocks, --capacity-fraction and --device-blocks")
    if object_level and node_granular:
        fail("objects have no nodes: leave out one of --object-level and --node-granular")
    if device_blocks is None and (host_blocks or storage_blocks):
        fail("--host-blocks and --storage-blocks need --device-blocks")
    if device_blocks is not None and (object_level or plot_file is not None):
        fail("--device-blocks replays tiers: leave out --object-level and --plot")
    _refuse_unused(context, _OF_SWEEP if device_blocks is None else _OF_TIERS)
    check_results(json_file, plot_file)
    options = ReadOptions(tokenizer, block_tokens, object_level, alive)
    chunk = (chunk_tokens or SERVER_CHUNK_TOKENS) if node_granular else None

    if device_blocks is not None:

        def sizes(name: str) -> tuple[TierSize, ...]:
            of_host = host_policy or (name if node_granular else "lru")
            lower = [
                TierSize(tier, capacity, _only_policy(f"--{tier}-policy", policy), gbps * 1e9)
                for tier, capacity, policy, gbps in (
                    (Tier.HOST, host_blocks, of_host, host_gbps),
                    (Tier.STORAGE, storage_blocks, storage_policy, storage_gbps),
                )
                if capacity
            ]
            return TierSize(Tier.DEVICE, device_blocks, name, float("inf")), *lower

        try:
            setups = [
                TieredSetup(sizes(name), write_policy, prefill_tokens_per_second, bytes_per_token, chunk)
                for name in names
            ]
        except TierError as error:
            fail(str(error))
        read = read_traces(traces, options, format_name, skip_bad=skip_bad, seeds=seeds)
        tiered = [
            TieredJob(index, setup, seeds[index % len(seeds)])
            for index in range(len(read))
            for setup in setups
        ]
        tiered_journal = open_journal(json_file, TieredRow, read, tiered)
        tiered_rows = run_with_progress(run_tiered_job, read, tiered, workers, tiered_journal)
        for row in tiered_rows:
            show(tiered_table(row))
        if json_file is not None:
            write_rows(json_file, tiered_rows, tiered_journal)
        return

    mode = ReplayMode.OBJECTS if object_level else ReplayMode.NODES if node_granular else ReplayMode.TREE
    read = read_traces(traces, options, format_name, skip_bad=skip_bad, seeds=seeds)
    planned = names + [OPTIMUM] * (plot_file is not None and OPTIMUM not in names)
    replays = [
        Job(index, policy, capacity, mode, seeds[index % len(seeds)], chunk)
        for index, trace in enumerate(read)
        for policy in planned
        for capacity in _capacities(trace, blocks, fractions)
    ]
    journal = open_journal(json_file, Row, read, replays)
    rows = run_with_progress(run_job, read, replays, workers, journal)
    asked = [row for row in rows if row.policy in names]
    for trace in read:
        show(results_table(trace, [row for row in asked if row.trace == trace.name], mode))
    if json_file is not None:
        write_rows(json_file, asked, journal)
    if plot_file is not None:
        plot_rows(rows, {trace.name: trace.num_blocks for trace in read}, plot_file)


def _replay_pages(
    directories: list[Path],
    policies: list[str],
    slots: list[int],
    fractions: list[float],
    selection: Selection,
    biases: list[float],
    json_file: Path | None,
    workers: int | RayCluster,
) -> None:
    if bool(slots) == bool(fractions):
        fail("say how many pages stay on the device: one of --capacity-blocks and --capacity-fraction")
    check_results(json_file, None)
    replay_pages(
        directories,
        policies=policies,
        slots=slots,
        fractions=fractions,
        selections=[replace(selection, bias=bias) for bias in dict.fromkeys(biases)],
        json_file=json_file,
        workers=workers,
    )


def _refuse_unused(context: typer.Context, mode: str) -> None:
    """Fails where an option is given that this replay does not use."""
    for parameter in context.command.params:
        name = str(parameter.name)
        if mode in _USED_BY.get(name, (mode,)) or not _is_given(context, name):
            continue
        option = parameter.opts[0]
        if mode:
            fail(f"{option} says nothing to {mode}: leave it out")
        fail(f"{option} needs {' or '.join(_USED_BY[name])}: add that, or leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    # By name: some releases of typer bring a click of their own.
    return source is not None and source.name != "DEFAULT"


def _only_policy(option: str, text: str) -> str:
    names = parse_policies(text)
    if len(names) > 1:
        fail(f"{option} takes one policy, not {text!r}")
    return names[0]


def _capacities(trace: Trace, blocks: list[int], fractions: list[float]) -> list[int]:
    shares = (max(1, min(int(part * trace.num_blocks), MOST)) for part in fractions)
    return list(dict.fromkeys(blocks or shares))
