"""Scores that are computed after a request gave its pages back, from pages in tiers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_importance.sparse.device_plan import plan_device
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.sparse.emitting_backend import EmittingTieredBackend
from sglang_importance.sparse.pool import forget_freed_pages

from support.drivers.attention_driver import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    KV_SHAPE,
    POOL_TOKENS,
    model_runner,
    options,
    tiered_pool,
)

PAGE, SLOT, COMPLETE = 16, 1, 4


def tier_pages(runner: SimpleNamespace) -> None:
    """Puts a tiered pool in the place of the runner's own."""
    runner.token_to_kv_pool = tiered_pool(PAGE)
    plan = plan_device(KV_SHAPE, page_size=PAGE, pool_tokens=POOL_TOKENS, device_tokens=400, max_requests=2)
    runner.token_to_kv_pool.attach_slots(plan, "cpu")


def peaks(num_tokens: int, *, is_tiered: bool) -> npt.NDArray[np.float32]:
    """[pages] of a prompt in random keys, read after its last page went back to the allocator."""
    runner = model_runner(page_size=PAGE)
    if is_tiered:
        tier_pages(runner)
    pool = runner.token_to_kv_pool
    allocator = PagedTokenToKVPoolAllocator(
        POOL_TOKENS, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False
    )
    if is_tiered:
        forget_freed_pages(allocator, pool.slots)
    backend = (EmittingTieredBackend if is_tiered else EmittingTorchNativeBackend)(runner, options())
    locations = allocator.alloc(-(-num_tokens // PAGE) * PAGE)
    assert locations is not None
    locations = locations[:num_tokens]
    runner.req_to_token_pool.req_to_token[SLOT, :num_tokens] = locations.int()
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        rids=["a"],
        req_pool_indices=torch.tensor([SLOT]),
        seq_lens=torch.tensor([num_tokens]),
        seq_lens_cpu=torch.tensor([num_tokens]),
        seq_lens_sum=num_tokens,
        out_cache_loc=locations,
        extend_prefix_lens=torch.tensor([0]),
        extend_seq_lens=torch.tensor([num_tokens]),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[num_tokens],
    )
    random = torch.Generator().manual_seed(num_tokens)
    backend.init_forward_metadata(batch)
    for layer in runner.model.layers:
        q, k, v = (
            torch.randn(num_tokens, heads * HEAD_DIM, generator=random)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        heads = k.view(-1, KV_HEADS, HEAD_DIM), v.view(-1, KV_HEADS, HEAD_DIM)
        backend.forward(3 * q, *heads, layer, batch)
    allocator.free_group_begin()
    allocator.free_segment(locations[COMPLETE * PAGE :], start_pos=COMPLETE * PAGE)
    allocator.free_group_end()
    row = backend.rows.consume(SLOT, Phase.PREFILL)
    assert row is not None
    return row.peak


@pytest.mark.parametrize("tail", range(PAGE))
def test_the_page_that_a_request_was_filling_takes_part_in_its_scores(tail: int) -> None:
    num_tokens = COMPLETE * PAGE + tail
    full = peaks(num_tokens, is_tiered=False)
    assert len(full) == COMPLETE + bool(tail)
    np.testing.assert_allclose(peaks(num_tokens, is_tiered=True), full, atol=1e-4)
