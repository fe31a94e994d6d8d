"""`sgl-importance store`: what it says is what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance.storage.inspect import collect, files_of, verify
from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.store_command import app

from support.page_files import page_file

PAGE_BYTES = 256
RECORD_BYTES = HEADER_BYTES + PAGE_BYTES
MODELS = (bytes(32), bytes(range(32)))
DAY = 86_400


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    store = PageStore(tmp_path / "store", budget_bytes=1 << 20, counters=StoreCounters())
    for number in range(6):
        body = np.full(PAGE_BYTES, number, np.uint8)
        identity = MODELS[number == 5]
        store.write(identity, str(number), body, depth=0, moment=time.time_ns() - number * DAY * 10**9)
    store.describe(MODELS[0], '{"weights": "abc", "page_size": 16}')
    return store


def run(*arguments: object) -> tuple[int, dict]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_stat(store: PageStore) -> None:
    code, facts = run("stat", store.directory)
    assert code == 0
    assert facts["pages"] == 6
    assert facts["bytes"] == 6 * RECORD_BYTES
    assert [model["pages"] for model in facts["models"]] == [5, 1]
    assert facts["models"][0]["facts"]["weights"] == "abc"
    assert "6 pages" in CliRunner().invoke(app, ["stat", str(store.directory)]).stdout


def test_verify_finds_each_damage_by_name(store: PageStore) -> None:
    assert run("verify", store.directory)[0] == 0
    paths = [page_file(store, MODELS[0], str(number)) for number in range(5)]
    data = [path.read_bytes() for path in paths]
    paths[0].write_bytes(data[0][:-1] + b"?")
    paths[1].write_bytes(data[2])
    paths[2].write_bytes(data[1])
    paths[3].write_bytes(data[3][:-1])
    paths[4].write_bytes(b"garbage" * 100)
    code, result = run("verify", store.directory)
    assert code == 1
    assert result["damaged"] == {"body": 1, "page": 2, "truncated": 1, "magic": 1}
    assert result["set_aside"] == 0
    assert run("verify", store.directory, "--quarantine")[1]["set_aside"] == 5
    assert run("verify", store.directory) == (
        0,
        {"pages": 1, "bytes": RECORD_BYTES, "damaged": {}, "set_aside": 0},
    )
    assert run("stat", store.directory)[1]["quarantined"] == {
        "body": 1,
        "page": 2,
        "truncated": 1,
        "magic": 1,
    }
    assert run("gc", store.directory)[1]["quarantined"] == 5


def test_gc_by_age_by_size_and_of_what_was_left_behind(store: PageStore) -> None:
    left = page_file(store, MODELS[0], "0").with_name("left.tmp")
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    code, result = run("gc", store.directory, "--unused-days", 2.5)
    assert (code, result["unfinished"], result["unused_pages"], result["evicted_pages"]) == (0, 1, 3, 0)
    assert store.exists(MODELS[0], "2")
    result = run("gc", store.directory, "--bytes", RECORD_BYTES)[1]
    assert (result["evicted_pages"], result["bytes_left"]) == (2, RECORD_BYTES)
    assert store.exists(MODELS[0], "0"), "the most recently used page stays"


def test_gc_without_a_limit_deletes_nothing_for_what_servers_write_meanwhile(store: PageStore) -> None:
    found = files_of(store.directory)
    store.write(MODELS[0], "new", np.zeros(PAGE_BYTES, np.uint8), depth=0, moment=time.time_ns())
    result = collect(store.directory, files=found, limit=None, unused_days=None, advance=lambda size: None)
    assert (result.evicted_pages, result.bytes_left) == (0, 7 * RECORD_BYTES)


def test_verify_counts_nothing_of_a_page_that_is_evicted_meanwhile(store: PageStore) -> None:
    found = files_of(store.directory)
    page_file(store, MODELS[0], "0").unlink()
    result = verify(store.directory, quarantine=False, files=found, advance=lambda size: None)
    assert (result.pages, result.bytes, result.damaged) == (5, 5 * RECORD_BYTES, {})


@pytest.mark.parametrize("command", ["stat", "verify", "gc"])
def test_a_directory_without_a_store_is_one_line(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no store" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.nightly
def test_the_command_is_registered(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("sgl-importance"), "store", "--help"]
    # Elsewhere than in the checkout, whose own metadata may be older than what is installed.
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "verify" in result.stdout
