"""The chain as the storage backend of HiCache, on real host pools, without a server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import sglang  # noqa: F401  # first: with it come the shims
import torch

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import StoreOptions
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.backend_tier import BackendTier
from sgl_importance.storage.tier_chain.kinds.tier_record import record_bytes
from sglang_importance.launch.server_findings import server_findings
from sglang_importance.storage import backend as backend_module
from sglang_importance.storage import store_launch
from sglang_importance.storage.backend import VerifiedStorage
from sglang_importance.storage.served_chain import ServedChain
from sglang_importance.storage.weights import WATCH
from sglang_importance.upstream.refusal import LaunchRefused

from support.host_pools import KEYS, PAGES, WEIGHTS, make_backend, make_pool, pages_of, slots
from support.waiting import wait_until


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedChain:
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    chain = ServedChain()
    monkeypatch.setattr(backend_module, "SERVED", chain)
    monkeypatch.setattr(backend_module, "data_parallel_rank", lambda: 0)
    return chain


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """Tiers of 3, 4 and 6 pages."""
    page_bytes = make_pool("page_first").get_dummy_flat_data_page().nbytes
    size = record_bytes(page_bytes)
    file = tmp_path / "tiers.toml"
    file.write_text(
        f'[[tier]]\nkind = "dram"\ncapacity = {3 * size}\n'
        f'[[tier]]\nkind = "cxl"\ncapacity = {4 * size}\nfolder = "{tmp_path / "cxl"}"\n'
        "inject_latency_us = 1\n"
        f'[[tier]]\nkind = "nvme"\ncapacity = {6 * size}\nfolder = "{tmp_path / "nvme"}"\n'
    )
    return file


def test_pages_come_back_bit_for_bit(tmp_path: Path, tiers: Path, served: ServedChain) -> None:
    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", tiers=str(tiers))
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_exists(KEYS) == PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    for stored, fetched in zip(pages_of(pool, 0), pages_of(pool, PAGES), strict=True):
        assert torch.equal(stored, fetched)
    assert served.chain is not None
    snapshot = served.chain.snapshot()
    assert [tier["pages"] for tier in snapshot] == [2, 3, 3]
    assert served.ranking == "least recently used"
    assert "injected" in snapshot[1]["note"]
    with pytest.raises(NotImplementedError, match="delete the folders of its tiers"):
        backend.clear()
    assert backend.batch_exists(KEYS) == PAGES
    backend.close()
    assert served.chain is None, "nobody is shown tiers that were detached"
    again = make_backend(pool, tmp_path / "store", tiers=str(tiers))
    backend.close()
    assert served.chain is not None
    assert again.batch_exists(KEYS) == 0, "the first pages were in memory, and nobody reaches the others"
    assert again.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert again.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    again.close()


def test_two_servers_do_not_share_a_folder(tmp_path: Path, tiers: Path, served: ServedChain) -> None:
    first = make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers))
    with pytest.raises(LaunchRefused, match="another server uses"):
        make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers))
    first.close()
    make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers)).close()


def test_each_replica_has_folders_of_its_own(
    tmp_path: Path, tiers: Path, served: ServedChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream counts the ranks of tensor parallelism within each."""
    opened = []
    for replica in (0, 1):
        monkeypatch.setattr(backend_module, "data_parallel_rank", lambda replica=replica: replica)
        opened.append(make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers)))
    first, second = opened
    assert first.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert second.batch_exists(KEYS) == 0, "what one keeps, the other does not know"
    assert sorted(path.name for path in (tmp_path / "nvme").iterdir()) == ["tp0-pp0-cp0", "tp0-pp0-cp0-dp1"]
    for each in opened:
        each.close()


def test_pages_are_ranked_by_what_the_tree_predicts(tmp_path: Path, tiers: Path, served: ServedChain) -> None:
    reuse = ReuseEstimator()
    served.predict_by(reuse)
    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", tiers=str(tiers))
    assert served.ranking == "predicted reuse"
    for key in range(PAGES):  # eight sequences of one page
        assert backend.batch_set_v1([KEYS[key]], slots(key, 1)) == [True]
    assert served.chain is not None
    ranking = served.chain._ranking
    number = next(number for number, _ in served.chain._numbers.items())
    before = ranking.rate(number)
    for _ in range(200):  # of this class, every node returns at the next request
        reuse.tick()
        reuse.began(7)
        reuse.tick()
        reuse.hit(7, reuse.clock - 1)
    served.visited(KEYS[:1], 7, reuse.clock)
    backend.batch_get_v1(KEYS[:1], slots(PAGES, 1))
    backend.batch_set_v1(KEYS[:1], slots(0, 1))  # behind what the read left to be done
    assert ranking.rate(number) > before
    assert served.chain._placement.level_of(number) == 0
    served.chain.check_integrity()
    backend.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[tier]]\nkind = 'tape'", "use one of"),
        ("[[tier]]\nkind = 'hbm'\ncapacity = '1GB'", "sglang's own"),
        ("[[tier]]\nkind = 'fs'\ncapacity = '1GB'\nfolder = '/proc/none'", "cannot be written"),
    ],
)
def test_what_cannot_be_used_is_refused_at_launch(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    options = ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"), tiers=str(file)))
    with pytest.raises(LaunchRefused, match=problem):
        store_launch.mount(argparse.Namespace(), options)


def test_a_tier_without_room_for_two_pages_is_refused(tmp_path: Path, served: ServedChain) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("[[tier]]\nkind = 'dram'\ncapacity = 10")
    with pytest.raises(LaunchRefused, match="give it at least"):
        make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(file))


def test_the_launch_takes_the_file_along(tmp_path: Path, tiers: Path) -> None:
    args = argparse.Namespace()
    store_launch.mount(
        args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"), tiers=str(tiers)))
    )
    assert json.loads(args.hicache_storage_backend_extra_config)["tiers"] == str(tiers)
    args = argparse.Namespace(hicache_storage_backend="file")
    with pytest.raises(LaunchRefused, match="drop --hicache-storage-backend"):
        store_launch.mount(
            args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"), tiers=str(tiers)))
        )
    with pytest.raises(ValueError, match="needs --kv-importance-store"):
        ImportanceOptions(store=StoreOptions(tiers=str(tiers)))


def test_doctor_says_what_each_tier_is(tmp_path: Path, tiers: Path, served: ServedChain) -> None:
    backend = make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers))
    assert served.chain is not None
    document = {
        "policy": "importance",
        "clock": 3,
        "faults": {"counts": {}, "fallback": None},
        "store_tiers": {"ranking": served.ranking, "tiers": served.chain.snapshot()},
    }
    found = {finding.subject: finding.detail for finding in server_findings(document)}
    assert "GB/s when the server started" in found["storage tier dram"]
    assert "injected" in found["storage tier cxl"]
    backend.close()


# ---- tiers in storage backends of HiCache, as its own factory makes them ----

DYNAMIC = {
    "zero copy": {
        "backend_name": "z",
        "module_path": "support.doubles.zero_copy_store",
        "class_name": "ZeroCopyStore",
        "interface_v1": 1,
    },
    "blocks": {"backend_name": "v", "module_path": "support.doubles.value_store", "class_name": "ValueStore"},
}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of upstream's file backend."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    return tmp_path / "upstream"


def hicache_tiers(tmp_path: Path, kind: str, settings: dict[str, Any] | None = None) -> Path:
    """A mapped file of 3 pages, and a backend of HiCache for the rest."""
    size = record_bytes(make_pool("page_first").get_dummy_flat_data_page().nbytes)
    if settings is None:
        settings = {**DYNAMIC.get(kind, {}), "folder": str(tmp_path / "values")}
    config = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    file = tmp_path / "tiers.toml"
    file.write_text(
        f'[[tier]]\nkind = "cxl"\ncapacity = {3 * size}\nfolder = "{tmp_path / "cxl"}"\n'
        f'[[tier]]\nkind = "hicache"\nbackend = "{"dynamic" if kind in DYNAMIC else kind}"\n'
        f'capacity = {20 * size}\nfolder = "{tmp_path / "index"}"\nconfig = {{{config}}}\n'
    )
    return file


REAL, REAL_SETTINGS = "SGL_IMPORTANCE_STORE_BACKEND", "SGL_IMPORTANCE_STORE_BACKEND_CONFIG"


def raw_backend(backend: VerifiedStorage) -> Any:
    assert isinstance(backend._pages, TierChain)
    tier = backend._pages.members[-1].tier
    assert isinstance(tier, BackendTier)
    return tier._backend._backend  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["file", *DYNAMIC])
def test_pages_come_back_from_a_backend_of_hicache(
    tmp_path: Path, upstream: Path, served: ServedChain, kind: str
) -> None:
    store_and_start_again(tmp_path, served, hicache_tiers(tmp_path, kind))


def test_a_later_rank_need_not_wait_for_the_folder_of_the_first(
    tmp_path: Path, upstream: Path, served: ServedChain
) -> None:
    """Upstream's file backend has rank 0 make it, and the others write into it."""
    tiers = str(hicache_tiers(tmp_path, "file"))
    backend = make_backend(make_pool("page_first"), tmp_path / "store", tiers=tiers, tp_rank=1, tp_size=2)
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert list(upstream.glob("*.bin"))
    backend.close()


@pytest.mark.skipif(REAL not in os.environ, reason=f"{REAL} names no storage backend that runs here")
def test_a_real_backend_as_a_tier(tmp_path: Path, served: ServedChain) -> None:
    """As ``test_wrapped.test_a_real_backend``."""
    settings = json.loads(os.environ.get(REAL_SETTINGS, "{}"))
    store_and_start_again(tmp_path, served, hicache_tiers(tmp_path, os.environ[REAL], settings))


def store_and_start_again(tmp_path: Path, served: ServedChain, file: Path) -> None:
    tiers = str(file)
    pool = make_pool("page_first")
    for attempt in range(2):  # the second is a restart
        backend = make_backend(pool, tmp_path / "store", tiers=tiers)
        assert backend.batch_exists(KEYS) == PAGES * attempt
        if not attempt:
            assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
        assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
        for stored, fetched in zip(pages_of(pool, 0), pages_of(pool, PAGES), strict=True):
            assert torch.equal(stored, fetched)
        assert served.chain is not None
        (above, below) = served.chain.snapshot()
        assert (above["pages"], below["pages"]) == (2, PAGES - 2)
        assert "deletes nothing" in below["note"]
        assert served.counters.values()["hit_pages", "hicache"] > 0
        served.chain.check_integrity()
        backend.close()


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({}, "will grow without end"),
        ({"max_size": "60TB"}, "will grow without end"),  # which upstream does not read
        ({"max_size": "1k"}, "keeps 1000 bytes and its tier counts on"),
        ({"max_size": "1G"}, ""),
    ],
)
def test_a_limit_that_the_file_backend_lacks_is_said(
    tmp_path: Path,
    upstream: Path,
    served: ServedChain,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    warning: str,
) -> None:
    tiers = hicache_tiers(tmp_path, "file", settings)
    try:
        make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(tiers)).close()
    except LaunchRefused:
        assert settings == {"max_size": "1k"}, "it holds no record at all"
    said = [
        record.getMessage() for record in caplog.records if "KV importance tiers: the" in record.getMessage()
    ]
    assert len(said) == bool(warning)
    assert all(warning in line for line in said)


@pytest.mark.parametrize("fault", ["get raises", "get answers for fewer", "get brings nothing"])
def test_reads_of_a_backend_that_go_wrong_are_misses(tmp_path: Path, served: ServedChain, fault: str) -> None:
    """Nothing brought is what the slot held before: another page, whose check says so."""
    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", tiers=str(hicache_tiers(tmp_path, "zero copy")))
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    raw = raw_backend(backend)
    raw.fault = fault
    there = backend.batch_get_v1(KEYS, slots(PAGES))
    count = there.index(False)
    assert count == 2, "those of the other tier"
    assert not any(there[count:])
    for stored, fetched in zip(pages_of(pool, 0, count), pages_of(pool, PAGES, count), strict=True):
        assert torch.equal(stored, fetched)
    raw.fault = ""
    assert all(backend.batch_set_v1(KEYS, slots(0)))
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    backend.close()


@pytest.mark.parametrize("fault", ["set raises", "set fails"])
def test_writes_of_a_backend_that_go_wrong_keep_the_other_tier(
    tmp_path: Path, served: ServedChain, fault: str
) -> None:
    pool = make_pool("page_first")
    backend = make_backend(pool, tmp_path / "store", tiers=str(hicache_tiers(tmp_path, "zero copy")))
    raw_backend(backend).fault = fault
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * 2 + [False] * (PAGES - 2)
    assert backend.batch_get_v1(KEYS, slots(PAGES))[:3] == [True, True, False]
    backend.close()


def test_nobody_waits_for_a_backend_that_hangs(tmp_path: Path, served: ServedChain) -> None:
    pool = make_pool("page_first")
    tiers = str(hicache_tiers(tmp_path, "zero copy"))
    backend = make_backend(pool, tmp_path / "store", tiers=tiers, timeout_ms=1000)
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    raw = raw_backend(backend)
    raw.fault = "get hangs"
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * 2 + [False] * (PAGES - 2)
    assert raw.inside["get"] == 1, "the backend is still at it"
    raw.fault = ""
    raw.answer.set()
    wait_until(lambda: raw.inside["get"] == 0)
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    assert all(map(torch.equal, pages_of(pool, 0), pages_of(pool, PAGES)))
    backend.close()


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("mooncake", "tier hicache: backend mooncake: .* add --kv-importance-store-backends any"),
        ("sim", "tier hicache: backend sim: .* keeps names and no bytes"),
        ("unheard", "does not know it: use one of file"),
        ("dynamic", "needs backend_name, module_path, class_name"),
    ],
)
def test_backends_that_cannot_hold_a_tier_are_refused(tmp_path: Path, backend: str, problem: str) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text(
        f'[[tier]]\nkind = "hicache"\nbackend = "{backend}"\ncapacity = "1GB"\nfolder = "{tmp_path / "i"}"\n'
    )
    with pytest.raises(LaunchRefused, match=problem):
        store_launch.mount(
            argparse.Namespace(),
            ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"), tiers=str(file))),
        )


def test_a_backend_that_cannot_be_made_is_one_line(tmp_path: Path, served: ServedChain) -> None:
    file = hicache_tiers(tmp_path, "zero copy")
    file.write_text(file.read_text().replace("ZeroCopyStore", "Nothing"))
    with pytest.raises(LaunchRefused, match=r"tier hicache cannot be used \(AttributeError") as caught:
        make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(file))
    (line,) = caught.value.reasons
    assert "\n" not in line
