"""Attention of single queries to pages where they lie, in slots or on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.triton.tiles import MIN_DOT_ROWS, dot_dtype

TILE_TOKENS = 32
"""Tokens that are multiplied at a time: with 64, compiled for a GPU, numbers do not fit the registers."""
SPLIT_PAGES = 16
"""Pages of a row that one program reads: always the same ones, whatever else is in the batch."""


def stages_of(dtype: torch.dtype) -> int:
    """Tiles of keys and values, of a type, that are on their way at a time: as shared memory has room for."""
    return 1 if dtype == torch.float32 else 3


@triton.jit(do_not_specialize=["num_slots", "max_places", "num_splits"])
def _attend_kernel(
    Q,
    Rows,
    SlotKeys,
    SlotValues,
    HostKeys,
    HostValues,
    Places,
    LastTokens,
    Parts,
    PartLogSums,
    Arrivals,
    Outputs,
    scale,
    num_slots,
    max_places,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    query = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + query
    is_query = query < GROUP
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = tl.arange(0, BLOCK_V)
    head_row = row * KV_HEADS * GROUP + head
    token_row = tl.load(Rows + row) * KV_HEADS * GROUP + head
    q = tl.load(
        Q + token_row[:, None] * KEY_DIM + key_dim[None, :],
        mask=is_query[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    last_tokens = tl.load(LastTokens + row)

    TILE: tl.constexpr = PAGES * PAGE_TILE
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    outputs = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, max_places), PAGES):
        column = first + tl.arange(0, PAGES)
        place = tl.load(Places + row * max_places + column, mask=column < max_places, other=-1)
        # The page that is being filled stands first.
        tokens = tl.where(column == 0, last_tokens, PAGE_SIZE)
        for start in range(0, PAGE_SIZE, PAGE_TILE):
            in_page = start + tl.arange(0, PAGE_TILE)
            exists = (place >= 0)[:, None] & (in_page[None, :] < tokens[:, None])
            exists = tl.reshape(exists, (TILE,))
            in_slot = exists & tl.reshape((place < num_slots)[:, None] & (in_page >= 0)[None, :], (TILE,))
            on_host = exists & tl.reshape((place >= num_slots)[:, None] & (in_page >= 0)[None, :], (TILE,))
            token = tl.reshape(place[:, None] * PAGE_SIZE + in_page[None, :], (TILE,)) * KV_HEADS + kv_head
            behind = token - num_slots.to(tl.int64) * PAGE_SIZE * KV_HEADS
            is_key, is_value = (key_dim < KEY_DIM)[:, None], (value_dim < VALUE_DIM)[None, :]
            keys = tl.load(
                SlotKeys + token[None, :] * KEY_DIM + key_dim[:, None],
                mask=in_slot[None, :] & is_key,
                other=0.0,
            ) + tl.load(
                HostKeys + behind[None, :] * KEY_DIM + key_dim[:, None],
                mask=on_host[None, :] & is_key,
                other=0.0,
            )
            logits = tl.dot(q, keys.to(DOT_DTYPE), input_precision="ieee") * scale
            logits = tl.where(exists[None, :], logits, float("-inf"))
            top = tl.maximum(largest, tl.max(logits, axis=1))
            anchor = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.exp(logits - anchor[:, None])
            before = tl.exp(largest - anchor)
            values = tl.load(
                SlotValues + token[:, None] * VALUE_DIM + value_dim[None, :],
                mask=in_slot[:, None] & is_value,
                other=0.0,
            ) + tl.load(
                HostValues + behind[:, None] * VALUE_DIM + value_dim[None, :],
                mask=on_host[:, None] & is_value,
                other=0.0,
            )
            sums = sums * before + tl.sum(weights, axis=1)
            added = tl.dot(weights.to(DOT_DTYPE), values.to(DOT_DTYPE), input_precision="ieee")
            outputs = outputs * before[:, None] + added
            largest = top

    is_output = is_query[:, None] & (value_dim < VALUE_DIM)[None, :]
    output = outputs / tl.where(sums == 0.0, 1.0, sums)[:, None]
    if num_splits > 1:
        part = head_row * num_splits
        tl.store(Parts + (part + split)[:, None] * VALUE_DIM + value_dim[None, :], output, mask=is_output)
        tl.store(PartLogSums + part + split, largest + tl.log(sums), mask=is_query)
        # All of this program's threads have stored when one of them says so to the others.
        tl.debug_barrier()
        arrived = tl.atomic_add(Arrivals + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
        if arrived < num_splits - 1:
            return
        tl.store(Arrivals + row * KV_HEADS + kv_head, 0)  # for the next launch
        # The last to arrive merges, one part after the other: the same sums, however many parts the longest
        # row of the batch has. Not through the first level cache, which may hold what was there before.
        largest = tl.load(PartLogSums + part, mask=is_query, other=0.0, cache_modifier=".cg")
        at = part[:, None] * VALUE_DIM + value_dim[None, :]
        output = tl.load(Parts + at, mask=is_output, other=0.0, cache_modifier=".cg")
        total = largest * 0.0 + 1.0
        for each in range(1, num_splits):
            log_sum = tl.load(
                PartLogSums + part + each, mask=is_query, other=float("-inf"), cache_modifier=".cg"
            )
            of_part = tl.load(Parts + at + each * VALUE_DIM, mask=is_output, other=0.0, cache_modifier=".cg")
            top = tl.maximum(largest, log_sum)
            before, now = tl.exp(largest - top), tl.exp(log_sum - top)
            output = output * before[:, None] + of_part * now[:, None]
            total = total * before + now
            largest = top
        output = output / total[:, None]
    tl.store(Outputs + token_row[:, None] * VALUE_DIM + value_dim[None, :], output, mask=is_output)


def attend_places(
    queries: torch.Tensor,
    rows: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    last_tokens: torch.Tensor,
    scale: float,
    arrivals: torch.Tensor,
    outputs: torch.Tensor,
) -> None:
    """Attention of one query token a row to the row's pages.

    Asynchronous: no shape depends on what a tensor holds. A row's result depends on its own pages only.

    Args:
        queries: [tokens, heads, head dimension].
        rows: which of the tokens, int64 [rows].
        slots: keys and values of a layer on the device, [slots, page size, KV heads, dimension] each.
        host: of all pages, likewise; pinned where the device is CUDA's.
        places: of the pages, int64 [rows, most pages]: a slot, or behind the slots, a page of the host; -1
            for none. The first of a row is read up to ``last_tokens``, the others whole.
        last_tokens: tokens of the first page that count, int64 [rows], at least one.
        scale: factor on the logits.
        arrivals: int32 [at least rows times KV heads], zeros, which are zeros again afterwards; of launches
            that may not overlap.
        outputs: results, [tokens, heads, value dimension] of any type, contiguous; only ``rows`` are written.
    """
    num_rows, (_, heads, key_dim) = len(rows), queries.shape
    num_slots, page_size, kv_heads, _ = slots[0].shape
    value_dim = slots[1].shape[-1]
    assert all(buffer.is_contiguous() for buffer in (queries, *slots, *host, places, outputs))
    assert len(arrivals) >= num_rows * kv_heads, (len(arrivals), num_rows, kv_heads)
    group = heads // kv_heads
    most = places.shape[1]
    num_splits = max(1, triton.cdiv(most, SPLIT_PAGES))
    real = {"dtype": torch.float32, "device": queries.device}
    parts = torch.empty(num_rows, heads, num_splits, value_dim, **real)
    part_log_sums = torch.empty(num_rows, heads, num_splits, **real)
    if not num_rows:
        return
    page_tile = min(TILE_TOKENS, triton.next_power_of_2(page_size))
    block_v = max(MIN_DOT_ROWS, triton.next_power_of_2(value_dim))
    _attend_kernel[(num_splits, kv_heads, num_rows)](
        queries,
        rows,
        *slots,
        *host,
        places,
        last_tokens,
        parts,
        part_log_sums,
        arrivals,
        outputs,
        scale,
        num_slots,
        most,
        num_splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        BLOCK_K=max(MIN_DOT_ROWS, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        PAGES=TILE_TOKENS // page_tile,
        PAGE_TILE=page_tile,
        SPLIT=SPLIT_PAGES,
        DOT_DTYPE=dot_dtype(slots[0].dtype),
        num_stages=stages_of(slots[0].dtype),
    )
