"""`sgl-importance store tiers`: what lies in the folders of a chain, while nobody or a server uses them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance.storage.tier_chain.kinds.mapped_tier import MappedTier, read_slots
from sgl_importance.storage.tier_chain.kinds.record_index import (
    IndexEntry,
    RecordIndex,
    entry_data,
    read_entry,
)
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    Bytes,
    PageName,
    check_record,
    make_record,
)
from sgl_importance.storage.tier_chain.open_chain import OpenChain
from sgl_importance.storage.tier_chain.ranking import LruRanking
from sgl_importance.storage.tier_chain.store_command import app
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import parse_tiers

from support.record_backend import FolderBackend
from support.tier_chains import MODEL, PAGE_BYTES, SIZE, body_of, keys_of, no_backend, write


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """A file of tiers that hold nine pages of one rank, and are still in use."""
    file = tmp_path / "tiers.toml"
    file.write_text(
        "".join(
            f'[[tier]]\nkind = "{kind}"\ncapacity = {pages * SIZE}\n'
            + (f'folder = "{tmp_path / kind}"\n' if kind != "dram" else "")
            for kind, pages in {"dram": 3, "cxl": 4, "nvme": 9}.items()
        )
    )
    opened = OpenChain(
        parse_tiers(file.read_text()),
        owner="tp0",
        page_bytes=PAGE_BYTES,
        make_ranking=LruRanking,
        counters=TierCounters(),
        open_backend=no_backend,
    )
    assert write(opened.chain, keys_of("a", 9)) == [True] * 9
    yield file
    opened.close()


def run(*arguments: object) -> tuple[int, list[dict]]:
    result = CliRunner().invoke(app, ["tiers", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_counts_the_pages_of_each_tier(tiers: Path) -> None:
    code, rows = run(tiers, "--verify")
    assert code == 0
    assert [(row["tier"], row["rank"], row["pages"], row["damaged"]) for row in rows] == [
        ("dram", "", 0, {}),
        ("cxl", "tp0", 3, {}),
        ("nvme", "tp0", 4, {}),
    ]
    assert rows[1]["bytes"] == 3 * SIZE
    lines = CliRunner().invoke(app, ["tiers", str(tiers), "--verify"]).stdout.splitlines()
    (of_memory,) = (line for line in lines if "in the server" in line)
    assert "not read" in of_memory
    assert sum("none" in line for line in lines) == 2


@pytest.mark.parametrize("owner", ["tp0-pp0-cp0", "tp11-pp0-cp0-dp3"])
def test_a_mount_point_has_folders_that_are_no_ranks(tiers: Path, owner: str) -> None:
    for kind in ("cxl", "nvme"):
        (tiers.parent / kind / "lost+found").mkdir()
    (tiers.parent / "nvme" / owner / "pages").mkdir(parents=True)
    code, rows = run(tiers, "--verify")
    assert code == 0
    assert [row["rank"] for row in rows] == ["", "tp0", *sorted(("tp0", owner))]


def test_finds_damage_in_slots_and_files(tiers: Path) -> None:
    slots = tiers.parent / "cxl" / "tp0" / "slots"
    data = bytearray(slots.read_bytes())
    data[4096 + 300] ^= 1
    slots.write_bytes(data)
    (file, *_) = (tiers.parent / "nvme").rglob("*.page")
    file.write_bytes(file.read_bytes()[:-1])
    assert [row["damaged"] for row in run(tiers)[1]] == [{}, {}, {}]
    code, rows = run(tiers, "--verify")
    assert code == 1
    assert [row["damaged"] for row in rows] == [{}, {"body": 1}, {"truncated": 1}]


def test_counts_what_lies_in_a_backend_without_asking_it(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path / "backend")
    text = (
        f'[[tier]]\nkind = "hicache"\nbackend = "file"\ncapacity = {9 * SIZE}\n'
        f'folder = "{tmp_path / "index"}"\n'
    )
    opened = OpenChain(
        parse_tiers(text),
        owner="tp0",
        page_bytes=PAGE_BYTES,
        make_ranking=LruRanking,
        counters=TierCounters(),
        open_backend=lambda tier, size, owner: backend,
    )
    assert write(opened.chain, keys_of("a", 4)) == [True] * 4
    opened.close()
    backend.error = OSError("nobody is to ask")
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    code, (row,) = run(file, "--verify")
    assert code == 0
    assert (row["rank"], row["pages"], row["bytes"], row["damaged"]) == ("tp0", 4, 4 * SIZE, {})
    assert "not read" in CliRunner().invoke(app, ["tiers", str(file), "--verify"]).stdout


def test_an_entry_that_goes_while_it_is_counted_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = RecordIndex(tmp_path / "index" / "tp0")
    for number in range(3):
        name = PageName(MODEL, bytes([number]) * 32)
        index.add(name, entry_data(make_record(name, body_of("a"), parent=NO_PAGE, depth=0, moment=1)))

    def read(path: Path) -> IndexEntry | None:
        if path.name.startswith("01"):
            path.unlink()
        return read_entry(path)

    monkeypatch.setattr("sgl_importance.storage.tier_chain.store_command.read_entry", read)
    file = tmp_path / "tiers.toml"
    file.write_text(f'[[tier]]\nkind = "rdma"\ncapacity = 9\nfolder = "{tmp_path / "index"}"')
    code, (row,) = run(file)
    assert (code, row["pages"]) == (0, 2)


def test_a_slot_that_gets_another_record_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {
        name: make_record(name, body_of(name.page.hex()), parent=NO_PAGE, depth=0, moment=1)
        for name in (PageName(MODEL, bytes([number]) * 32) for number in (1, 2))
    }
    one, other = records
    tier = MappedTier(tmp_path / "slots", SIZE, 1)
    tier.put(one, records[one])
    whole = np.array

    def torn(slot: Bytes) -> Bytes:
        copy = whole(slot)
        if tier.contains(one):
            tier.delete(one)
            tier.put(other, records[other])
            copy[SIZE // 2 :] = slot[SIZE // 2 :]
        return copy

    monkeypatch.setattr("sgl_importance.storage.tier_chain.kinds.mapped_tier.np.array", torn)
    ((listed, record),) = read_slots(tmp_path / "slots")
    assert listed is not None
    assert listed.name == other
    check_record(record, other)


def test_what_is_no_chain_gets_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("nothing")
    result = CliRunner().invoke(app, ["tiers", str(file)])
    assert result.exit_code == 2
    assert "no TOML" in result.output
    (tmp_path / "cxl" / "tp0").mkdir(parents=True)
    (tmp_path / "cxl" / "tp0" / "slots").write_bytes(b"x" * 9000)
    file.write_text(f'[[tier]]\nkind = "cxl"\ncapacity = 9\nfolder = "{tmp_path / "cxl"}"')
    result = CliRunner().invoke(app, ["tiers", str(file)])
    assert result.exit_code == 2
    assert "no file of slots" in result.output


@pytest.mark.parametrize("slots", [None, b""])
def test_a_rank_whose_slots_could_not_be_made_has_no_pages(tiers: Path, slots: bytes | None) -> None:
    """As a server leaves its folder where memory ran out while it made the file."""
    folder = tiers.parent / "cxl" / "tp1"
    folder.mkdir()
    if slots is not None:
        (folder / "slots").write_bytes(slots)
    code, rows = run(tiers)
    assert code == 0
    assert [(row["rank"], row["pages"]) for row in rows if row["tier"] == "cxl"] == [("tp0", 3), ("tp1", 0)]


@pytest.mark.parametrize("shape", [{"record_bytes": 0, "slots": 3}, {"record_bytes": 1e400, "slots": 1}])
def test_slots_of_no_size_get_one_line(tiers: Path, shape: dict[str, float]) -> None:
    slots = tiers.parent / "cxl" / "tp0" / "slots"
    slots.write_bytes(json.dumps(shape).encode().ljust(4096, b"\0"))
    result = CliRunner().invoke(app, ["tiers", str(tiers)])
    assert result.exit_code == 2
    assert "no file of slots" in result.output
