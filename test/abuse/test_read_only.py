"""Directories that cannot be written: one line that names the cure, and what can be read is."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import TraceOptions
from sgl_importance.options.placement_options import StoreOptions
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LEDGER_FILE
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.store_command import app
from sglang_importance.cache.cache_factory import create_recorder
from sglang_importance.storage.store_launch import mount
from sglang_importance.upstream.refusal import LaunchRefused

from support.page_files import page_file

MODEL = bytes(32)
Lock = Callable[[Path], Path]


@pytest.fixture
def read_only() -> Iterator[Lock]:
    """Makes a folder read-only, for root too."""
    mounted: list[Path] = []

    def lock(folder: Path) -> Path:
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):
            for command in (["--bind", str(folder)], ["-o", "remount,ro,bind"]):
                done = subprocess.run(["mount", *command, str(folder)], capture_output=True, check=False)
                if done.returncode:
                    pytest.skip("root may write everywhere, and may not mount here")
                if folder not in mounted:
                    mounted.append(folder)
        return folder

    yield lock
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def filled_store(folder: Path) -> PageStore:
    store = PageStore(folder, budget_bytes=1 << 20, counters=StoreCounters())
    for number in range(3):
        store.write(MODEL, str(number), np.full(64, number, np.uint8), depth=0, moment=10**18)
    return store


def test_a_store_refuses_the_launch(tmp_path: Path, read_only: Lock) -> None:
    filled_store(tmp_path / "store")
    read_only(tmp_path / "store")
    for name in ("store", "store/new"):
        options = ImportanceOptions(policy="importance", store=StoreOptions(directory=str(tmp_path / name)))
        with pytest.raises(LaunchRefused) as refused:
            mount(argparse.Namespace(), options)
        (line,) = refused.value.reasons
        assert line.startswith(f"--kv-importance-store {tmp_path / name} cannot be written (")
        assert "name a directory" in line


def test_what_a_store_holds_is_served_after_it_became_read_only(tmp_path: Path, read_only: Lock) -> None:
    store = filled_store(tmp_path / "store")
    damaged = page_file(store, MODEL, "1")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    read_only(tmp_path / "store")
    body = np.empty(64, np.uint8)
    store.read(MODEL, "2", body)
    assert (body == 2).all()
    with pytest.raises(OSError, match=r"Read-only|Permission"):
        store.write(MODEL, "new", body, depth=0, moment=10**18)
    store.describe(MODEL, "{}")
    for command, code, said in (
        (["stat"], 0, "3 pages"),
        (["verify"], 1, "damaged: 1 body"),
        (["verify", "--quarantine"], 1, "set aside: 0"),
        (["gc"], 2, "cannot be written: run as the user of the server"),
    ):
        result = CliRunner().invoke(app, [command[0], str(tmp_path / "store"), *command[1:]])
        assert (result.exit_code, said in result.output) == (code, True), (command, result.output)


@pytest.mark.parametrize("exists", [False, True])
def test_a_ledger_is_gone_without(tmp_path: Path, read_only: Lock, exists: bool) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    if exists:
        with closing(Ledger(folder / LEDGER_FILE, MODEL, page_size=4)):
            pass
    read_only(folder)
    with pytest.raises(LedgerUnusable) as refused:
        Ledger(folder / LEDGER_FILE, MODEL, page_size=4)
    message = str(refused.value)
    assert str(folder) in message
    assert "--kv-importance-ledger" in message
    assert "Errno" not in message


def test_a_recording_refuses_the_launch(tmp_path: Path, read_only: Lock) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    read_only(folder)
    context = SimpleNamespace(
        params=SimpleNamespace(page_size=16, token_to_kv_pool_allocator=SimpleNamespace(size=640)),
        server_args=SimpleNamespace(
            model_path="model", dp_size=1, chunked_prefill_size=512, hicache_write_policy="write_through"
        ),
    )
    options = ImportanceOptions(policy="observe", trace=TraceOptions(directory=str(folder)))
    policy = ImportancePolicy(CostModel(1e-5, 1e-9, 4096, 1e9, 1e8))
    with pytest.raises(LaunchRefused) as refused:
        create_recorder(context, options, policy, rows=None)  # type: ignore[arg-type]
    (line,) = refused.value.reasons
    assert line.startswith(f"cannot record in {folder} (")
    assert "give --kv-importance-trace a writable directory" in line
