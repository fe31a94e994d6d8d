"""`sgl-importance store`: directories of verified pages, and the tiers of a chain."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from sgl_importance.storage.cli import DAMAGED_EXIT_CODE, AsJson, app
from sgl_importance.storage.inspect import NoStore, files_of, verify
from sgl_importance.storage.page_record import MissReason, PageDamaged
from sgl_importance.storage.tier_chain.kinds.mapped_tier import read_slots
from sgl_importance.storage.tier_chain.kinds.record_index import INDEX, read_entry
from sgl_importance.storage.tier_chain.kinds.tier_record import check_record
from sgl_importance.storage.tier_chain.open_chain import MAPPED_FILE
from sgl_importance.storage.tier_chain.tier_file import (
    FOLDER_KINDS,
    INDEX_KINDS,
    TierFileError,
    TierKind,
    TierSpec,
    read_tier_file,
)
from sgl_importance.terminal import add_texts, existing_file, fail, show

__all__ = ["app"]


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
        if rank.is_dir():
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
