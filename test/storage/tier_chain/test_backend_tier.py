"""A tier in a backend that neither deletes nor lists, and says of most troubles only that it did nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.storage.page_record import MissReason, PageDamaged
from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.backend_tier import BackendTier
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    Bytes,
    PageName,
    check_record,
    make_record,
    record_bytes,
)
from sgl_importance.storage.tier_chain.measure import MOST_RECORDS, measure_reads

from support.record_backend import FolderBackend
from support.tier_chains import MODEL, keys_of, open_chain, write, wrong_pages
from support.tier_chains import SIZE as CHAIN_SIZE

PAGE_BYTES = 5000
SIZE = record_bytes(PAGE_BYTES)
A, B, C = (PageName(bytes([7]) * 32, bytes([number]) * 32) for number in (1, 2, 3))


@pytest.fixture
def backend(tmp_path: Path) -> FolderBackend:
    return FolderBackend(tmp_path / "backend")


def open_tier(folder: Path, backend: FolderBackend, size: int = SIZE) -> BackendTier:
    return BackendTier("test", RecordIndex(folder / "tier"), size, backend)


def record_of(name: PageName, moment: int = 1) -> Bytes:
    page = np.full(PAGE_BYTES, name.page[0], np.uint8)
    return make_record(name, page, parent=NO_PAGE, depth=0, moment=moment)


def read(tier: BackendTier, name: PageName) -> Bytes:
    record = np.empty(SIZE, np.uint8)
    tier.get(name, record)
    return check_record(record, name)


def test_a_backend_that_is_down_is_an_error_and_not_a_miss(tmp_path: Path, backend: FolderBackend) -> None:
    """By its own words the record is not there; but neither is one that it must have."""
    tier = open_tier(tmp_path, backend)
    tier.put(A, record_of(A))
    backend.is_down = True
    for action in (lambda: read(tier, A), lambda: tier.put(B, record_of(B))):
        with pytest.raises(OSError, match="the backend test") as caught:
            action()
        assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="stores nothing"):
        open_tier(tmp_path / "other", backend)
    backend.is_down = False
    assert (read(tier, A) == A.page[0]).all()
    assert not tier.contains(B)


def test_whatever_a_backend_raises_is_an_error_of_the_medium(tmp_path: Path, backend: FolderBackend) -> None:
    tier = open_tier(tmp_path, backend)
    tier.put(A, record_of(A))
    backend.error = RuntimeError("connection reset")
    for action in (
        lambda: read(tier, A),
        lambda: tier.put(B, record_of(B)),
        lambda: tier.contains(A),
        lambda: list(tier.records()),
    ):
        with pytest.raises(OSError, match="RuntimeError: connection reset"):
            action()
    backend.error = None
    assert [listed.name for listed in tier.records()] == [A], "not the fault of the record"


def test_a_full_backend_says_so_and_is_read_on(tmp_path: Path, backend: FolderBackend) -> None:
    tier = open_tier(tmp_path, backend)
    tier.put(A, record_of(A))
    backend.most = len(backend.records())
    with pytest.raises(OSError, match="stored nothing") as caught:
        tier.put(B, record_of(B))
    assert caught.value.errno == errno.ENOSPC
    assert [listed.name for listed in tier.records()] == [A]


def test_what_the_backend_evicted_is_a_miss_and_leaves_the_list(
    tmp_path: Path, backend: FolderBackend
) -> None:
    tier = open_tier(tmp_path, backend)
    before = set(backend.records())
    tier.put(A, record_of(A))
    (path,) = set(backend.records()) - before
    tier.put(B, record_of(B))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(tier, A)
    assert [listed.name for listed in open_tier(tmp_path, backend).records()] == [B]
    assert len(list((tmp_path / "tier" / "index").glob("*/*"))) == 1


def test_a_page_that_comes_down_again_is_not_written_again(tmp_path: Path, backend: FolderBackend) -> None:
    tier = open_tier(tmp_path, backend)
    tier.put(A, record_of(A))
    writes = backend.writes
    for _ in range(3):
        tier.delete(A)
        with pytest.raises(FileNotFoundError):
            read(tier, A)
        tier.put(A, record_of(A))
    assert backend.writes == writes
    assert (read(tier, A) == A.page[0]).all()


def test_a_damaged_record_is_never_asked_for_again(tmp_path: Path, backend: FolderBackend) -> None:
    """Not even where the same record comes down a second time, which the backend would not write."""
    tier = open_tier(tmp_path, backend)
    before = set(backend.records())
    tier.put(A, record_of(A))
    (path,) = set(backend.records()) - before
    for damaged in (path.read_bytes()[:-1], bytes(SIZE)):
        path.write_bytes(damaged)
        with pytest.raises(PageDamaged):
            read(tier, A)
    assert not tier.set_aside(A, MissReason.BODY)
    assert not tier.contains(A)
    tier.put(A, record_of(A))
    assert (read(tier, A) == A.page[0]).all()


def test_killed_between_record_and_entry_nothing_is_listed(tmp_path: Path, backend: FolderBackend) -> None:
    tier = open_tier(tmp_path, backend)
    tier.put(A, record_of(A))
    tier._index.remove(A)  # as if it had not been made
    again = open_tier(tmp_path, backend)
    assert not list(again.records())
    again.put(A, record_of(A))
    assert (read(again, A) == A.page[0]).all()


def test_pages_of_another_size_are_not_listed(tmp_path: Path, backend: FolderBackend) -> None:
    open_tier(tmp_path, backend).put(A, record_of(A))
    assert not list(open_tier(tmp_path, backend, SIZE + 1).records())


def test_folders_do_not_share_records(tmp_path: Path, backend: FolderBackend) -> None:
    one, two = (open_tier(tmp_path / each, backend) for each in ("one", "two"))
    one.put(A, record_of(A))
    two.put(A, record_of(A))
    assert len(set(one._keys.values()) | set(two._keys.values())) == 2


def test_measuring_leaves_no_more_each_time(tmp_path: Path, backend: FolderBackend) -> None:
    """What is measured at each start, and tried while a tier is left out, cannot be deleted."""
    for _ in range(3):
        tier = open_tier(tmp_path, backend)
        measure_reads(tier, PAGE_BYTES, room=1000)
        assert not list(tier.records())
        assert len(backend.records()) == MOST_RECORDS + 1


def test_a_backend_that_keeps_less_than_its_capacity_is_seen_at_start(
    tmp_path: Path, backend: FolderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, backend)

    def put(key: str, record: Bytes) -> bool:
        for path in backend.records():
            path.unlink()
        return FolderBackend.put(backend, key, record)

    monkeypatch.setattr(backend, "put", put)
    with pytest.raises(OSError, match="keeps less than its capacity"):
        measure_reads(tier, PAGE_BYTES, room=3)


# ---- in a chain ----


def chain_over(folder: Path, backend: FolderBackend, clock: list[float]) -> TierChain:
    tier = BackendTier("test", RecordIndex(folder / "tier"), CHAIN_SIZE, backend)
    return open_chain(folder, ("cxl", "hicache"), tiers={"hicache": tier}, clock=lambda: clock[0])


@pytest.mark.parametrize("trouble", ["says no", "raises"])
def test_a_backend_that_dies_is_left_out_and_comes_back(
    tmp_path: Path, backend: FolderBackend, trouble: str
) -> None:
    now = [0.0]
    chain = chain_over(tmp_path, backend, now)
    sessions = "abcd"
    for moment, session in enumerate(sessions):
        write(chain, keys_of(session, 2), moment=moment)
    below = chain.snapshot()[1]["pages"]
    assert below > 3
    if trouble == "says no":
        backend.is_down = True
    else:
        backend.error = TimeoutError("no answer")
    for session in "efgh":
        write(chain, keys_of(session, 1), moment=9)
    assert chain.snapshot()[1]["state"] == "left out"
    assert wrong_pages(chain, keys_of("h", 1)) == [], "the other tier goes on"
    backend.is_down, backend.error, now[0] = False, None, 60.0
    write(chain, keys_of("i", 1), moment=10)
    state = chain.snapshot()[1]
    assert (state["state"], state["times_come_back"]) == ("in use", 1)
    assert state["pages"] >= below, "what it held is there again"
    for session in f"{sessions}hi":
        assert wrong_pages(chain, keys_of(session, 2)) == []
    chain.check_integrity()


def test_a_backend_that_is_full_keeps_what_it_has(tmp_path: Path, backend: FolderBackend) -> None:
    """To give pages up makes no room in it: they would all go, one for each that is refused."""
    now = [0.0]
    chain = chain_over(tmp_path, backend, now)
    for moment, session in enumerate("abcde"):
        write(chain, keys_of(session, 1), moment=moment)
    held = chain.snapshot()[1]["pages"]
    assert held == 2
    backend.most = len(backend.records())
    for moment, session in enumerate("fghijklm", start=10):
        assert write(chain, keys_of(session, 1), moment=moment) == [True], "the tier above takes it"
        chain.check_integrity()
    assert chain.snapshot()[1]["pages"] == held
    for session in "ab":
        assert chain.count_present(MODEL, keys_of(session, 1)) == 1
        assert wrong_pages(chain, keys_of(session, 1)) == []
    backend.most = None
    now[0] = 60.0
    for moment, session in enumerate("nopq", start=30):
        write(chain, keys_of(session, 1), moment=moment)
    assert chain.snapshot()[1]["pages"] > held, "there was room again"


def test_a_full_backend_keeps_what_continues_pages_above_it(tmp_path: Path, backend: FolderBackend) -> None:
    """The tier above gives up others instead; where it has none, nothing new is stored."""
    now = [0.0]
    chain = chain_over(tmp_path, backend, now)
    keys = keys_of("a", 5)
    assert write(chain, keys) == [True] * 5
    assert [tier["pages"] for tier in chain.snapshot()] == [3, 2]
    backend.most = len(backend.records())
    (refused,) = write(chain, keys_of("b", 1), moment=2)
    assert isinstance(refused, OSError)
    assert chain.count_present(MODEL, keys) == 5
    assert wrong_pages(chain, keys) == []
    backend.most, now[0] = None, 60.0
    for moment, session in enumerate("cdef", start=3):
        assert write(chain, keys_of(session, 1), moment=moment) == [True]
        chain.check_integrity()


def test_a_backend_that_evicts_first_costs_misses_only(tmp_path: Path, backend: FolderBackend) -> None:
    chain = chain_over(tmp_path, backend, [0.0])
    keys = keys_of("a", 8)
    assert write(chain, keys) == [True] * 8
    for path in backend.records():
        path.unlink()
    assert chain.count_present(MODEL, keys) == 8, "nobody has asked yet"
    with pytest.raises(Exception, match="absent"):
        wrong_pages(chain, keys)
    assert True in write(chain, keys), "it is stored anew"
    assert chain.snapshot()[1]["state"] == "in use"


def test_a_damaged_copy_below_does_not_stop_those_that_come_down(
    tmp_path: Path, backend: FolderBackend
) -> None:
    """It was damaged while the page was above; the backend would keep it for ever."""
    chain = chain_over(tmp_path, backend, [0.0])
    for moment, session in enumerate("abcd"):
        write(chain, keys_of(session, 1), moment=moment)
    chain.touch(MODEL, keys_of("a", 1), 9)  # up again
    assert chain.counters["promoted_pages"] == 1
    for path in backend.records():
        path.write_bytes(bytes(CHAIN_SIZE))
    for moment, session in enumerate("efghij", start=10):
        write(chain, keys_of(session, 1), moment=moment)
    assert chain.counters["damaged_pages"] == 1
    assert wrong_pages(chain, keys_of("j", 1)) == []
    assert chain.snapshot()[1]["state"] == "in use"
