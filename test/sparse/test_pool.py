"""sglang's own pool and allocator with page slots: whoever writes the pool leaves nothing stale in a slot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_importance.sparse.device_plan import KvShape, plan_device
from sglang_importance.cpu import install as install_cpu_support
from sglang_importance.sparse.install import _tiered_allocator
from sglang_importance.sparse.pool import TieredKVPool

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 16, 2, 2, 8
SHAPE = KvShape(layers=LAYERS, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, item_bytes=4)
LOCATIONS = torch.arange(PAGE, PAGE + 2 * PAGE + 2)  # two complete pages and one that is being filled


@pytest.fixture
def pool() -> TieredKVPool:
    install_cpu_support()
    pool = TieredKVPool(
        PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    plan = plan_device(SHAPE, page_size=PAGE, pool_tokens=PAGES * PAGE, device_tokens=400, max_requests=2)
    pool.attach_slots(plan, "cpu")
    return pool


@pytest.fixture
def allocator(pool: TieredKVPool) -> PagedTokenToKVPoolAllocator:
    def build(_: Any, *, token_to_kv_pool: TieredKVPool) -> PagedTokenToKVPoolAllocator:
        settings = {"page_size": PAGE, "dtype": torch.float32, "device": "cpu", "need_sort": False}
        return PagedTokenToKVPoolAllocator(PAGES * PAGE, kvcache=token_to_kv_pool, **settings)

    return _tiered_allocator(build, SimpleNamespace(), token_to_kv_pool=pool)  # type: ignore[arg-type]


def write(pool: TieredKVPool, locations: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random keys and values in every layer, the way an attention backend writes them."""
    pool.begin_pass(locations)
    written = []
    for layer in range(LAYERS):
        keys, values = (torch.randn(len(locations), HEADS, DIM) for _ in range(2))
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), KVWriteLoc(locations, None), keys, values)
        written.append((keys, values))
    return written


def read(pool: TieredKVPool, layer: int, locations: torch.Tensor) -> list[torch.Tensor]:
    """What attention gets for these locations."""
    pages = torch.unique_consecutive(locations // PAGE)
    first = int(locations[0]) % PAGE
    found = pool.slots.read(layer, pages)
    return [tensor[first : first + len(locations)].clone() for tensor in found]


def assert_reads(pool: TieredKVPool, locations: torch.Tensor, expected: Any) -> None:
    for layer in range(LAYERS):
        for _ in range(2):  # from the host, then from slots
            for tensor, wanted in zip(read(pool, layer, locations), expected[layer], strict=True):
                assert torch.equal(tensor, wanted)
    pool.slots.check_integrity()


def test_those_who_read_buffers_find_the_page_that_is_being_filled(pool: TieredKVPool) -> None:
    written = write(pool, LOCATIONS)
    for layer, (keys, values) in enumerate(written):
        assert torch.equal(pool.get_key_buffer(layer)[LOCATIONS], keys)
        assert torch.equal(pool.get_value_buffer(layer)[LOCATIONS], values)
    assert_reads(pool, LOCATIONS, written)


def test_what_was_not_announced_is_not_written(pool: TieredKVPool) -> None:
    pool.begin_pass(LOCATIONS)
    nothing = torch.zeros(1, HEADS, DIM)
    with pytest.raises(AssertionError, match="did not announce"):
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(LOCATIONS[:1], None), nothing, nothing)


WAYS_TO_FREE: dict[str, Callable[[PagedTokenToKVPoolAllocator, torch.Tensor], None]] = {
    "free": lambda allocator, tokens: allocator.free(tokens),
    "segment": lambda allocator, tokens: allocator.free_segment(tokens, start_pos=0),
    "page ids": lambda allocator, tokens: allocator.free_page_ids(torch.unique(tokens // PAGE)),
    "group": lambda allocator, tokens: _in_group(allocator, tokens),
    "clear": lambda allocator, tokens: allocator.clear(),
}


def _in_group(allocator: PagedTokenToKVPoolAllocator, tokens: torch.Tensor) -> None:
    allocator.free_group_begin()
    allocator.free(tokens[:PAGE])
    allocator.free_segment(tokens[PAGE:], start_pos=PAGE)
    allocator.free_group_end()


@pytest.mark.parametrize("way", WAYS_TO_FREE)
def test_a_page_that_is_used_again_holds_nothing_old(
    pool: TieredKVPool, allocator: PagedTokenToKVPoolAllocator, way: str
) -> None:
    tokens = allocator.alloc(3 * PAGE)
    assert tokens is not None
    used = tokens[: len(LOCATIONS)]
    assert_reads(pool, used, write(pool, used))
    assert len(pool.slots.open_pages.open()[0]) == 1
    WAYS_TO_FREE[way](allocator, tokens)
    assert len(pool.slots.open_pages.open()[0]) == 0
    assert pool.slots.resident_pages().tolist() == [0, 0]
    assert allocator.available_size() == PAGES * PAGE
    assert_reads(pool, used, write(pool, used))


def test_a_prompt_in_chunks_takes_one_frame_where_memory_is_short(
    pool: TieredKVPool, allocator: PagedTokenToKVPoolAllocator
) -> None:
    write(pool, torch.arange(PAGE, PAGE + 2))  # another request's, in the other of two frames
    tree = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0)
    budget = allocator.create_prefill_budget(tree)
    budget.total_offset += allocator.available_size() - (PAGE + 1.5)  # what requests are expected to take
    chunk = budget.available_chunk_tokens(4 * PAGE)
    assert chunk == 2 * PAGE
    prompt = torch.arange(2 * PAGE, 6 * PAGE)
    write(pool, prompt[:chunk])
    write(pool, prompt[chunk : chunk + PAGE + 1])
    assert len(pool.slots.open_pages.open()[0]) == 2


@pytest.mark.parametrize(("left", "tokens"), [(-1, 4 * PAGE), (0.5, 4 * PAGE), (PAGE, PAGE), (99, 4 * PAGE)])
def test_a_chunk_is_as_long_as_upstream_lets_it_be(
    allocator: PagedTokenToKVPoolAllocator, left: float, tokens: int
) -> None:
    tree = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0)
    budget = allocator.create_prefill_budget(tree)
    budget.total_offset += allocator.available_size() - left
    assert budget.available_chunk_tokens(4 * PAGE) == tokens
