"""Each kind of tier keeps records whole or not at all; what is wrong with one is seen when it is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_importance.storage.inspect import files_of, verify
from sgl_importance.storage.page_record import HEADER_BYTES, MissReason, PageDamaged
from sgl_importance.storage.regular import open_regular
from sgl_importance.storage.tier_chain.kinds.backend_tier import BackendTier
from sgl_importance.storage.tier_chain.kinds.file_tier import FileTier
from sgl_importance.storage.tier_chain.kinds.mapped_tier import MappedTier
from sgl_importance.storage.tier_chain.kinds.mooncake_tier import MooncakeTier
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex
from sgl_importance.storage.tier_chain.kinds.tier import DramTier, StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    PageName,
    check_record,
    make_record,
    record_bytes,
)
from sgl_importance.storage.tier_chain.measure import inject_delay, measure_reads

from support.mooncake_store import StandInStore
from support.record_backend import FolderBackend
from support.tier_chains import FullTier

PAGE_BYTES = 5000  # no multiple of anything
SIZE = record_bytes(PAGE_BYTES)
SLOTS = 6
KINDS = ["dram", "cxl", "nvme", "fs", "rdma", "hicache"]


def open_tier(kind: str, folder: Path) -> StorageTier:
    match kind:
        case "dram":
            return DramTier()
        case "cxl":
            return MappedTier(folder / "slots", SIZE, SLOTS)
        case "rdma":
            return MooncakeTier(folder, SIZE, StandInStore.at(folder))
        case "hicache":
            return BackendTier("test", RecordIndex(folder / "index"), SIZE, FolderBackend(folder / "backend"))
        case _:
            return FileTier(folder, SIZE, direct=kind == "nvme")


def name_of(number: int) -> PageName:
    return PageName(bytes([7]) * 32, number.to_bytes(32, "big"))


def page_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def record_of(number: int, parent: bytes = NO_PAGE) -> np.ndarray:
    return make_record(name_of(number), page_of(number), parent=parent, depth=number, moment=number + 100)


def read(tier: StorageTier, number: int) -> np.ndarray:
    record = np.empty(SIZE, np.uint8)
    tier.get(name_of(number), record)
    return check_record(record, name_of(number))


@pytest.mark.parametrize("kind", KINDS)
def test_reads_what_was_put(tmp_path: Path, kind: str) -> None:
    tier = open_tier(kind, tmp_path)
    tier.put(name_of(1), record_of(1))
    tier.put(name_of(2), record_of(2, parent=name_of(1).page))
    assert (read(tier, 1) == page_of(1)).all()
    assert (read(tier, 2) == page_of(2)).all()
    assert tier.contains(name_of(2))
    with pytest.raises(FileNotFoundError):
        read(tier, 3)
    tier.delete(name_of(1))
    tier.delete(name_of(1))
    assert not tier.contains(name_of(1))
    (listed,) = tier.records()
    assert (listed.name, listed.parent, listed.depth, listed.moment) == (
        name_of(2),
        name_of(1).page,
        2,
        102,
    )


@pytest.mark.parametrize("kind", ["cxl", "nvme", "fs"])
def test_nobody_else_reads_what_lies_on_a_medium(tmp_path: Path, kind: str) -> None:
    tier = open_tier(kind, tmp_path / "tier")
    tier.put(name_of(1), record_of(1))
    made = [tmp_path / "tier", *(tmp_path / "tier").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dram"])
def test_what_lies_on_a_medium_is_there_again(tmp_path: Path, kind: str) -> None:
    tier = open_tier(kind, tmp_path)
    for number in range(4):
        tier.put(name_of(number), record_of(number))
    tier.delete(name_of(2))
    tier.close()
    again = open_tier(kind, tmp_path)
    assert {listed.depth for listed in again.records()} == {0, 1, 3}
    assert (read(again, 3) == page_of(3)).all()
    again.put(name_of(5), record_of(5))
    assert (read(again, 5) == page_of(5)).all()
    assert (read(again, 0) == page_of(0)).all()


def test_an_entry_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each try would leave an empty file."""
    index = RecordIndex(tmp_path)
    index.add(name_of(1), b"entry")

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="no space"):
            index.add(name_of(2), b"entry")
    assert len(list((tmp_path / "index").glob("*/*"))) == 1


def test_a_slot_that_was_begun_is_empty(tmp_path: Path) -> None:
    """As a process leaves it that is killed while it writes: its header comes last."""
    tier = MappedTier(tmp_path / "slots", SIZE, 2)
    tier.put(name_of(1), record_of(1))
    tier._slots[1, HEADER_BYTES:SIZE] = record_of(2)[HEADER_BYTES:]
    again = MappedTier(tmp_path / "slots", SIZE, 2)
    assert [listed.depth for listed in again.records()] == [1]
    again.put(name_of(3), record_of(3))
    assert (read(again, 3) == page_of(3)).all()
    with pytest.raises(OSError, match="taken"):
        again.put(name_of(4), record_of(4))


def test_a_file_of_another_shape_is_made_anew(tmp_path: Path) -> None:
    MappedTier(tmp_path / "slots", SIZE, 2).put(name_of(1), record_of(1))
    assert not list(MappedTier(tmp_path / "slots", SIZE, 3).records())
    (tmp_path / "slots").write_bytes(b"x" * 10)
    assert not list(MappedTier(tmp_path / "slots", SIZE, 3).records())


@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_files_are_those_of_a_store(tmp_path: Path, kind: str) -> None:
    tier = open_tier(kind, tmp_path)
    for number in range(3):
        tier.put(name_of(number), record_of(number))
    result = verify(tmp_path, quarantine=False, files=files_of(tmp_path), advance=lambda size: None)
    assert (result.pages, result.damaged) == (3, {})


@pytest.mark.parametrize("damage", ["cut", "grown", "flipped", "other", "link"])
@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_a_damaged_file_is_seen_and_set_aside(tmp_path: Path, kind: str, damage: str) -> None:
    tier = open_tier(kind, tmp_path)
    tier.put(name_of(1), record_of(1))
    tier.put(name_of(2), record_of(2))
    path = tmp_path / "pages" / name_of(1).identity.hex() / f"{name_of(1).page.hex()}.page"
    data = path.read_bytes()
    other = path.with_name(f"{name_of(2).page.hex()}.page")
    changed = {
        "cut": data[:-1],
        "grown": data + b"?",
        "flipped": data[:-9] + b"?" + data[-8:],
        "other": other.read_bytes(),
    }
    if damage == "link":
        path.unlink()
        path.symlink_to(other)
    else:
        path.write_bytes(changed[damage])
    with pytest.raises(PageDamaged):
        read(tier, 1)
    assert tier.set_aside(name_of(1), MissReason.BODY)
    assert not tier.contains(name_of(1))
    assert (read(tier, 2) == page_of(2)).all()


def test_says_whether_it_goes_past_the_page_cache(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, SIZE, direct=True)
    assert tier.note == ("O_DIRECT" if tier.is_direct else "through the page cache: no O_DIRECT here")
    assert FileTier(tmp_path, SIZE, direct=False).note == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        FileTier(tmp_path / "x", SIZE, direct=False)


def test_injected_time_is_waited_for_and_said() -> None:
    slept: list[float] = []
    tier = DramTier()
    inject_delay(tier, seconds=0.5, bytes_per_second=SIZE * 4.0, sleep=slept.append)
    tier.put(name_of(1), record_of(1))
    assert (read(tier, 1) == page_of(1)).all()
    assert slept == [0.75, 0.75]
    assert "injected" in tier.note


def test_measures_the_median_read_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = open_tier("fs", tmp_path)
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 29.0])
    cost = measure_reads(tier, PAGE_BYTES, room=3, clock=lambda: next(ticks))
    assert cost.bytes_per_second == SIZE / 2.0
    assert not list(tier.records())


def test_a_full_tier_is_measured_by_what_is_in_it(tmp_path: Path) -> None:
    """As at a restart: a place for a page that is only measured would have to be taken from another."""
    tier = MappedTier(tmp_path / "slots", SIZE, 2)
    for number in (1, 2):
        tier.put(name_of(number), record_of(number))
    ticks = iter([0.0, 1.0, 10.0, 12.0])
    cost = measure_reads(
        tier, PAGE_BYTES, room=0, present=[name_of(1), name_of(2)], clock=lambda: next(ticks)
    )
    assert cost.bytes_per_second == SIZE / 1.5
    assert (read(tier, 1) == page_of(1)).all()


def test_a_medium_that_is_full_is_measured_as_far_as_it_goes() -> None:
    tier = FullTier(1)
    ticks = iter([0.0, 1.0, 5.0, 8.0])
    assert measure_reads(tier, PAGE_BYTES, room=9, clock=lambda: next(ticks)).bytes_per_second == SIZE
    assert not tier._records
    tier.put(name_of(1), record_of(1))
    cost = measure_reads(tier, PAGE_BYTES, room=9, present=[name_of(1)], clock=lambda: next(ticks))
    assert cost.bytes_per_second == SIZE / 3
    with pytest.raises(OSError, match="no space"):
        measure_reads(tier, PAGE_BYTES, room=9)


def test_files_that_cannot_be_read_now_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, SIZE, direct=False)
    for number in (1, 2):
        tier.put(name_of(number), record_of(number))
    opened: list[object] = []

    def refuse_first(path: object) -> int:
        opened.append(path)
        if len(opened) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return open_regular(path)  # type: ignore[arg-type]

    monkeypatch.setattr("sgl_importance.storage.tier_chain.kinds.file_tier.open_regular", refuse_first)
    assert len(list(tier.records())) == 1
    assert len(list(tier.records())) == 2


class Slots(RuleBasedStateMachine):
    """A mapped tier against a dictionary, reopened at any moment."""

    @initialize(folder=st.builds(lambda: __import__("tempfile").mkdtemp()))
    def begin(self, folder: str) -> None:
        self.path = Path(folder) / "slots"
        self.tier = MappedTier(self.path, SIZE, SLOTS)
        self.model: set[int] = set()

    @rule(number=st.integers(0, 9))
    def put(self, number: int) -> None:
        if len(self.model | {number}) <= SLOTS:
            self.tier.put(name_of(number), record_of(number))
            self.model.add(number)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        self.tier.delete(name_of(number))
        self.model.discard(number)

    @rule()
    def reopen(self) -> None:
        self.tier = MappedTier(self.path, SIZE, SLOTS)
        assert {listed.depth for listed in self.tier.records()} == self.model

    @invariant()
    def holds_the_same(self) -> None:
        if hasattr(self, "tier"):
            for number in range(10):
                assert self.tier.contains(name_of(number)) == (number in self.model)
                if number in self.model:
                    assert (read(self.tier, number) == page_of(number)).all()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
