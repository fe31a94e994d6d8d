"""Chains in trouble: media that are full or read-only, files that others deleted, restarts with others."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.storage.page_record import PageDamaged, PageMiss, page_digest
from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.file_tier import FileTier
from sgl_importance.storage.tier_chain.kinds.tier import DramTier
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, PageName
from sgl_importance.storage.tier_chain.open_chain import OpenChain
from sgl_importance.storage.tier_chain.page_mover import Point
from sgl_importance.storage.tier_chain.placement import Move
from sgl_importance.storage.tier_chain.ranking import LruRanking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import parse_tiers

from support.tier_chains import (
    MODEL,
    PAGE_BYTES,
    SIZE,
    FullTier,
    body_of,
    keys_of,
    no_backend,
    open_chain,
    write,
    wrong_pages,
)


def opened(folder: Path, tiers: dict[str, int]) -> OpenChain:
    """Tiers by kind, with so many pages each, in folders of that name."""
    text = "".join(
        f'[[tier]]\nkind = "{kind}"\ncapacity = {pages * SIZE}\nfolder = "{folder / kind}"\n'
        for kind, pages in tiers.items()
    )
    return OpenChain(
        parse_tiers(text),
        owner="tp0",
        page_bytes=PAGE_BYTES,
        make_ranking=LruRanking,
        counters=TierCounters(),
        open_backend=no_backend,
    )


def kept(chain: TierChain, session: str, pages: int) -> int:
    keys = keys_of(session, pages)
    assert wrong_pages(chain, keys) == []
    return chain.count_present(MODEL, keys)


# ---- media ----


@pytest.mark.parametrize("kind", ["dram", "cxl", "fs"])
def test_a_medium_that_is_full_early_holds_what_was_used_last(tmp_path: Path, kind: str) -> None:
    """New pages are taken in all the same: neither this tier nor the one above it stays as it was."""
    now = [0.0]
    full = FullTier(2)
    chain = open_chain(tmp_path, tiers={kind: full}, clock=lambda: now[0])
    for moment, session in enumerate("abcdefghijkl"):
        write(chain, keys_of(session, 1), moment=moment)
        chain.check_integrity()
    assert kept(chain, "l", 1) == kept(chain, "k", 1) == kept(chain, "j", 1) == 1
    chain.touch(MODEL, keys_of("j", 1), 20)
    assert kept(chain, "j", 1) == 1
    (state,) = (tier for tier in chain.snapshot() if tier["name"] == kind)
    assert 1 <= state["pages"] <= 2
    assert "times_left_out" not in state, "what it holds is read"

    full.most = 9
    now[0] = 60.0
    for moment, session in enumerate("mnopqrstuv", start=30):
        assert write(chain, keys_of(session, 1), moment=moment) == [True]
    (state,) = (tier for tier in chain.snapshot() if tier["name"] == kind)
    assert state["pages"] == state["capacity_pages"] - 1, "there was room again"
    chain.check_integrity()


def test_a_disk_that_others_have_filled_is_passed_over(tmp_path: Path) -> None:
    chain = open_chain(tmp_path, tiers={"cxl": FullTier(0)})
    for moment, session in enumerate("abcdefghij"):
        write(chain, keys_of(session, 2), moment=moment)
        chain.check_integrity()
    assert [tier["pages"] for tier in chain.snapshot()] == [2, 0, 5]
    assert kept(chain, "j", 2) == kept(chain, "i", 2) == 2


class FullAndSick(FullTier):
    """A full medium whose reads fail while it is told to."""

    fails = False

    def get(self, name: PageName, record: Bytes) -> None:
        if self.fails:
            raise OSError(errno.EIO, "input/output error")
        super().get(name, record)


@pytest.mark.parametrize("kinds", [("dram",), ("cxl", "dram")])
def test_a_full_tier_that_was_left_out_comes_back(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """Nothing can be written into it to try it; what it holds is read all the same."""
    now = [0.0]
    sick = FullAndSick(99)
    chain = open_chain(tmp_path, kinds, tiers={"dram": sick}, clock=lambda: now[0])
    for moment, session in enumerate("abcdef"):
        write(chain, keys_of(session, 1), moment=moment)
    held = [session for session in "abcdef" if sick.contains(PageName(MODEL, page_digest(f"{session}0")))]
    sick.most, sick.fails = len(held), True
    for _ in range(3):
        with pytest.raises(PageMiss):
            wrong_pages(chain, keys_of(held[0], 1))
    write(chain, keys_of("x", 1), moment=9)
    assert chain.snapshot()[-1]["state"] == "left out"
    sick.fails, now[0] = False, 60.0
    assert write(chain, keys_of("y", 1), moment=10) == [True]
    state = chain.snapshot()[-1]
    assert state["state"] == "in use"
    assert 1 <= state["pages"] <= sick.most
    for session in held:
        assert wrong_pages(chain, keys_of(session, 1)) == []
    assert kept(chain, "y", 1) == 1
    chain.check_integrity()


def test_reads_of_moves_that_fail_now_and_then_leave_no_tier_out(tmp_path: Path) -> None:
    sick = FullAndSick(99)
    chain = open_chain(tmp_path, ("dram", "cxl"), tiers={"dram": sick})
    for moment, session in enumerate("abcdefgh"):
        sick.fails = True
        write(chain, keys_of(session, 1), moment=moment)
        sick.fails = False
        write(chain, keys_of(session, 1), moment=moment)
    assert chain.counters["failed_accesses"] > 3
    assert chain.counters["demoted_pages"] > 3
    assert chain.counters["times_left_out"] == 0


class ReadOnlyTier(DramTier):
    """As an operating system leaves a disk that gave errors."""

    is_read_only = False

    def put(self, name: PageName, record: Bytes) -> None:
        self._check()
        super().put(name, record)

    def delete(self, name: PageName) -> None:
        self._check()
        super().delete(name)

    def _check(self) -> None:
        if self.is_read_only:
            raise OSError(errno.EROFS, "read-only file system")


def test_a_tier_that_became_read_only_is_left_out(tmp_path: Path) -> None:
    """However often it is read meanwhile."""
    tier = ReadOnlyTier()
    chain = open_chain(tmp_path, ("cxl", "fs"), tiers={"fs": tier})
    for moment, session in enumerate("abc"):
        write(chain, keys_of(session, 2), moment=moment)
    (held, *_) = (session for session in "abc" if tier.contains(PageName(MODEL, page_digest(f"{session}0"))))
    tier.is_read_only = True
    for moment, session in enumerate("defghi"):
        if chain.count_present(MODEL, keys_of(held, 1)):
            assert wrong_pages(chain, keys_of(held, 1)) == []
        write(chain, keys_of(session, 1), moment=moment)
    assert chain.snapshot()[1]["state"] == "left out"
    assert kept(chain, "i", 1) == 1, "the other tier goes on"
    chain.check_integrity()


@pytest.mark.parametrize("finder", ["reader", "move"])
def test_a_damaged_page_that_cannot_be_set_aside_is_stored_anew(tmp_path: Path, finder: str) -> None:
    """As where the medium reads and refuses to delete."""
    tier = ReadOnlyTier()
    chain = open_chain(tmp_path, ("dram", "cxl"), tiers={"dram": tier})
    keys = keys_of("a", 1)
    write(chain, keys)
    tier._records[PageName(MODEL, page_digest(keys[0]))][300] ^= 1
    tier.is_read_only = True
    if finder == "reader":
        with pytest.raises(PageDamaged):
            wrong_pages(chain, keys)
    else:
        with pytest.raises(PageDamaged):
            chain._mover.move(Move(next(page for page, _ in chain._numbers.items()), 0, 1))
    tier.is_read_only = False
    assert write(chain, keys) == [True]
    assert wrong_pages(chain, keys) == []
    chain.check_integrity()


def test_writes_that_fail_now_and_then_leave_no_tier_out(tmp_path: Path) -> None:
    tier = ReadOnlyTier()
    chain = open_chain(tmp_path, ("dram",), tiers={"dram": tier})
    for session in "abcdefgh":
        tier.is_read_only = True
        write(chain, keys_of(session, 1))
        tier.is_read_only = False
        assert write(chain, keys_of(session, 1)) == [True]
    assert chain.snapshot()[0]["state"] == "in use"


def test_a_folder_that_somebody_emptied_takes_pages_again(tmp_path: Path) -> None:
    middle = FileTier(tmp_path / "middle", SIZE, direct=False)
    chain = open_chain(tmp_path, tiers={"cxl": middle})
    for moment, session in enumerate("abcde"):
        write(chain, keys_of(session, 2), moment=moment)
    assert [tier["pages"] for tier in chain.snapshot()] == [2, 3, 5]
    shutil.rmtree(tmp_path / "middle")
    for moment, session in enumerate("fghi"):
        assert write(chain, keys_of(session, 1), moment=moment) == [True]
        chain._placement.check_integrity()
    assert kept(chain, "i", 1) == 1


def test_a_page_found_missing_and_stored_anew_meanwhile_leaves_nothing_behind() -> None:
    """Two readers find out; the page is stored between their reports."""
    tier = DramTier()
    chain = open_chain(Path(), ("dram",), tiers={"dram": tier})
    (key,) = keys_of("a", 1)
    name = PageName(MODEL, page_digest(key))
    write(chain, [key])
    chain._reader._faults.put((0, name))
    write(chain, keys_of("b", 1))
    chain.check_integrity()
    assert len(tier._records) == chain.snapshot()[0]["pages"] == 1


# ---- restarts ----


@pytest.mark.parametrize("kind", ["cxl", "fs"])
def test_a_full_tier_opens_again(tmp_path: Path, kind: str) -> None:
    first = opened(tmp_path, {kind: 3})
    assert write(first.chain, keys_of("a", 3)) == [True] * 3
    first.close()
    again = opened(tmp_path, {kind: 3})
    assert kept(again.chain, "a", 3) == 3
    again.close()


def test_a_tier_that_was_made_smaller_keeps_whole_prefixes(tmp_path: Path) -> None:
    """A prefix that many share is older than all that continues it."""
    first = opened(tmp_path, {"fs": 9})
    shared = keys_of("shared", 2)
    write(first.chain, shared, moment=1)
    write(first.chain, keys_of("x", 2), moment=2)
    for moment, tail in enumerate("abcde", start=3):
        first.chain.write_run(MODEL, [tail], [body_of(tail)], before=shared[-1], depth=2, moment=moment)
    first.close()
    again = opened(tmp_path, {"fs": 5})
    assert again.chain.snapshot()[0]["pages"] == 5
    for tail in "cde":
        assert again.chain.count_present(MODEL, [*shared, tail]) == 3
    assert wrong_pages(again.chain, [*shared, "e"]) == []
    again.chain.check_integrity()
    again.close()


def test_tiers_in_another_order_keep_whole_prefixes(tmp_path: Path) -> None:
    first = opened(tmp_path, {"nvme": 5, "fs": 9})
    keys = keys_of("a", 9)
    assert write(first.chain, keys) == [True] * 9
    assert [tier["pages"] for tier in first.chain.snapshot()] == [4, 5]
    first.close()
    again = opened(tmp_path, {"fs": 9, "nvme": 5})
    assert again.chain.count_present(MODEL, keys) == 4
    again.chain.check_integrity()
    assert write(again.chain, keys, start=4) == [True] * 5
    assert wrong_pages(again.chain, keys) == []
    again.close()


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TierChain, levels: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(TierChain, "_restore", refuse)
        with pytest.raises(OSError, match="mend their folders"):
            opened(tmp_path, {"fs": 3})
    opened(tmp_path, {"fs": 3}).close()  # its lock was let go


# ---- tiers that hang ----


class Hanging(DramTier):
    """Its reads come back when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.let_go = threading.Event()
        self.inside = threading.Semaphore(0)

    def get(self, name: PageName, record: Bytes) -> None:
        if self.hangs:
            self.inside.release()
            self.let_go.wait(60)
        super().get(name, record)


def test_a_tier_that_hangs_takes_one_thread_and_no_more(tmp_path: Path) -> None:
    """Nor does it keep new pages out, and it comes back when it answers."""
    now = [0.0]
    hung = Hanging()
    chain = open_chain(tmp_path, ("cxl", "fs"), tiers={"fs": hung}, clock=lambda: now[0])
    for moment, session in enumerate("abcd"):
        write(chain, keys_of(session, 1), moment=moment)
    below = [key for key in "abcd" if hung.contains(PageName(MODEL, page_digest(f"{key}0")))]
    above = [key for key in "abcd" if key not in below]
    hung.hangs = True
    reader = threading.Thread(target=lambda: wrong_pages(chain, keys_of(below[0], 1)))
    reader.start()
    assert hung.inside.acquire(timeout=60)
    now[0] = 6.0
    assert chain.count_present(MODEL, keys_of(below[0], 1)) == 0
    with pytest.raises(PageMiss, match="timeout"):  # would hang as well
        next(chain.read_run(MODEL, keys_of(below[0], 1), lambda: np.empty(PAGE_BYTES, np.uint8)))
    assert kept(chain, above[0], 1) == 1, "the other tier is read"
    assert write(chain, keys_of("e", 1), moment=9) == [True]
    assert chain.snapshot()[1]["state"] == "left out"
    now[0] = 60.0
    write(chain, keys_of("f", 1), moment=10)
    assert chain.snapshot()[1]["state"] == "left out", "it is not tried while a read hangs in it"
    hung.hangs = False
    hung.let_go.set()
    reader.join()
    write(chain, keys_of("g", 1), moment=11)
    assert chain.snapshot()[1]["state"] == "in use"
    assert kept(chain, below[0], 1) == 1
    chain.check_integrity()


def test_all_together_wait_for_a_hung_change_as_long_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_importance.storage.tier_chain.chain.PATIENCE_SECONDS", 3600.0)
    chain = open_chain(tmp_path)
    with chain._lock:
        chain._changing_since = time.monotonic() - 3601
        with pytest.raises(OSError, match="does not answer"):  # else it would for an hour
            write(chain, keys_of("a", 1))
    chain._changing_since = None
    assert write(chain, keys_of("a", 1)) == [True]


def test_what_is_to_be_stored_does_not_wait_for_a_long_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be given up after ten seconds, and a slow tier needs longer for a long prompt."""
    monkeypatch.setattr("sgl_importance.storage.tier_chain.chain.HOLD_SECONDS", 0.0)
    stored = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: stored.wait(60))
    promoted: list[int] = []

    def store() -> None:
        assert write(chain, keys_of("x", 1), moment=9) == [True]
        promoted.append(chain.counters["promoted_pages"] - before)
        stored.set()

    writer = threading.Thread(target=store)

    def at(point: Point) -> None:
        if is_promoting and writer.ident is None:
            writer.start()

    is_promoting = False
    chain = open_chain(tmp_path, at=at)
    for moment, session in enumerate("abcde"):
        write(chain, keys_of(session, 2), moment=moment)
    before = chain.counters["promoted_pages"]
    is_promoting = True
    chain.touch(MODEL, keys_of("a", 2), 8)
    writer.join()
    assert promoted == [1], "of two"
    assert chain.counters["promoted_pages"] - before == 2
    assert kept(chain, "a", 2) == 2
    chain.check_integrity()
