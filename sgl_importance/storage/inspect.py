"""Inspects a store's directory: its contents, whether they are intact, and what may go."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.errors import ImportanceError
from sgl_importance.json_text import BadJson, read_json
from sgl_importance.storage.budget import (
    IDENTITY_FILE,
    StoredFile,
    delete,
    delete_abandoned,
    evict,
    remove_bare_folders,
    scan,
)
from sgl_importance.storage.checksum import crc32c
from sgl_importance.storage.page_record import HEADER_BYTES, MissReason, PageDamaged, decode_header
from sgl_importance.storage.regular import NotRegular, open_regular
from sgl_importance.storage.store import set_aside

Advance = Callable[[int], None]
SECONDS_PER_DAY = 86_400


class NoStore(ImportanceError):
    """The directory is none of a store."""


@dataclass(slots=True)
class ModelPages:
    """The pages of one model identity."""

    identity: str
    facts: dict[str, Any] | None
    pages: int = 0
    bytes: int = 0
    last_used: float = 0.0


@dataclass(slots=True)
class Verification:
    """The findings of a check of every page."""

    pages: int = 0
    bytes: int = 0
    damaged: dict[str, int] = field(default_factory=dict)
    set_aside: int = 0


@dataclass(slots=True)
class Collected:
    """Counts of what ``collect`` deleted."""

    unfinished: int = 0
    quarantined: int = 0
    unused_pages: int = 0
    evicted_pages: int = 0
    undeletable: int = 0
    bytes_left: int = 0


def files_of(directory: Path) -> list[StoredFile]:
    """The files of a store's pages.

    Raises:
        NoStore: there is no store in ``directory``.
    """
    if not (directory / "pages").is_dir():
        raise NoStore(f"{directory} holds no store: name what --kv-importance-store named")
    return list(scan(directory / "pages"))


def summarize(directory: Path) -> dict[str, Any]:
    """Pages and bytes by model, what was set aside and why, as plain values.

    Raises:
        NoStore: there is no store in ``directory``.
    """
    files = files_of(directory)
    models: dict[str, ModelPages] = {}
    for file in files:
        if not file.is_page:
            continue
        folder = file.path.parent
        model = models.setdefault(folder.name, ModelPages(folder.name, _facts(folder)))
        model.pages += 1
        model.bytes += file.size
        model.last_used = max(model.last_used, file.mtime_ns / 1e9)
    return {
        "pages": sum(model.pages for model in models.values()),
        "bytes": sum(file.size for file in files),
        "unfinished": sum(not file.is_page for file in files),
        "quarantined": dict(Counter(file.name.split("-")[0] for file in _quarantined(directory))),
        "models": [asdict(model) for model in sorted(models.values(), key=lambda model: -model.last_used)],
    }


def verify(
    directory: Path, *, quarantine: bool, files: Iterable[StoredFile], advance: Advance
) -> Verification:
    """Checks every page against its header, its name and its folder.

    Args:
        directory: of the store.
        quarantine: whether to set damaged pages aside, as a server would.
        files: what ``files_of`` found.
        advance: called with the bytes of each file.
    """
    result, damages = Verification(), Counter[str]()
    for file in files:
        if not file.is_page:
            continue
        result.pages += 1
        result.bytes += file.size
        try:
            _verify(file.path)
        except FileNotFoundError:
            result.pages -= 1  # evicted meanwhile
            result.bytes -= file.size
        except PageDamaged as damaged:
            damages[damaged.reason.value] += 1
            if quarantine:
                result.set_aside += set_aside(file.path, directory / "quarantine", damaged.reason)
        except OSError:
            damages[MissReason.IO.value] += 1
        advance(file.size)
    result.damaged = dict(damages)
    return result


def _verify(path: Path) -> None:
    try:
        data = np.frombuffer(_read(path), np.uint8)
    except NotRegular:
        raise PageDamaged(MissReason.IO) from None
    header, body = decode_header(data[:HEADER_BYTES].tobytes()), data[HEADER_BYTES:]
    if header.identity.hex() != path.parent.name:
        raise PageDamaged(MissReason.IDENTITY)
    if header.page.hex() != path.stem:
        raise PageDamaged(MissReason.PAGE)
    if header.length != body.nbytes:
        raise PageDamaged(MissReason.TRUNCATED if body.nbytes < header.length else MissReason.LENGTH)
    if header.body_crc != crc32c(body):
        raise PageDamaged(MissReason.BODY)


def collect(
    directory: Path,
    *,
    files: list[StoredFile],
    limit: int | None,
    unused_days: float | None,
    advance: Advance,
) -> Collected:
    """Deletes what is abandoned, what was set aside, and pages beyond the given bounds.

    What cannot be deleted stays and is counted.

    Args:
        directory: of the store; servers may be using it.
        files: what ``files_of`` found.
        limit: bytes to keep at most; None for all.
        unused_days: age since the last use beyond which a page goes.
        advance: called with the bytes of each file looked at.
    """
    result = Collected()
    stayed: set[Path] = set()

    def keep(path: Path, error: OSError) -> None:
        stayed.add(path)

    kept = delete_abandoned(files, keep)
    result.unfinished = len(files) - len(kept)
    for aside in _quarantined(directory):
        result.quarantined += delete(aside, keep)
    oldest = time.time() - unused_days * SECONDS_PER_DAY if unused_days is not None else 0.0
    for file in kept:
        if file.is_page and file.mtime_ns / 1e9 < oldest:
            result.unused_pages += delete(file.path, keep)
        advance(file.size)
    # Without a limit nothing goes: not as much as servers have written since ``files`` were found either.
    limit = sys.maxsize if limit is None else limit
    result.bytes_left, result.evicted_pages = evict(directory / "pages", limit, on_failure=keep)
    remove_bare_folders(directory / "pages")
    result.undeletable = len(stayed)
    return result


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def _quarantined(directory: Path) -> Iterator[Path]:
    folder = directory / "quarantine"
    return folder.iterdir() if folder.is_dir() else iter(())


def _facts(folder: Path) -> dict[str, Any] | None:
    try:
        facts = read_json(_read(folder / IDENTITY_FILE))
    except (OSError, BadJson):
        return None
    return facts if isinstance(facts, dict) else None
