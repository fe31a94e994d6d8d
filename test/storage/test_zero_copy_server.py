"""A server whose pages lie in a zero-copy backend, which damages them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import ServerProcess
from support.store_bench import (
    PAGE_TOKENS,
    PROMPT_PAGES,
    Bench,
    Disk,
    fault_env,
    report,
    store_flags,
    wait_for_memory,
)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def zero_copy(
    models: list[Path],
    references: list[list[list[int]]],
    values: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("zero-copy")
    disk = Disk(folder, False, folder / "fault")
    settings = {
        "backend_name": "zero_copy",
        "module_path": "support.doubles.zero_copy_store",
        "class_name": "ZeroCopyStore",
        "interface_v1": 1,
        "folder": str(values),
        "prefetch_threshold": 16,
    }
    flags = (
        *store_flags(disk.store),
        *("--hicache-storage-backend", "dynamic", "--kv-importance-store-backends", "any"),
        *("--hicache-storage-backend-extra-config", json.dumps(settings)),
    )
    wait_for_memory()
    with ServerProcess(*flags, model=models[0], env=fault_env(disk.control)) as server:
        server.expects_faults = True
        yield Bench(server, disk, references)


def store_prompt(bench: Bench, values: Path, index: int) -> list[Path]:
    """Asks a new prompt and waits for its pages; the files of their K halves, in order of writing."""
    known = set(values.iterdir())
    before = bench.count("written_pages")
    bench.ask(index)
    bench.wait_for("written_pages", before + PROMPT_PAGES)
    files = [file for file in values.iterdir() if file not in known and file.name.endswith("_k")]
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)[:PROMPT_PAGES]


def test_a_damaged_page_of_another_backend_is_computed_again(zero_copy: Bench, values: Path) -> None:
    index = zero_copy.fresh()
    files = store_prompt(zero_copy, values, index)
    zero_copy.flush()
    assert zero_copy.ask(index) == PROMPT_PAGES * PAGE_TOKENS
    for turn, file in enumerate((files[4], files[5]), start=1):
        data = bytearray(file.read_bytes())
        data[1000] ^= 16
        file.write_bytes(data)
        zero_copy.flush()
        assert zero_copy.ask(index) == PAGE_TOKENS * files.index(file)
        assert zero_copy.wait_for("missed_pages", turn, reason="body") == turn
        zero_copy.wait_for("quarantined_pages", turn)
        zero_copy.flush()
    assert len(list((zero_copy.disk.store / "quarantine").iterdir())) == 2
    zero_copy.flush()
    assert zero_copy.ask(index) == PROMPT_PAGES * PAGE_TOKENS
    report("zero-copy backend: bit flip in a page", "computed and stored anew", 'missed_pages{reason="body"}')
