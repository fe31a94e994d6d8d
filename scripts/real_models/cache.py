"""Converted models on disk: each whole or not there, made by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_models.catalogue import PublishedModel
from real_models.checkpoint import write_checkpoint
from real_models.fetch import fetch_gguf
from real_models.gguf_file import GgufFile
from real_models.trouble import ModelTrouble

FORMAT = 1
"""Raised when the conversion changes: what an older one made is made anew."""
RECORD = "conversion.json"
"""Written last: what the folder was made of, and how long each file of it is."""


def cached_model(name: str, model: PublishedModel, cache: Path) -> Path:
    """The folder of ``model`` in ``cache``, fetched and converted where it is not there whole.

    Raises:
        ModelTrouble: it cannot be had; what was there before is left as it was.
    """
    folder = cache / name
    if is_whole(folder, model):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f"{name}.lock", model.title):
            if not is_whole(folder, model):
                _make(folder, model)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelTrouble(_too_full(model, cache)) from error
        raise ModelTrouble(f"{cache}: {error.strerror}: this folder must be writable") from error
    return folder


def is_whole(folder: Path, model: PublishedModel) -> bool:
    """Whether ``folder`` holds what these pins and this conversion make, every file in its length."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(record == {"made_of": _identity(model), "files": sizes})


def _identity(model: PublishedModel) -> str:
    return f"format {FORMAT}, pins {hashlib.sha256(model.pins.read_bytes()).hexdigest()}"


def _make(folder: Path, model: PublishedModel) -> None:
    started = time.monotonic()

    def step(what: str) -> None:
        print(f"==> [{time.monotonic() - started:.0f} s] {what}", file=sys.stderr, flush=True)

    for left_behind in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(left_behind)
    if shutil.disk_usage(folder.parent).free < model.room:
        raise ModelTrouble(_too_full(model, folder.parent))
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        step(f"Fetching {model.title} ({model.license_note})")
        file = fetch_gguf(model, partial)
        step("Converting it, once")
        made = partial / "model"
        made.mkdir()
        write_checkpoint(GgufFile(file), made)
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        (made / RECORD).write_text(json.dumps({"made_of": _identity(model), "files": files}, indent=1) + "\n")
        if folder.exists():
            folder.rename(partial / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    step(f"{model.title} is in {folder}")


def _too_full(model: PublishedModel, cache: Path) -> str:
    free = shutil.disk_usage(cache).free / 1e6
    needed = model.room / 1e6
    return f"{model.title} needs {needed:.0f} MB in {cache}, where {free:.0f} MB are free: free some"


@contextmanager
def _alone(lock: Path, title: str) -> Iterator[None]:
    """While another process makes the same model, this one waits."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"==> Another process is fetching {title}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
