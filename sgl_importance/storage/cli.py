"""`sgl-importance store`: look into a directory of verified pages, check it, clean it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sgl_importance.storage.budget import StoredFile
from sgl_importance.storage.inspect import Advance, NoStore, collect, files_of, summarize, verify
from sgl_importance.terminal import add_texts, fail, show, some_path

app = typer.Typer(
    help="Directories of --kv-importance-store; servers may be using them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Directory = Annotated[Path, typer.Argument(parser=some_path, help="What --kv-importance-store named.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DAMAGED_EXIT_CODE = 1


def _files(directory: Path) -> list[StoredFile]:
    try:
        return files_of(directory)
    except NoStore as error:
        fail(str(error))


@contextmanager
def _progress(title: str, files: list[StoredFile]) -> Iterator[Advance]:
    """A bar over the bytes of ``files``, on stderr."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task(title, total=sum(file.size for file in files))
        yield lambda size: progress.advance(task, size)


@app.command("stat")
def stat_command(directory: Directory, as_json: AsJson = False) -> None:
    """Say what a store holds, by model."""
    try:
        facts = summarize(directory)
    except NoStore as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table("model", "weights", "version", "ranks", "page", "pages", "size", "last used")
    for model in facts["models"]:
        known = model["facts"] or {}
        add_texts(
            table,
            model["identity"][:12],
            str(known.get("weights", "?"))[:12],
            str(known.get("weights_version", "?")),
            f"tp {known.get('tp_rank', '?')}/{known.get('tp_size', '?')}",
            f"{known.get('page_size', '?')} tokens, {known.get('dtype', '?')}",
            str(model["pages"]),
            decimal(model["bytes"]),
            datetime.fromtimestamp(model["last_used"], UTC).isoformat(timespec="seconds"),
        )
    show(table)
    aside = ", ".join(f"{count} {reason}" for reason, count in sorted(facts["quarantined"].items())) or "none"
    typer.echo(f"{facts['pages']} pages, {decimal(facts['bytes'])}; set aside: {aside}")


@app.command("verify")
def verify_command(
    directory: Directory,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Set damaged pages aside.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every page; exit code 1 where one is damaged."""
    files = _files(directory)
    with _progress("verify", files) as advance:
        result = verify(directory, quarantine=quarantine, files=files, advance=advance)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        damaged = ", ".join(f"{count} {reason}" for reason, count in sorted(result.damaged.items())) or "none"
        found = f"{result.pages} pages, {decimal(result.bytes)}"
        typer.echo(f"{found}; damaged: {damaged}; set aside: {result.set_aside}")
    if result.damaged:
        raise typer.Exit(DAMAGED_EXIT_CODE)


@app.command("gc")
def gc_command(
    directory: Directory,
    limit: Annotated[int | None, typer.Option("--bytes", min=0, help="Keep at most so many bytes.")] = None,
    unused_days: Annotated[
        float | None, typer.Option("--unused-days", min=0, help="Delete pages not used for so many days.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete what killed writers left, what was set aside, and pages beyond the given bounds."""
    files = _files(directory)
    if not os.access(directory, os.W_OK):
        fail(f"{directory} cannot be written: run as the user of the server")
    with _progress("gc", files) as advance:
        result = collect(directory, files=files, limit=limit, unused_days=unused_days, advance=advance)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    typer.echo(
        f"deleted {result.unfinished} unfinished, {result.quarantined} set aside, "
        f"{result.unused_pages} unused and {result.evicted_pages} least recently used pages; "
        f"{decimal(result.bytes_left)} left"
    )
    if result.undeletable:
        typer.echo(f"files that cannot be deleted: {result.undeletable}; run as the user who wrote them")
