"""The chain on real tiers: what is read is what was written; a fault costs a page or a tier."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.storage.page_record import MissReason, PageDamaged, PageMiss, page_digest
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.tier import DramTier
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, PageName, check_record
from sgl_importance.storage.tier_chain.page_mover import Point

from support.tier_chains import (
    MODEL,
    PAGE_BYTES,
    SIZE,
    body_of,
    keys_of,
    open_chain,
    write,
    wrong_pages,
)
from support.waiting import wait_until

KINDS = ["dram", "cxl", "fs"]


def levels(chain: TierChain) -> list[int]:
    return [tier["pages"] for tier in chain.snapshot()]


def kept(chain: TierChain, sessions: str, pages: int = 2) -> dict[str, int]:
    return {session: chain.count_present(MODEL, keys_of(session, pages)) for session in sessions}


def test_pages_come_back_from_every_tier(tmp_path: Path) -> None:
    chain = open_chain(tmp_path)
    for session in "abcde":
        assert write(chain, keys_of(session, 2)) == [True, True]
        chain.check_integrity()
    assert levels(chain) == [2, 3, 5]
    assert all(write(chain, keys_of(session, 2)) == [False, False] for session in "abcde")
    for session in "abcde":
        assert kept(chain, session) == {session: 2}
        assert wrong_pages(chain, keys_of(session, 2)) == []
    assert {name for (count, name) in chain.counters.values() if count == "hit_pages"} == set(KINDS)


def test_the_last_tier_gives_up_the_least_recently_used(tmp_path: Path) -> None:
    chain = open_chain(tmp_path)
    for session in "abcde":
        write(chain, keys_of(session, 2))
    chain.touch(MODEL, keys_of("a", 2), 2)
    chain.check_integrity()
    assert chain.counters["promoted_pages"] >= 2
    write(chain, keys_of("f", 2))
    assert kept(chain, "abf") == {"a": 2, "b": 0, "f": 2}
    assert chain.counters["evicted_pages"] == 2


def test_a_page_without_the_one_in_front_is_not_kept(tmp_path: Path) -> None:
    chain = open_chain(tmp_path)
    (outcome,) = write(chain, keys_of("a", 2), start=1)
    assert isinstance(outcome, OSError)
    assert levels(chain) == [0, 0, 0]
    chain.check_integrity()


@pytest.mark.parametrize("kind", ["cxl", "fs"])
def test_a_damaged_page_is_never_served_and_stored_anew(tmp_path: Path, kind: str) -> None:
    chain = open_chain(tmp_path)
    keys = keys_of("a", 9)
    write(chain, keys)
    number = 3 if kind == "cxl" else 7
    name = PageName(MODEL, page_digest(keys[number]))
    if kind == "cxl":
        tier = chain.members[1].tier
        tier._slots[tier._slot_of[name], 300] ^= 1  # type: ignore[attr-defined]
    else:
        path = tmp_path / "fs" / "pages" / MODEL.hex() / f"{name.page.hex()}.page"
        path.write_bytes(path.read_bytes().replace(body_of(keys[number]).tobytes(), bytes(PAGE_BYTES)))
    with pytest.raises(PageDamaged):
        wrong_pages(chain, keys)
    assert write(chain, keys)[number] is True
    chain.check_integrity()
    assert kept(chain, "a", 9) == {"a": 9}, "those behind it were still there"
    assert wrong_pages(chain, keys) == []


def test_a_damaged_page_is_not_copied(tmp_path: Path) -> None:
    chain = open_chain(tmp_path, ("dram", "cxl"))
    keys = keys_of("a", 3)
    write(chain, keys)
    dram = chain.members[0].tier
    assert isinstance(dram, DramTier)
    for record in dram._records.values():
        record[300] ^= 1
    write(chain, keys_of("b", 3))
    assert chain.counters["damaged_pages"] == 2
    assert chain.counters["demoted_pages"] == 0
    below = chain.members[1].tier
    record = np.empty(SIZE, np.uint8)
    for listed in below.records():
        below.get(listed.name, record)
        check_record(record, listed.name)
    assert write(chain, keys) == [True, True, False], "its place was kept for it"
    assert wrong_pages(chain, keys) == []


class Failing(DramTier):
    """A tier that refuses everything while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def put(self, name: PageName, record: Bytes) -> None:
        if self.fails:
            raise OSError(5, "refused")
        super().put(name, record)

    def get(self, name: PageName, record: Bytes) -> None:
        if self.fails:
            raise OSError(5, "refused")
        super().get(name, record)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_fails_is_left_out_and_comes_back(tmp_path: Path, kind: str) -> None:
    now = [0.0]
    failing = Failing()
    chain = open_chain(tmp_path, tiers={kind: failing}, clock=lambda: now[0])
    for session in "abcde":
        write(chain, keys_of(session, 2), moment=ord(session))
    failing.fails = True
    for session in "fghijklmno":
        write(chain, keys_of(session, 2), moment=ord(session))
        assert wrong_pages_or_miss(chain, "abcdefghijklmno") == []
        chain.check_integrity()
    (state,) = (tier for tier in chain.snapshot() if tier["name"] == kind)
    assert (state["state"], state["pages"], state["times_left_out"]) == ("left out", 0, 1)
    assert kept(chain, "o") == {"o": 2}, "the other tiers go on"
    failing.fails = False
    now[0] = 60.0
    write(chain, keys_of("p", 2), moment=ord("p"))
    (state,) = (tier for tier in chain.snapshot() if tier["name"] == kind)
    assert (state["state"], state["times_come_back"]) == ("in use", 1)
    chain.check_integrity()
    assert wrong_pages_or_miss(chain, "abcdefghijklmnop") == []
    assert len(failing._records) == state["pages"], "nothing is left in it that the chain does not know"


def wrong_pages_or_miss(chain: TierChain, sessions: str) -> list[str]:
    wrong = []
    for session in sessions:
        try:
            wrong += wrong_pages(chain, keys_of(session, 2))
        except PageMiss as miss:
            if miss.reason is not MissReason.IO:
                raise
    return wrong


class Garbling(DramTier):
    """A tier that takes everything and gives other bytes back."""

    def put(self, name: PageName, record: Bytes) -> None:
        changed = record.copy()
        changed[400] ^= 1
        super().put(name, changed)


def test_a_tier_that_garbles_pages_gets_none_of_those_that_move(tmp_path: Path) -> None:
    chain = open_chain(tmp_path, ("dram", "cxl"), tiers={"cxl": Garbling()})
    write(chain, keys_of("a", 2))
    assert isinstance(write(chain, keys_of("b", 1))[0], OSError), "no way to make room"
    assert wrong_pages(chain, keys_of("a", 2)) == []
    assert kept(chain, "a") == {"a": 2}


@pytest.mark.parametrize("victim", [Point.COPIED, Point.CHECKED])
def test_a_move_that_ends_early_changes_nothing(tmp_path: Path, victim: Point) -> None:
    """An exception in place of a kill; the tests of kills are in test_kills.py."""

    class Stop(OSError):
        pass

    def at(point: Point) -> None:
        if point is victim and stop:
            raise Stop

    stop: list[bool] = []
    chain = open_chain(tmp_path, ("cxl", "fs"), at=at)
    write(chain, keys_of("a", 3))
    stop.append(True)
    assert any(isinstance(outcome, Stop) for outcome in write(chain, keys_of("b", 3)))
    assert kept(chain, "a", 3) == {"a": 3}
    assert wrong_pages(chain, keys_of("a", 3)) == []


def test_readers_meet_moves(tmp_path: Path) -> None:
    """Pages move between tiers while others read them: what is read is right, or missed."""
    chain = open_chain(tmp_path)
    for session in "abcde":
        write(chain, keys_of(session, 2))
    stop, wrong, read = threading.Event(), [], [0]

    def reader() -> None:
        while not stop.is_set():
            for session in "abcde":
                with suppress(PageMiss):  # it was moved at each look
                    wrong.extend(wrong_pages(chain, keys_of(session, 2)))
                    read[0] += 1

    threads = [threading.Thread(target=reader) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        chain.touch(MODEL, keys_of("abcde"[turn % 5], 2), turn)
    wait_until(lambda: read[0])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert read[0] > 0
    assert chain.counters["promoted_pages"] > 60
    chain.check_integrity()


def test_the_transfer_of_the_store_runs_over_it(tmp_path: Path) -> None:
    chain = open_chain(tmp_path)
    counters = StoreCounters()
    transfer = PageTransfer(chain, page_bytes=PAGE_BYTES, timeout=30, counters=counters)
    keys = keys_of("a", 9)
    bodies = [body_of(key) for key in keys]

    def copy_page(index: int, body: np.ndarray) -> None:
        body[:] = bodies[index]

    assert transfer.write(MODEL, keys[:4], copy_page) == [True] * 4
    copy_rest = lambda index, body: copy_page(index + 4, body)  # noqa: E731
    assert transfer.write(MODEL, keys[4:], copy_rest, prefix=keys[:4]) == [True] * 5
    assert transfer.count_present(MODEL, keys) == 9
    for key, page in zip(keys, transfer.read(MODEL, keys), strict=True):
        assert (page == body_of(key)).all()
    transfer.close()
    assert counters["read_pages"] == 9
