"""`sgl-importance replay`: hit rates of eviction policies on recorded or public traces."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_importance.policy.registry import OPTIMUM, UnknownPolicyError, load_policy
from sgl_importance.replay.formats.detect import READERS, read_trace
from sgl_importance.replay.formats.reader import BadRecord, ReadOptions, TraceError, refuse_bad_record
from sgl_importance.replay.plot import PlotError, check_plot, plot_rows
from sgl_importance.replay.report import results_table
from sgl_importance.replay.runner import Job, ReplayError, ReplayMode, Row, run_jobs
from sgl_importance.replay.trace import Trace

app = typer.Typer(
    help="Replay traces: how often each eviction policy would hit, and how far that is from the optimum.",
    pretty_exceptions_enable=False,
    subcommand_metavar="",
)

# A group stops looking for options at the first argument, and traces come before options.
_OPTIONS_AFTER_TRACES = {"allow_interspersed_args": True}


NumberT = TypeVar("NumberT", int, float)


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


@app.callback(invoke_without_command=True, context_settings=_OPTIONS_AFTER_TRACES)
def replay_command(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Files to replay.")],
    policies: Annotated[
        str, typer.Option(help="Comma-separated policies; belady is the optimum.")
    ] = f"lru,{OPTIMUM}",
    capacity_blocks: Annotated[
        str | None, typer.Option(help="Comma-separated capacities in blocks.", metavar="N,N...")
    ] = None,
    capacity_fraction: Annotated[
        str | None,
        typer.Option(help="Comma-separated capacities, as parts of the unique blocks.", metavar="F,F..."),
    ] = None,
    format_name: Annotated[
        str | None, typer.Option("--format", help=f"One of {', '.join(READERS)}; found by content if absent.")
    ] = None,
    object_level: Annotated[
        bool, typer.Option("--object-level", help="Treat blocks as independent, as general simulators do.")
    ] = False,
    node_granular: Annotated[
        bool, typer.Option("--node-granular", help="Evict whole radix nodes, as the server does.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit rate versus budget; adds the optimum.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores if absent.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad records and go on.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hugging Face tokenizer for traces of text; bytes if absent.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block; what the format says if absent.")
    ] = None,
) -> None:
    """Replay traces: how often each eviction policy would hit, and how far that is from the optimum."""
    if object_level and node_granular:
        _fail("--object-level has no nodes: leave out one of --object-level and --node-granular")
    mode = ReplayMode.OBJECTS if object_level else ReplayMode.NODES if node_granular else ReplayMode.TREE
    names = _parse_policies(policies)
    blocks = _parse_numbers("--capacity-blocks", capacity_blocks, int)
    fractions = _parse_numbers("--capacity-fraction", capacity_fraction, float)
    if bool(blocks) == bool(fractions):
        _fail("say how large the cache is: either --capacity-blocks or --capacity-fraction")
    for out in (json_file, plot_file):
        if out is not None and not out.resolve().parent.is_dir():
            _fail(f"no directory for {out}: create it first")
    try:
        if plot_file is not None:
            check_plot(plot_file)
        options = ReadOptions(tokenizer, block_tokens, object_level)
        read = _read_traces(traces, options, format_name, skip_bad)
        for trace, path in zip(read, traces, strict=True):
            if trace.parents is None and mode is not ReplayMode.OBJECTS:
                _fail(f"{path}: its objects have no prefixes: add --object-level")
        planned = names + [OPTIMUM] * (plot_file is not None and OPTIMUM not in names)
        work = [
            Job(index, policy, capacity, mode)
            for index, trace in enumerate(read)
            for policy in planned
            for capacity in _capacities(trace, blocks, fractions)
        ]
        rows = _run(read, work, jobs or os.cpu_count() or 1)
    except (TraceError, PlotError, ReplayError) as error:
        _fail(str(error))
    asked = [row for row in rows if row.policy in names]
    for trace in read:
        Console().print(results_table(trace, [row for row in asked if row.trace == trace.name], mode))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in asked], indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot_rows(rows, {trace.name: trace.num_blocks for trace in read}, plot_file)


def _parse_policies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        _fail("--policies is empty: name at least one, such as lru")
    try:
        for name in names:
            load_policy(name)
    except UnknownPolicyError as error:
        _fail(str(error))
    return names


def _parse_numbers(option: str, text: str | None, kind: type[NumberT]) -> list[NumberT]:
    if text is None:
        return []
    example = "1827,3655" if kind is int else "0.01,0.02"
    try:
        numbers = [kind(number) for number in text.split(",")]
    except ValueError:
        _fail(f"{option} takes numbers such as {example}, not {text!r}")
    if not all(0 < number < float("inf") for number in numbers):
        _fail(f"{option} takes numbers above 0, not {text!r}")
    return numbers


def _capacities(trace: Trace, blocks: list[int], fractions: list[float]) -> list[int]:
    return list(dict.fromkeys(blocks or [max(1, int(part * trace.num_blocks)) for part in fractions]))


def _read_traces(
    paths: list[Path], options: ReadOptions, format_name: str | None, skip_bad: bool
) -> list[Trace]:
    traces = []
    for path in paths:
        bad: list[BadRecord] = []
        on_bad_record = bad.append if skip_bad else refuse_bad_record
        trace = read_trace(path, options, format_name=format_name, on_bad_record=on_bad_record)
        if bad:
            typer.echo(
                f"{path}: skipped {len(bad)} bad record{'s' * (len(bad) > 1)}, first {bad[0]}", err=True
            )
        traces.append(trace)
    if len({trace.name for trace in traces}) < len(traces):
        return [replace(trace, name=str(path)) for trace, path in zip(traces, paths, strict=True)]
    return traces


def _run(traces: list[Trace], work: list[Job], processes: int) -> list[Row]:
    """Rows in the order of the work, whatever finishes first."""
    terminal = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows: list[Row | None] = [None] * len(work)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("replaying", total=len(work))
        for index, row in run_jobs(traces, work, processes):
            rows[index] = row
            progress.advance(bar)
    return [row for row in rows if row is not None]
