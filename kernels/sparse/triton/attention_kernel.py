"""Attention of single queries to pages where they lie, in slots or on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.triton.tiles import MIN_DOT_ROWS, dot_dtype

TILE_TOKENS = 32
"""Tokens that are multiplied at a time: with 64, compiled for a GPU, numbers do not fit the registers."""
SPLIT_PAGES = 32
"""Pages of a row that one program reads: always the same ones, whatever else is in the batch."""


@triton.jit(do_not_specialize=["num_slots", "max_places", "num_splits"])
def _attend_kernel(
    Q,
    SlotKeys,
    SlotValues,
    HostKeys,
    HostValues,
    Places,
    LastTokens,
    Outputs,
    LogSums,
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
    q_row = row * KV_HEADS * GROUP + head
    q = tl.load(
        Q + q_row[:, None] * KEY_DIM + key_dim[None, :],
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

    part = q_row * num_splits + split
    tl.store(
        Outputs + part[:, None] * VALUE_DIM + value_dim[None, :],
        outputs / tl.where(sums == 0.0, 1.0, sums)[:, None],
        mask=is_query[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    tl.store(LogSums + part, largest + tl.log(sums), mask=is_query)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    Parts, PartLogSums, Outputs, LogSums, num_splits, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    value_dim = tl.arange(0, BLOCK_V)
    is_value = value_dim < VALUE_DIM
    largest = tl.load(PartLogSums + row * num_splits)
    output = tl.load(Parts + row * num_splits * VALUE_DIM + value_dim, mask=is_value, other=0.0)
    total = largest * 0.0 + 1.0
    # One after the other: the same sums for a row, however many parts the longest row of the batch has.
    for split in range(1, num_splits):
        log_sum = tl.load(PartLogSums + row * num_splits + split)
        part = tl.load(Parts + (row * num_splits + split) * VALUE_DIM + value_dim, mask=is_value, other=0.0)
        top = tl.maximum(largest, log_sum)
        before, now = tl.exp(largest - top), tl.exp(log_sum - top)
        output = output * before + part * now
        total = total * before + now
        largest = top
    tl.store(Outputs + row * VALUE_DIM + value_dim, output / total, mask=is_value)
    tl.store(LogSums + row, largest + tl.log(total))


def attend_places(
    queries: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    last_tokens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a row to the row's pages.

    Asynchronous: no shape depends on what a tensor holds. A row's result depends on its own pages only.

    Args:
        queries: [rows, heads, head dimension].
        slots: keys and values of a layer on the device, [slots, page size, KV heads, dimension] each.
        host: of all pages, likewise; pinned where the device is CUDA's.
        places: of the pages, int64 [rows, most pages]: a slot, or behind the slots, a page of the host; -1
            for none. The first of a row is read up to ``last_tokens``, the others whole.
        last_tokens: tokens of the first page that count, int64 [rows], at least one.
        scale: factor on the logits.

    Returns:
        Outputs [rows, heads, value dimension] and logs of the sums of exponentials [rows, heads], float32.
    """
    num_rows, heads, key_dim = queries.shape
    num_slots, page_size, kv_heads, _ = slots[0].shape
    value_dim = slots[1].shape[-1]
    assert all(buffer.is_contiguous() for buffer in (queries, *slots, *host, places))
    group = heads // kv_heads
    most = places.shape[1]
    num_splits = max(1, triton.cdiv(most, SPLIT_PAGES))
    real = {"dtype": torch.float32, "device": queries.device}
    parts = torch.empty(num_rows, heads, num_splits, value_dim, **real)
    part_log_sums = torch.empty(num_rows, heads, num_splits, **real)
    outputs, log_sums = torch.empty(num_rows, heads, value_dim, **real), torch.empty(num_rows, heads, **real)
    if not num_rows:
        return outputs, log_sums
    page_tile = min(TILE_TOKENS, triton.next_power_of_2(page_size))
    block_v = max(MIN_DOT_ROWS, triton.next_power_of_2(value_dim))
    _attend_kernel[(num_splits, kv_heads, num_rows)](
        queries,
        *slots,
        *host,
        places,
        last_tokens,
        parts,
        part_log_sums,
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
    )
    _merge_kernel[(num_rows * heads,)](
        parts, part_log_sums, outputs, log_sums, num_splits, VALUE_DIM=value_dim, BLOCK_V=block_v
    )
    return outputs, log_sums
