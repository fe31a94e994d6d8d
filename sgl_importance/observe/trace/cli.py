"""`sgl-importance trace`: look into a recording, or convert it for other tools."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sgl_importance.observe.trace.arrivals import arrivals, mooncake_rows
from sgl_importance.observe.trace.merge import merge_recordings
from sgl_importance.observe.trace.reader import TraceError, open_trace
from sgl_importance.observe.trace.records import TreeEvent
from sgl_importance.observe.trace.segments import segment_bytes, segment_files
from sgl_importance.terminal import add_texts, check_outputs, fail, show, some_path

app = typer.Typer(
    help="Recordings made with --kv-importance-trace.", no_args_is_help=True, pretty_exceptions_enable=False
)
Directory = Annotated[Path, typer.Argument(parser=some_path, help="What --kv-importance-trace named.")]


def describe(directory: Path) -> dict[str, Any]:
    """The contents of a recording in numbers, as plain values.

    Raises:
        TraceError: there is no recording.
    """
    reader = open_trace(directory)
    records: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for record in reader:
        records[type(record).__name__] += 1
        if isinstance(record, TreeEvent):
            events[f"{record.kind} {record.tier}"] += 1
    header = reader.header
    requests = arrivals(reader)
    return {
        "version": header.version,
        "runs": len(reader.headers),
        "model": header.model,
        "page_size": header.page_size,
        "layers": list(header.layers),
        "detail": str(header.detail),
        "options": header.options,
        "capacity_tokens": header.capacity_tokens,
        "bytes": sum(map(segment_bytes, segment_files(directory))),
        "requests": len(requests),
        "input_tokens": sum(request.input_tokens for request in requests),
        "cached_tokens": sum(request.cached_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "unique_pages": len(reader.digests),
        "records": dict(records),
        "events": dict(events),
        "dropped": reader.dropped,
        "torn_bytes": reader.torn_bytes,
    }


@app.command("info")
def info_command(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a recording holds."""
    try:
        facts = describe(directory)
    except TraceError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        add_texts(table, name, shown)
    show(table)


@app.command("convert")
def convert_command(
    directory: Directory,
    out: Annotated[Path, typer.Argument(parser=some_path, help="JSONL file in Mooncake's trace format.")],
    health_checks: Annotated[bool, typer.Option(help="Keep the server's own requests.")] = False,
) -> None:
    """Write the requests for replay: timestamp in ms, lengths, one id per page of the prompt."""
    check_outputs(out)
    try:
        requests = arrivals(open_trace(directory), health_checks=health_checks)
    except TraceError as error:
        fail(str(error))
    with out.open("w", encoding="utf-8") as file:
        for row in mooncake_rows(requests):
            file.write(json.dumps(row) + "\n")
    typer.echo(f"{len(requests)} requests in {out}")


@app.command("merge")
def merge_command(
    directories: Annotated[
        list[Path], typer.Argument(parser=some_path, help="Recordings of one model, two or more.")
    ],
    out: Annotated[Path, typer.Argument(parser=some_path, help="Directory of the new recording.")],
) -> None:
    """Write the requests of several servers, by time, as one recording: one cache in front of all."""
    if len(directories) < 2:
        fail("one recording is as it is: name two or more, and then the directory of the new one")
    try:
        with Console(stderr=True).status("merging"):
            merged = merge_recordings(directories, out)
    except TraceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{out}: {error.strerror}")
    typer.echo(
        f"{merged.requests} requests of {len(directories)} recordings in {out}; {merged.pages} pages, "
        f"{merged.shared_pages} of them in more than one"
    )
