"""Backends of upstream under the wrapper: whatever they bring, what reaches the host pool is right."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_importance.storage.page_record import HEADER_BYTES
from sglang_importance.storage.backend import VerifiedStorage
from sglang_importance.storage.page_buffers import StagingPool
from sglang_importance.storage.weights import WATCH, Weights
from sglang_importance.storage.wrapped import ZeroCopyPages

from support.doubles.zero_copy_store import ZeroCopyStore
from support.host_pools import KEYS, PAGES, make_backend, make_pool, pages_of, slots
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("watch")

BAD = 3
REAL, REAL_SETTINGS = "SGL_IMPORTANCE_STORE_BACKEND", "SGL_IMPORTANCE_STORE_BACKEND_CONFIG"


def dynamic(folder: Path) -> dict[str, object]:
    return {
        "backend_name": "zero_copy",
        "module_path": "support.doubles.zero_copy_store",
        "class_name": "ZeroCopyStore",
        "interface_v1": 1,
        "folder": str(folder),
    }


class Bench:
    """The wrapper over the faulty backend, with eight pages stored."""

    def __init__(self, folder: Path, layout: str = "page_first", timeout_ms: int = 5000) -> None:
        self.pool = make_pool(layout)
        self.folder = folder
        self.timeout_ms = timeout_ms
        self.verified, self.raw = self.attach()
        assert self.verified.batch_set_v1(KEYS, slots(0)) == [True] * PAGES

    def attach(self) -> tuple[VerifiedStorage, ZeroCopyStore]:
        verified = make_backend(
            self.pool,
            self.folder / "store",
            wrapped="dynamic",
            wrapped_config=dynamic(self.folder / "values"),
            timeout_ms=self.timeout_ms,
        )
        pages = verified._pages
        assert isinstance(pages, ZeroCopyPages)
        raw = pages._backend
        assert isinstance(raw, ZeroCopyStore)
        return verified, raw

    def files(self, page: int) -> list[Path]:
        identity = self.verified._current_identity(to_write=False)
        assert identity is not None
        assert isinstance(self.verified._pages, ZeroCopyPages)
        return self.raw.files(self.verified._pages._names.of(identity, KEYS[page]))

    def get(self) -> int:
        """Pages served into the second half of the pool, each of which must be right."""
        served = self.verified.batch_get_v1(KEYS, slots(PAGES))
        count = served.index(False) if False in served else PAGES
        assert not any(served[count:])
        stored, fetched = pages_of(self.pool, 0, count), pages_of(self.pool, PAGES, count)
        assert all(map(torch.equal, stored, fetched))
        return count

    def overwrite_host_pool(self) -> None:
        for page in range(PAGES, 2 * PAGES):
            dummy = self.pool.get_dummy_flat_data_page()
            self.pool.set_from_flat_data_page(slots(page, 1)[0], dummy)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_bit_for_bit_and_in_batches(tmp_path: Path, layout: str) -> None:
    bench = Bench(tmp_path, layout)
    assert bench.verified.batch_exists(KEYS) == PAGES
    assert bench.get() == PAGES
    assert bench.raw.batches == [("set", PAGES), ("get", PAGES)]
    assert WATCH.counters["missed_pages"] == 0
    # Another process, or this one after a restart, finds them.
    bench.verified, bench.raw = bench.attach()
    bench.overwrite_host_pool()
    assert bench.get() == PAGES


def test_what_is_there_is_not_written_again(bench: Bench) -> None:
    assert bench.verified.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert bench.raw.batches == [("set", PAGES)]
    assert WATCH.counters["written_pages"] == PAGES


def flip(half: int, offset: int) -> Callable[[Bench], None]:
    def damage(bench: Bench) -> None:
        file = bench.files(BAD)[half]
        data = bytearray(file.read_bytes())
        data[offset] ^= 4
        file.write_bytes(data)

    return damage


def swap(half: int) -> Callable[[Bench], None]:
    def damage(bench: Bench) -> None:
        one, other = bench.files(BAD)[half], bench.files(BAD + 1)[half]
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)

    return damage


def cut(bench: Bench) -> None:
    file = bench.files(BAD)[0]
    file.write_bytes(file.read_bytes()[:200])


def remove_v(bench: Bench) -> None:
    bench.files(BAD)[1].unlink()


def of_another_model(bench: Bench) -> None:
    files = bench.files(BAD)
    WATCH.current = Weights("other", "1", "c", pages_match=True)
    bench.verified.batch_set_v1([KEYS[BAD]], slots(0, 1))
    strange = [file.read_bytes() for file in bench.files(BAD)]
    WATCH.current = Weights("w", "1", "c", pages_match=True)
    for file, data in zip(files, strange, strict=True):
        file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Bench], None], str]] = {
    "bit of magic": (flip(0, 0), "magic"),
    "bit of header": (flip(0, 30), "header"),
    "bit of K half": (flip(0, HEADER_BYTES + 100), "body"),
    "records swapped": (lambda bench: [swap(0)(bench), swap(1)(bench)], "page"),
    "K halves swapped": (swap(0), "page"),
    "value cut": (cut, "body"),
    "record of another model": (of_another_model, "identity"),
    "V half lost": (remove_v, "absent"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_a_miss_and_is_replaced(bench: Bench, damage: str) -> None:
    act, reason = DAMAGES[damage]
    act(bench)
    bench.overwrite_host_pool()
    assert bench.get() == BAD
    counted = WATCH.counters.values()
    assert counted["missed_pages", reason] >= 1
    if reason != "absent":
        assert counted["quarantined_pages", None] == 1
        (aside,) = (bench.verified._directory / "quarantine").iterdir()
        assert aside.name.startswith(reason)
    assert bench.verified.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    if damage == "records swapped" or damage == "K halves swapped":
        assert bench.get() == BAD + 1  # the other one of the two
        bench.verified.batch_set_v1(KEYS, slots(0))
    assert bench.get() == PAGES


def test_long_pages_span_both_halves_of_a_slot() -> None:
    for page_bytes in (1, 4000, 4096, 8095, 8096, 8097, 20_000):
        staging = StagingPool(2, page_bytes, allocator="default", pin_memory=False)
        body = torch.randint(0, 255, (page_bytes,), dtype=torch.uint8).numpy()
        staging.put(1, bytes(range(HEADER_BYTES)), body)
        back = body * 0
        assert staging.take(1, back) == bytes(range(HEADER_BYTES))
        assert (back == body).all()
        assert not staging.record(0).any()
        assert staging.record_bytes - HEADER_BYTES - page_bytes < 2 * 4096


def test_no_kernel_is_built_for_rows_that_no_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.mem_cache.pool_host.mha as pools

    asked = []
    for name in ("can_use_hicache_jit_kernel", "can_use_write_back_jit_kernel"):
        monkeypatch.setattr(pools, name, lambda name=name, **_: asked.append(name))
    monkeypatch.setattr(pools, "_is_cuda", True)
    make_pool("page_first")
    assert asked, "upstream builds none any more"
    asked.clear()
    staging = StagingPool(2, 4096, allocator="default", pin_memory=False)
    assert not asked
    assert not staging.pool.can_use_jit
    make_pool("page_first")
    assert asked, "the pool of the model has lost its kernels"


def test_a_bit_of_the_v_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_importance.storage.page_buffers as staging

    monkeypatch.setattr(staging, "HALF_ALIGNMENT", 32)  # pages of the test are small: most of one half
    bench = Bench(tmp_path)
    flip(1, 40)(bench)
    assert bench.get() == BAD
    assert WATCH.counters.values()["missed_pages", "body"] == 1


@pytest.mark.parametrize("fault", ["get brings nothing", "get answers for fewer", "get raises"])
def test_a_read_that_goes_wrong_is_a_miss(bench: Bench, fault: str) -> None:
    bench.verified, bench.raw = bench.attach()
    bench.raw.fault = fault
    assert bench.get() == 0
    assert WATCH.counters["missed_pages"] == 1
    bench.raw.fault = ""
    bench.verified.batch_set_v1(KEYS, slots(0))
    assert bench.get() == PAGES


def test_what_an_earlier_read_left_in_a_slot_is_not_taken_for_another_page(bench: Bench) -> None:
    assert bench.verified.batch_get_v1(KEYS[:4], slots(PAGES, 4)) == [True] * 4
    bench.raw.fault = "get brings nothing"
    pages = bench.verified._pages
    assert isinstance(pages, ZeroCopyPages)
    lanes = pages.lanes(1).read
    for _ in range(lanes):  # whichever slots it gets
        assert bench.verified.batch_get_v1(KEYS[4:], slots(PAGES, 4)) == [False] * 4
    counted = WATCH.counters.values()
    # A record of another page, or a slot that nothing was ever read into.
    assert counted["missed_pages", "page"] >= 1
    assert counted["missed_pages", "page"] + counted.get(("missed_pages", "magic"), 0) == lanes


def test_half_a_record_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_importance.storage.page_buffers as staging

    monkeypatch.setattr(staging, "HALF_ALIGNMENT", 32)
    bench = Bench(tmp_path)
    bench.raw.fault = "get brings K only"
    assert bench.get() == 0
    assert WATCH.counters.values()["missed_pages", "body"] == 1


@pytest.mark.parametrize("fault", ["set raises", "set fails"])
def test_a_write_that_goes_wrong_stores_nothing(tmp_path: Path, fault: str) -> None:
    bench = Bench(tmp_path)
    WATCH.current = Weights("new", "1", "c", pages_match=True)
    bench.raw.fault = fault
    assert bench.verified.batch_set_v1(KEYS, slots(0)) == [False] * PAGES
    assert WATCH.counters["unwritten_pages"] == PAGES
    bench.raw.fault = ""
    assert bench.verified.batch_exists(KEYS) == 0
    assert bench.verified.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert bench.get() == PAGES


def test_nobody_waits_for_a_backend_that_hangs_and_its_late_bytes_go_nowhere(tmp_path: Path) -> None:
    bench = Bench(tmp_path, timeout_ms=1000)
    bench.raw.fault = "get hangs"
    bench.overwrite_host_pool()
    before = bench.pool.kv_buffer.clone()
    assert bench.get() == 0
    assert bench.get() == 0
    assert bench.raw.inside["get"] == 1, "the backend is still at it"
    assert WATCH.counters.values()["missed_pages", "timeout"] == 2
    bench.raw.fault = ""
    bench.raw.answer.set()
    wait_until(lambda: bench.raw.inside["get"] == 0)
    assert torch.equal(before, bench.pool.kv_buffer)
    assert bench.get() == PAGES


def test_a_backend_is_entered_by_one_thread_for_each_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZeroCopyPages, "run_pages", staticmethod(lambda page_bytes: 2))
    bench = Bench(tmp_path)
    assert bench.raw.batches == [("set", 2)] * 4
    for _ in range(5):
        assert bench.get() == PAGES
    assert bench.raw.most_inside == 1


# ---- backends of upstream itself ----


def test_hf3fs_of_upstream_with_its_mock_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of upstream's code but the file system's own client: a flat file and a table of pages."""
    import atexit
    import signal

    from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it takes over the program's own
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    settings = {
        "file_path_prefix": str(tmp_path / "3fs" / "f"),
        "file_size": 1 << 20,
        "numjobs": 2,
        "entries": 8,
    }
    config = tmp_path / "hf3fs.json"
    config.write_text(json.dumps(settings))
    monkeypatch.setenv(HiCacheHF3FS.default_env_var, str(config))
    pool = make_pool("layer_first")
    backend = make_backend(
        pool, tmp_path / "store", wrapped="hf3fs", wrapped_config={"use_mock_hf3fs_client": True}
    )
    assert isinstance(backend._pages, ZeroCopyPages)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_exists(KEYS) == PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    assert all(map(torch.equal, pages_of(pool, 0), pages_of(pool, PAGES)))
    damage_every_record(tmp_path / "3fs" / "f.0.bin")
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES
    assert WATCH.counters["quarantined_pages"] == 1
    backend.close()


def damage_every_record(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for start in range(0, len(data), 64):
        data[start] ^= 1
    file.write_bytes(data)


@pytest.mark.skipif(REAL not in os.environ, reason=f"{REAL} names no storage backend that runs here")
def test_a_real_backend(tmp_path: Path) -> None:
    """Settles whether a backend works under the wrapper, where its service runs: docs/storage.md."""
    name, settings = os.environ[REAL], json.loads(os.environ.get(REAL_SETTINGS, "{}"))
    # Of its own in every run: the service keeps what it was given.
    WATCH.current = Weights(uuid.uuid4().hex, "1", "c", pages_match=True)
    for layout in ("layer_first", "page_first", "page_first_direct"):
        pool = make_pool(layout)
        backend = make_backend(pool, tmp_path / "store", wrapped=name, wrapped_config=settings)
        assert backend.batch_exists(KEYS) == 0
        assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
        assert backend.batch_exists(KEYS) == PAGES
        assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
        assert all(map(torch.equal, pages_of(pool, 0), pages_of(pool, PAGES)))
        strange = ["0" * 64, *KEYS]
        assert backend.batch_get_v1(strange, slots(0, PAGES + 1)) == [False] * (PAGES + 1)
        backend.close()


@pytest.mark.parametrize("interface", ["file", "dynamic"])
def test_backends_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    """Upstream's ``file`` by its own name, and as a dynamic backend of somebody's."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    pool: MHATokenToKVPoolHost = make_pool("page_first")
    settings = {"backend_name": "f", "module_path": "support.doubles.value_store", "class_name": "ValueStore"}
    backend = make_backend(pool, tmp_path / "store", wrapped=interface, wrapped_config=settings)
    assert backend.batch_set_v1(KEYS, slots(0)) == [True] * PAGES
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [True] * PAGES
    assert all(map(torch.equal, pages_of(pool, 0), pages_of(pool, PAGES)))
    for file in (tmp_path / "upstream").iterdir():
        damage_every_record(file)
    assert backend.batch_get_v1(KEYS, slots(PAGES)) == [False] * PAGES
    assert WATCH.counters["quarantined_pages"] == 1


@pytest.mark.parametrize(("settings", "warnings"), [({}, 1), ({"max_size": "1G"}, 0)])
def test_a_file_backend_without_a_limit_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    warnings: int,
) -> None:
    """The bound of the store is not its own."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "upstream"))
    pool = make_pool("page_first")
    make_backend(pool, tmp_path / "store", wrapped="file", wrapped_config=settings).close()
    said = [record.getMessage() for record in caplog.records if "grow without end" in record.getMessage()]
    assert len(said) == warnings
    assert all("KV importance store: the backend file" in line and "extra-config" in line for line in said)
