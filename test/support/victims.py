"""Victims of evictions, by scheduler, as the plugin ``victim_log`` has written them down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.python_path import CHECKS

VICTIM_LOG = CHECKS / "victim_log"


def log_victims_to(folder: Path) -> dict[str, str]:
    """Variables of a server that loads the plugin."""
    folder.mkdir()
    return {"VICTIM_LOG": str(folder)}


def victims(folder: Path) -> dict[str, list[str]]:
    """One line for each victim, in order: tier, number of the node, its tokens."""
    return {file.name: file.read_text().splitlines() for file in sorted(folder.iterdir())}


def cores_of_ranks(ranks: int) -> dict[str, str]:
    """sglang binds each of several ranks on a CPU to cores of its own; skips where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        pytest.skip(f"sglang binds each rank to cores of its own: {ranks} are needed")
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:ranks]))}
