"""A ``score_mod`` of SGLang's Triton decode attention that leaves page log-sums in its aux tensor.

Upstream calls a score_mod on every tile of logits, after scale and soft cap, before masking. Tiles and splits
begin at multiples of 32 tokens, so a page of up to 32 tokens lies within one tile and its log-sum is taken in
registers: 4 bytes per page and head are written instead of 4 per token and head. The logits are handed back
as they came, so the attention's output is upstream's, bit for bit.

The aux tensor is ``DecodeLogSums.aux(layer)``. Requests that the step does not observe pay one load and
branch per tile, which also is what lets one CUDA graph serve steps that emit and steps that do not.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl

from sgl_importance_kernels.triton.tiles import log_sum


@triton.jit
def _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, PAGE_SIZE: tl.constexpr):
    row = tl.load(Aux0 + 2 + q_idx).to(tl.int64)
    if row > 0:  # Uniform over the program: what other requests and steps pay.
        _emit_tile(qk, q_pos, kv_pos, head, mask, Aux0, row * stride_t, stride_h, aux_len, PAGE_SIZE)
    return qk


@triton.jit
def _emit_tile(qk, q_pos, kv_pos, head, mask, Aux0, row, stride_h, aux_len, PAGE_SIZE: tl.constexpr):
    sink_tokens = tl.load(Aux0).to(tl.int32)
    local_tokens = tl.load(Aux0 + 1).to(tl.int32)
    if len(qk.shape) == 1:  # One query head per KV head.
        logits = qk[None, :]
        token = kv_pos[None, :]
        visible = mask[None, :]
    else:
        logits = qk
        token = kv_pos
        visible = mask
    HEADS: tl.constexpr = logits.shape[0]
    TILE: tl.constexpr = logits.shape[1]
    tl.static_assert(TILE % PAGE_SIZE == 0, "a tile holds whole pages")
    PAGES: tl.constexpr = TILE // PAGE_SIZE

    logits = tl.where(visible, logits, float("-inf"))
    log_sums = log_sum(tl.reshape(logits, (HEADS, PAGES, PAGE_SIZE)), 2)
    page = tl.min(tl.reshape(token, (1, PAGES, PAGE_SIZE)), axis=2) // PAGE_SIZE
    out = Aux0 + row + head * stride_h
    writes = log_sums > float("-inf")
    tl.store(out + page, log_sums, mask=writes)

    body_end = tl.maximum(q_pos + 1 - local_tokens, 0)
    in_body = (token >= sink_tokens) & (token < body_end)
    body = log_sum(tl.reshape(tl.where(in_body, logits, float("-inf")), (HEADS, PAGES, PAGE_SIZE)), 2)
    borders = out + aux_len - 2 + page * 0
    tl.store(borders, body, mask=writes & (page == sink_tokens // PAGE_SIZE))
    tl.store(borders + 1, body, mask=writes & (page == body_end // PAGE_SIZE))


# A score_mod takes no parameter of its own, and the page size must be known when it is compiled.
@triton.jit
def _pages_of_1(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 1)


@triton.jit
def _pages_of_2(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 2)


@triton.jit
def _pages_of_4(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 4)


@triton.jit
def _pages_of_8(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 8)


@triton.jit
def _pages_of_16(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 16)


@triton.jit
def _pages_of_32(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len):
    return _emit(qk, q_pos, kv_pos, q_idx, head, mask, Aux0, stride_t, stride_h, aux_len, 32)


SCORE_MODS: MappingProxyType[int, Any] = MappingProxyType(
    {
        1: _pages_of_1,
        2: _pages_of_2,
        4: _pages_of_4,
        8: _pages_of_8,
        16: _pages_of_16,
        32: _pages_of_32,
    }
)
"""By page size in tokens; other page sizes do not fit upstream's tiles."""
