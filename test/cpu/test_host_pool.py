"""The HiCache host tier on the CPU, through upstream's own pools."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base

from sglang_importance.cpu.host_pool import SmallerReserve, TransferKernels
from sglang_importance.upstream.differences import host_pool

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 3, 2, 8, 4, 6


@pytest.fixture
def device_pool() -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        size=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([page * PAGE_SIZE + torch.arange(PAGE_SIZE) for page in pages])


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_pages_come_back_from_the_host_unchanged(device_pool: MHATokenToKVPool, layout: str) -> None:
    host = host_pool(device_pool, 2.0, PAGE_SIZE, layout, pin_memory=True)
    before = [buffer.clone() for buffer in (*device_pool.k_buffer, *device_pool.v_buffer)]
    source, on_host, target = slots(5, 1, 2), slots(0, 7, 3), slots(3, 6, 4)
    host.backup_from_device_all_layer(device_pool, on_host, source, "direct")
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device_pool, on_host, target, layer, "direct")

    after = (*device_pool.k_buffer, *device_pool.v_buffer)
    untouched = [slot for slot in range(len(before[0])) if slot not in target.tolist()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[target], old[source])
        assert torch.equal(new[untouched], old[untouched])


@pytest.mark.parametrize("pin_memory", [True, False])
def test_host_memory_is_never_pinned(device_pool: MHATokenToKVPool, pin_memory: bool) -> None:
    host = host_pool(device_pool, 2.0, PAGE_SIZE, "page_first_direct", pin_memory=pin_memory)
    assert host.pin_memory is False
    page = host.get_dummy_flat_data_page()  # what a storage prefetch reads into
    assert not page.is_pinned()


def test_transfers_are_left_alone_where_upstream_has_them() -> None:
    assert not TransferKernels().needed()  # ours are in place


def test_transfers_are_added_where_upstream_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host import mha

    monkeypatch.delattr(mha, "transfer_kv_direct")
    assert TransferKernels().needed()
    TransferKernels().apply()
    assert callable(mha.transfer_kv_direct)


def test_a_small_machine_keeps_less_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = SmallerReserve()
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 << 30))
    assert shim.needed()
    shim.apply()
    assert int(0.8 * 2**30) == base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    assert not shim.needed()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 40))
    assert not SmallerReserve().needed()
