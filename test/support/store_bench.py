"""A server with a store that tests break: its disk, its prompts, and the answers that must come."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from sgl_importance.metrics_table import PREFIX, STORE
from sgl_importance.storage.budget import scan
from sgl_importance.storage.page_record import decode_header

from support.config_file import config_flags
from support.python_path import FAULTS, TEST, python_path
from support.servers import ServerProcess
from support.waiting import HANG_SECONDS

PAGE_TOKENS = 16
PROMPT_TOKENS = 165
PROMPT_PAGES = PROMPT_TOKENS // PAGE_TOKENS
ANSWER_TOKENS = 6
PROMPTS = 80
# Tests demand pages that are there: on a machine that does much else, ten or a hundred take a while.
FETCH_TIMEOUT_SECONDS = 4.0
# A server takes less than 2 GB, and leaves 1 GiB free (faults/kv_store_fault).
NEEDED_BYTES = 3 << 30
MEMORY_SECONDS = 300.0
REPORT = "SGL_IMPORTANCE_FAULT_REPORT"

COMMON_FLAGS = ("--skip-tokenizer-init", "--max-total-tokens", "4096", "--page-size", str(PAGE_TOKENS))


def store_flags(directory: Path) -> tuple[str, ...]:
    return (
        *COMMON_FLAGS,
        *("--kv-importance-store", str(directory), "--hicache-ratio", "2"),
        *config_flags(store={"fetch_timeout_ms": int(FETCH_TIMEOUT_SECONDS * 1000)}),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
    )


def prompt(index: int) -> list[int]:
    return random.Random(index).choices(range(10, 1000), k=PROMPT_TOKENS)


def wait_for_memory() -> None:
    """Waits until a server can start: other work on the machine may have taken the memory that it needs."""
    deadline = time.monotonic() + MEMORY_SECONDS
    while (free := psutil.virtual_memory().available) < NEEDED_BYTES:
        if time.monotonic() > deadline:
            pytest.fail(
                f"memory is short, the store is not at fault: {free / 1e9:.1f} GB are free, a server needs "
                f"{NEEDED_BYTES / 1e9:.1f} GB: end other programs and run again"
            )
        time.sleep(1)


def answer(server: ServerProcess, index: int) -> dict:
    return server.generate(prompt(index), max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


def count(server: ServerProcess, name: str, **labels: str) -> float:
    """A counter of the store; 0 where nothing has been counted."""
    try:
        return server.metric(f"{PREFIX}{STORE}{name}_total", **labels)
    except KeyError:
        return 0


def flush(server: ServerProcess) -> None:
    """Empties memory; sglang refuses while a request is ending or a page is still being stored."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        try:
            return server.flush_cache()
        except httpx.HTTPStatusError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@dataclass
class Disk:
    """Where the store lies, and how it fills up and becomes read-only."""

    mount: Path
    is_real: bool
    control: Path
    _filler: list[Path] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.mount / "store"

    def break_(self, fault: str) -> None:
        if self.is_real and fault == "disk_full":
            filler = self.mount / "filler"
            with filler.open("wb", buffering=0) as file:
                for size in (1 << 20, 4096):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue
        elif self.is_real and fault == "read_only":
            subprocess.run(["mount", "-o", "remount,ro", self.mount], check=True)
        else:
            self.control.write_text(fault)

    def mend(self) -> None:
        self.control.unlink(missing_ok=True)
        if self.is_real:
            subprocess.run(["mount", "-o", "remount,rw", self.mount], check=True)
            (self.mount / "filler").unlink(missing_ok=True)


def fault_env(control: Path) -> dict[str, str]:
    return {**python_path(FAULTS / "kv_store_fault", TEST), "KV_STORE_FAULT_FILE": str(control)}


class Bench:
    """One server with a store, the expected answers, and a fresh prompt for every test."""

    def __init__(self, server: ServerProcess, disk: Disk, references: list[list[list[int]]]) -> None:
        self.server = server
        self.disk = disk
        self.references = references
        self.model = 0
        self._next = 0

    def fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def ask(self, index: int) -> int:
        """Asks a prompt, demands the right tokens; the prompt tokens that came from storage."""
        reply = answer(self.server, index)
        assert reply["output_ids"] == self.references[self.model][index], f"wrong tokens for prompt {index}"
        return (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)

    def flush(self) -> None:
        flush(self.server)

    def empty(self) -> None:
        """Forgets every prompt, in memory and on disk: each is new again."""
        self.flush()
        for file in scan(self.disk.store / "pages"):
            file.path.unlink(missing_ok=True)

    def count(self, name: str, **labels: str) -> float:
        return count(self.server, name, **labels)

    def wait_for(self, name: str, value: float, **labels: str) -> float:
        deadline = time.monotonic() + HANG_SECONDS
        while (found := self.count(name, **labels)) < value and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found >= value, f"{name} {labels} stayed at {found}, not {value}"
        return found

    def store_prompt(self, index: int) -> list[Path]:
        """Asks a new prompt and waits for its pages; their files, from the first page on."""
        before = self.count("written_pages")
        known = {file.path for file in scan(self.disk.store / "pages")}
        self.ask(index)
        self.wait_for("written_pages", before + PROMPT_PAGES)
        files = [file.path for file in scan(self.disk.store / "pages") if file.path not in known]
        return sorted(files, key=lambda file: decode_header(file.read_bytes()[:100]).depth)[:PROMPT_PAGES]


def report(fault: str, outcome: str, counter: str) -> None:
    """Adds a row to the report that ``scripts/reliability_report.py`` makes."""
    if path := os.environ.get(REPORT):
        with open(path, "a") as file:
            file.write(json.dumps({"fault": fault, "outcome": outcome, "counter": counter}) + "\n")
