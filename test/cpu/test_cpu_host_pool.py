"""Copies between device and host pools: what goes there comes back, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from sglang_importance.cpu.host_pool import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

NUM_LAYERS, HEADS, HEAD_DIM, PAGES = 3, 2, 4, 6


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def buffers(page_size: int, count: int, *, fill: bool) -> list[torch.Tensor]:
    shape = (PAGES * page_size, HEADS, HEAD_DIM)
    return [torch.randn(shape) if fill else torch.zeros(shape) for _ in range(count)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_layer_first_round_trip(page_size: int) -> None:
    device = buffers(page_size, 2 * NUM_LAYERS, fill=True)
    host = buffers(page_size, 2 * NUM_LAYERS, fill=False)
    back = buffers(page_size, 2 * NUM_LAYERS, fill=False)
    on_device, on_host, restored = (slots_of(pages, page_size) for pages in ([4, 1], [0, 5], [2, 3]))

    transfer_kv_direct(device, host, on_device, on_host, page_size)
    transfer_kv_direct(host, back, on_host, restored, page_size)

    for original, layer, stored in zip(device, back, host, strict=True):
        assert torch.equal(layer[restored], original[on_device])
        assert stored.count_nonzero() == 2 * page_size * HEADS * HEAD_DIM
        assert layer.count_nonzero() == 2 * page_size * HEADS * HEAD_DIM


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_first_round_trip(page_size: int) -> None:
    keys, values = buffers(page_size, NUM_LAYERS, fill=True), buffers(page_size, NUM_LAYERS, fill=True)
    host_keys, host_values = (torch.zeros(PAGES, NUM_LAYERS, page_size, HEADS, HEAD_DIM) for _ in range(2))
    on_device, on_host, restored = (slots_of(pages, page_size) for pages in ([4, 1], [0, 5], [2, 3]))

    transfer_kv_all_layer_direct_lf_pf(
        [*keys, *values], [host_keys, host_values], on_device, on_host, page_size
    )
    assert torch.equal(host_keys[0, 1], keys[1][4 * page_size : 5 * page_size])
    assert torch.equal(host_values[5, 2], values[2][page_size : 2 * page_size])

    for layer_id in range(NUM_LAYERS):
        back_keys, back_values = buffers(page_size, 2, fill=False)
        transfer_kv_per_layer_direct_pf_lf(
            *([host_keys, host_values], [back_keys, back_values], on_host, restored, layer_id, page_size)
        )
        assert torch.equal(back_keys[restored], keys[layer_id][on_device])
        assert torch.equal(back_values[restored], values[layer_id][on_device])
        assert back_keys.count_nonzero() == 2 * page_size * HEADS * HEAD_DIM
