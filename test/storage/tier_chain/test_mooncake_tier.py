"""A tier in a Mooncake store: what it says when the store fails, and a real one over TCP."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance.storage.page_record import PageDamaged, PageMiss
from sgl_importance.storage.tier_chain import open_chain
from sgl_importance.storage.tier_chain.kinds.mooncake_tier import MooncakeTier, connect
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    NO_PAGE,
    PageName,
    check_record,
    make_record,
    record_bytes,
)
from sgl_importance.storage.tier_chain.open_chain import OpenChain
from sgl_importance.storage.tier_chain.ranking import LruRanking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import parse_tiers

from support import tier_chains
from support.mooncake_store import StandInStore
from support.servers import free_port

PAGE_BYTES = 5000
PROTOCOL = os.environ.get("SGL_IMPORTANCE_MOONCAKE_PROTOCOL", "tcp")
SIZE = record_bytes(PAGE_BYTES)
A, B = (PageName(bytes([7]) * 32, bytes([number]) * 32) for number in (1, 2))


def record_of(name: PageName) -> np.ndarray:
    page = np.full(PAGE_BYTES, name.page[0], np.uint8)
    return make_record(name, page, parent=NO_PAGE, depth=0, moment=1)


def read(tier: MooncakeTier, name: PageName) -> np.ndarray:
    record = np.empty(SIZE, np.uint8)
    tier.get(name, record)
    return check_record(record, name)


def test_a_store_that_does_not_answer_is_an_error_and_not_a_miss(tmp_path: Path) -> None:
    store = StandInStore()
    tier = MooncakeTier(tmp_path, SIZE, store)
    tier.put(A, record_of(A))
    store.is_down = True
    for action in (
        lambda: read(tier, A),
        lambda: tier.put(B, record_of(B)),
        lambda: tier.delete(A),
        lambda: list(tier.records()),
    ):
        with pytest.raises(OSError, match="Mooncake") as caught:
            action()
        assert caught.value.errno == errno.EIO
    store.is_down = False
    assert [listed.name for listed in tier.records()] == [A]
    assert len(store.records) == 1


def test_a_full_store_says_so_and_keeps_nothing_of_what_it_refused(tmp_path: Path) -> None:
    store = StandInStore()
    store.room = SIZE + 1
    tier = MooncakeTier(tmp_path, SIZE, store)
    tier.put(A, record_of(A))
    with pytest.raises(OSError, match="Mooncake") as caught:
        tier.put(B, record_of(B))
    assert caught.value.errno == errno.ENOSPC
    assert [listed.name for listed in tier.records()] == [A]
    assert not tier.contains(B)


def test_what_the_store_evicted_is_gone_from_the_list_too(tmp_path: Path) -> None:
    store = StandInStore()
    tier = MooncakeTier(tmp_path, SIZE, store)
    for name in (A, B):
        tier.put(name, record_of(name))
    store.records.pop(next(key for key in store.records if key.endswith(A.page.hex())))
    with pytest.raises(FileNotFoundError):
        read(tier, A)
    assert [listed.name for listed in tier.records()] == [B]
    assert len(list((tmp_path / "index").glob("*/*"))) == 1


def test_killed_between_entry_and_record_nothing_is_listed_and_nothing_left(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Dies(StandInStore):
        def upsert(self, key: str, value: memoryview) -> int:
            raise Killed

    store = StandInStore()
    with pytest.raises(Killed):
        MooncakeTier(tmp_path, SIZE, Dies()).put(A, record_of(A))
    tier = MooncakeTier(tmp_path, SIZE, store)
    assert not list(tier.records())
    assert not list((tmp_path / "index").glob("*/*"))


def test_pages_of_another_size_are_deleted_and_other_bytes_are_damage(tmp_path: Path) -> None:
    store = StandInStore()
    tier = MooncakeTier(tmp_path, SIZE, store)
    tier.put(A, record_of(A))
    (key,) = store.records
    store.records[key] = store.records[key][:-1]
    with pytest.raises(PageDamaged):
        read(tier, A)
    assert not list(MooncakeTier(tmp_path, SIZE + 1, store).records())
    assert not store.records


def test_folders_do_not_share_names(tmp_path: Path) -> None:
    """Two servers in one store keep their own."""
    store = StandInStore()
    one, two = (MooncakeTier(tmp_path / each, SIZE, store) for each in ("one", "two"))
    one.put(A, record_of(A))
    assert not two.contains(A)
    two.delete(A)
    assert (read(one, A) == A.page[0]).all()
    assert (read(MooncakeTier(tmp_path / "one", SIZE, store), A) == A.page[0]).all()


@pytest.mark.parametrize("left", [b"", bytes(47), b"\xff\xfe"], ids=["empty", "zeros", "no text"])
def test_a_folder_that_lost_its_name_gets_one_of_its_own(tmp_path: Path, left: bytes) -> None:
    known = RecordIndex(tmp_path / "a").prefix
    assert RecordIndex(tmp_path / "a").prefix == known
    for folder in ("a", "b"):
        RecordIndex(tmp_path / folder)
        (tmp_path / folder / "id").write_bytes(left)
    names = {RecordIndex(tmp_path / folder).prefix for folder in ("a", "b")}
    assert len(names) == 2
    assert all(name.startswith("sgl-importance/") for name in names)


def test_a_chain_that_cannot_be_opened_keeps_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, closed = StandInStore(), []
    monkeypatch.setattr(store, "close", lambda: closed.append(store))
    monkeypatch.setattr(open_chain, "connect", lambda **_: store)
    (tmp_path / "file").write_text("in the way")
    text = "".join(
        f'[[tier]]\nkind = "{kind}"\ncapacity = {9 * SIZE}\nfolder = "{tmp_path / folder}"\n{more}'
        for kind, folder, more in (("rdma", "index", 'master = "host:1"\n'), ("fs", "file", ""))
    )
    with pytest.raises(open_chain.ChainError, match="tier fs cannot be used"):
        OpenChain(
            parse_tiers(text),
            owner="tp0",
            page_bytes=PAGE_BYTES,
            make_ranking=LruRanking,
            counters=TierCounters(),
            open_backend=tier_chains.no_backend,
        )
    assert closed == [store]


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(OSError, match="pip install mooncake-transfer-engine"):
        connect(master="127.0.0.1:1", protocol="tcp", devices="", host="127.0.0.1", record_bytes=SIZE)


@pytest.fixture
def real_store(tmp_path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Of a store with one node of 16 MB, on this machine."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine is not installed")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    from fleet_processes import master, stop_all, store_node

    port = free_port()
    parts = [
        master(tmp_path, port=port, http_port=free_port()),
        store_node(
            tmp_path,
            0,
            megabytes=16,
            master_port=port,
            port=free_port(),
            http_port=free_port(),
            protocol=PROTOCOL,
        ),
    ]
    try:
        for part in parts:
            part.start()
            part.wait_ready()
        yield f"127.0.0.1:{port}", parts
    finally:
        stop_all(parts)


def test_over_a_real_store(real_store: tuple[str, list[Any]], tmp_path: Path) -> None:
    """Leases of readers and writers do not keep a record; what does not fit is an error, or evicts."""
    client = connect(master=real_store[0], protocol=PROTOCOL, devices="", host="127.0.0.1", record_bytes=SIZE)
    tier = MooncakeTier(tmp_path / "tier", SIZE, client)
    for name in (A, B):
        tier.put(name, record_of(name))
        tier.put(name, record_of(name))
    assert (read(tier, A) == A.page[0]).all()
    tier.delete(A)
    tier.delete(A)
    assert not tier.contains(A)
    with pytest.raises(FileNotFoundError):
        read(tier, A)
    tier.close()
    client = connect(master=real_store[0], protocol=PROTOCOL, devices="", host="127.0.0.1", record_bytes=SIZE)
    again = MooncakeTier(tmp_path / "tier", SIZE, client)
    assert [listed.name for listed in again.records()] == [B]
    assert (read(again, B) == B.page[0]).all()
    again.close()


def test_a_chain_over_a_real_store_outlives_its_node_and_its_master(
    real_store: tuple[str, list[Any]], tmp_path: Path
) -> None:
    """Pages come back after a restart; with a part of the store killed they are misses, and none is wrong."""
    address, (master, node) = real_store
    text = (
        f'[[tier]]\nkind = "cxl"\ncapacity = {4 * tier_chains.SIZE}\nfolder = "{tmp_path / "cxl"}"\n'
        f'[[tier]]\nkind = "rdma"\ncapacity = {20 * tier_chains.SIZE}\nfolder = "{tmp_path / "rdma"}"\n'
        f'master = "{address}"\nprotocol = "{PROTOCOL}"\nhost = "127.0.0.1"\n'
    )

    def opened() -> OpenChain:
        return OpenChain(
            parse_tiers(text),
            owner="tp0",
            page_bytes=tier_chains.PAGE_BYTES,
            make_ranking=LruRanking,
            counters=TierCounters(),
            open_backend=tier_chains.no_backend,
        )

    keys = tier_chains.keys_of("a", 12)
    chain = opened()
    assert tier_chains.write(chain.chain, keys) == [True] * 12
    assert tier_chains.wrong_pages(chain.chain, keys) == []
    assert chain.chain.snapshot()[1]["pages"] > 7
    chain.close()
    chain = opened()
    assert chain.chain.count_present(tier_chains.MODEL, keys) == 12
    assert tier_chains.wrong_pages(chain.chain, keys) == []
    chain.chain.check_integrity()
    for part in (node, master):
        assert part.running is not None
        part.running.kill()
        part.running.wait()
        read = 0
        try:
            for key, page in zip(
                keys,
                chain.chain.read_run(
                    tier_chains.MODEL, keys, lambda: np.empty(tier_chains.PAGE_BYTES, np.uint8)
                ),
                strict=False,
            ):
                assert (page == tier_chains.body_of(key)).all()
                read += 1
        except PageMiss:
            pass
        assert read < 12
    chain.close()
