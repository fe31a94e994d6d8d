"""The chain as the storage backend of HiCache, on real host pools, without a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import sglang  # noqa: F401  # first: with it come the shims
import torch

from sgl_importance.options import ImportanceOptions
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.tier_chain.kinds.tier_record import record_bytes
from sglang_importance.launch.server_findings import server_findings
from sglang_importance.storage import backend as backend_module
from sglang_importance.storage import store_launch
from sglang_importance.storage.served_chain import ServedChain
from sglang_importance.storage.weights import WATCH
from sglang_importance.upstream.refusal import LaunchRefused

from support.host_pools import KEYS, PAGES, WEIGHTS, make_backend, make_pool, pages_of, slots


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedChain:
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    chain = ServedChain()
    monkeypatch.setattr(backend_module, "SERVED", chain)
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
    backend.close()
    again = make_backend(pool, tmp_path / "store", tiers=str(tiers))
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
    options = ImportanceOptions(store=str(tmp_path / "store"), tiers=str(file))
    with pytest.raises(LaunchRefused, match=problem):
        store_launch.mount(argparse.Namespace(), options)


def test_a_tier_without_room_for_two_pages_is_refused(tmp_path: Path, served: ServedChain) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("[[tier]]\nkind = 'dram'\ncapacity = 10")
    with pytest.raises(LaunchRefused, match="give it at least"):
        make_backend(make_pool("page_first"), tmp_path / "store", tiers=str(file))


def test_the_launch_takes_the_file_along(tmp_path: Path, tiers: Path) -> None:
    args = argparse.Namespace()
    store_launch.mount(args, ImportanceOptions(store=str(tmp_path / "store"), tiers=str(tiers)))
    assert json.loads(args.hicache_storage_backend_extra_config)["tiers"] == str(tiers)
    args = argparse.Namespace(hicache_storage_backend="file")
    with pytest.raises(LaunchRefused, match="drop --hicache-storage-backend"):
        store_launch.mount(args, ImportanceOptions(store=str(tmp_path / "store"), tiers=str(tiers)))
    with pytest.raises(ValueError, match="needs kv_importance_store"):
        ImportanceOptions(tiers=str(tiers))


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
