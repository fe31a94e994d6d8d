"""`sgl-importance store`: directories of verified pages, and the tiers of a chain."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from sgl_importance.storage.page_record import MissReason, PageDamaged
from sgl_importance.storage.tier_chain.kinds.mapped_tier import read_slots
from sgl_importance.storage.tier_chain.kinds.record_index import INDEX, read_entry
from sgl_importance.storage.tier_chain.kinds.tier_record import check_record
from sgl_importance.storage.tier_chain.open_chain import MAPPED_FILE, is_rank_folder
from sgl_importance.storage.tier_chain.tier_file import (
    FOLDER_KINDS,
    INDEX_KINDS,
    TierFileError,
    TierKind,
    TierSpec,
    read_tier_file,
)
from sgl_importance.terminal import add_texts, existing_file, fail, show, some_path

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


@dataclass(slots=True)
class RankPages:
    """What one rank of a server keeps in a tier; ``damaged`` counts by reason, where pages were checked."""

    tier: str
    kind: str
    capacity: int
    rank: str
    pages: int = 0
    bytes: int = 0
    damaged: dict[str, int] = field(default_factory=dict)


@app.command("tiers")
def tiers_command(
    file: Annotated[Path, typer.Argument(parser=existing_file, help="What --kv-importance-tiers named.")],
    check: Annotated[
        bool, typer.Option("--verify", help="Check every page; exit code 1 where one is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what the tiers of a chain hold, of each rank; servers may be using them."""
    try:
        spec = read_tier_file(file)
        found = [row for tier in spec.tiers for row in _ranks(tier, check=check)]
    except (TierFileError, NoStore) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error}: correct the folder, or run as the user of the server")
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in found]))
    else:
        table = Table("tier", "kind", "of", "rank", "pages", "size", *["damaged"] * check)
        for row in found:
            damaged = ", ".join(f"{count} {reason}" for reason, count in sorted(row.damaged.items()))
            is_read = row.rank and row.kind not in INDEX_KINDS
            held = (str(row.pages), decimal(row.bytes)) if row.rank else ("in the server", "")
            add_texts(
                table,
                row.tier,
                row.kind,
                decimal(row.capacity),
                row.rank,
                *held,
                *[damaged or ("none" if is_read else "not read")] * check,
            )
        show(table)
    if any(row.damaged for row in found):
        raise typer.Exit(DAMAGED_EXIT_CODE)


def _ranks(tier: TierSpec, *, check: bool) -> Iterator[RankPages]:
    """What lies in the folders of a tier; memory of a process is asked for by ``doctor --url``."""
    if tier.kind not in FOLDER_KINDS:
        yield RankPages(tier.name, tier.kind.value, tier.capacity, "")
        return
    folder = tier.path
    for rank in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_rank_folder(rank) and rank.is_dir():
            row = RankPages(tier.name, tier.kind.value, tier.capacity, rank.name)
            if tier.kind in INDEX_KINDS:
                _count_entries(row, rank)
            elif tier.kind is TierKind.CXL:
                _count_slots(row, rank, check)
            else:
                _count_files(row, rank, check)
            yield row


def _count_files(row: RankPages, folder: Path, check: bool) -> None:
    files = [file for file in files_of(folder) if file.is_page]
    row.pages, row.bytes = len(files), sum(file.size for file in files)
    if check:
        row.damaged = verify(folder, quarantine=False, files=files, advance=lambda size: None).damaged


def _count_entries(row: RankPages, folder: Path) -> None:
    """Records that lie elsewhere, as the folder has them; they are not read."""
    for path in (folder / INDEX).glob("*/*"):
        try:
            entry = read_entry(path)
        except FileNotFoundError:
            continue  # it went meanwhile
        if entry is not None:
            row.pages += 1
            row.bytes += entry.size


def _count_slots(row: RankPages, folder: Path, check: bool) -> None:
    damaged = Counter[str]()
    for listed, record in read_slots(folder / MAPPED_FILE):
        row.pages += 1
        row.bytes += record.nbytes
        try:
            if listed is None:
                raise PageDamaged(MissReason.HEADER)
            if check:
                check_record(record, listed.name)
        except PageDamaged as error:
            damaged[error.reason.value] += 1
    row.damaged = dict(damaged)
