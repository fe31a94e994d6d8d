"""One server with a store for all tests of this folder, and the answers of a server that reuses nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_importance.storage.store_counters import StoreCounters
from sglang_importance.storage.weights import WATCH, WeightsWatch

from support.host_pools import WEIGHTS
from support.models import write_random_llama
from support.servers import ServerProcess
from support.store_bench import (
    COMMON_FLAGS,
    PROMPTS,
    Bench,
    Disk,
    answer,
    fault_env,
    flush,
    store_flags,
    wait_for_memory,
)
from support.weight_updates import from_disk


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> WeightsWatch:
    """Weights as a scheduler has loaded them, in this process, and counters at zero."""
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    monkeypatch.setattr(WATCH, "counters", StoreCounters())
    return WATCH


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape and other weights."""
    return [write_random_llama(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture(scope="package")
def references(models: list[Path]) -> list[list[list[int]]]:
    """The answer to every prompt of a server without any cache, by model."""
    flags = ("--kv-policy", "default", "--disable-radix-cache", *COMMON_FLAGS)
    wait_for_memory()
    with ServerProcess(*flags, model=models[0]) as server:
        first = [answer(server, index)["output_ids"] for index in range(PROMPTS)]
        flush(server)  # an update that cannot flush ends the server
        from_disk(server, models[1], flush_cache=True)
        second = [answer(server, index)["output_ids"] for index in range(PROMPTS)]
    assert sum(a != b for a, b in zip(first, second, strict=True)) > PROMPTS * 0.9
    return [first, second]


@pytest.fixture(scope="package")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """A small file system of its own where we may mount one; else a folder, and its faults are injected."""
    mount = tmp_path_factory.mktemp("disk")
    control = tmp_path_factory.mktemp("control") / "fault"
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)]
    try:
        is_real = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        is_real = False
    yield Disk(mount, is_real, control)
    if is_real:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.fixture(scope="package")
def bench(models: list[Path], references: list[list[list[int]]], disk: Disk) -> Iterator[Bench]:
    flags = store_flags(disk.store)
    wait_for_memory()
    with ServerProcess(*flags, model=models[0], env=fault_env(disk.control)) as server:
        server.expects_faults = True
        yield Bench(server, disk, references)
