"""From the logits and log-sums that decode attention leaves behind to mass, body mass and peak of pages.

One launch reads the logits of all sampled layers once; a second one, which reads one number per page, divides
the body by its sum. The same step gives the same bits of everything that is folded; only the mass, a check,
is added up by atomics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.page_rows import EMPTY_BODY, PageRows

TILE_TOKENS = 128
"""Tokens per tile; 128 tokens of a group of 4 heads in half precision are 1 KiB of consecutive logits."""
BODY_BLOCK = 1024  # Pages of a program that divides.
LOGIT_DTYPES = (torch.float16, torch.float32)


class DecodeLogits:
    """Static buffers of one emitting decode step: logits and log-sums of the sampled layers.

    ``logits[layer, kv_head, i, g]`` is the scaled, capped logit of query head ``kv_head * group + g`` at
    entry i of the flat list of the observed requests' tokens: heads of a group lie side by side, as decode
    attention computes them together. bfloat16 is not offered, it moves a page's mass by 1.6e-2.

    Args:
        num_layers: sampled layers.
        num_kv_heads, group: KV heads of this rank and query heads per KV head.
        max_tokens: entries of the flat list, over all observed requests of a step.
        max_requests: requests of a batch, padding included.
        max_observed: requests of a batch that a step observes; all where None.
        max_pages: pages of the longest sequence.
        dtype: float16, or float32 where its error bound is not enough.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        group: int,
        max_tokens: int,
        max_requests: int,
        max_observed: int | None = None,
        max_pages: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str,
    ) -> None:
        assert dtype in LOGIT_DTYPES, dtype
        self.logits = torch.empty((num_layers, num_kv_heads, max_tokens, group), dtype=dtype, device=device)
        float32 = {"dtype": torch.float32, "device": device}
        self.log_sums = torch.empty((num_layers, max_requests, num_kv_heads * group), **float32)
        self.body = torch.empty((max_observed or max_requests, max_pages), **float32)
        self.body_totals = torch.empty_like(self.body)

    @property
    def num_bytes(self) -> int:
        tensors = (self.logits, self.log_sums, self.body, self.body_totals)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class ObservedLogits:
    """The observed requests of a step, as index tensors on the device, int32 [num_requests] each.

    Attributes:
        starts: where each request's tokens begin in the flat list.
        seq_lens: tokens of each sequence.
        batch_rows: row of the batch, which is that of the log-sums, of each request.
        slots: row of the score rows that each adds to, no two the same; -1 is padding.
    """

    starts: torch.Tensor
    seq_lens: torch.Tensor
    batch_rows: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        tensors = (self.starts, self.seq_lens, self.batch_rows, self.slots)
        assert len({tuple(tensor.shape) for tensor in tensors}) == 1, [tensor.shape for tensor in tensors]
        assert all(tensor.dtype == torch.int32 for tensor in tensors)


# What differs between batches and servers must not be compiled in: no step waits for a compiler.
_SIZES = ("row_stride", "body_stride")


@triton.jit(do_not_specialize=("max_tokens", "log_sums_layer_stride", "sink_tokens", "local_tokens", *_SIZES))
def _logit_rows_kernel(
    Logits,
    LogSums,
    Starts,
    SeqLens,
    BatchRows,
    Slots,
    Gate,
    PeakRows,
    MassRows,
    Body,
    BodyTotals,
    max_tokens,
    log_sums_layer_stride,
    row_stride,
    body_stride,
    sink_tokens,
    local_tokens,
    log_sums_scale,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TILE: tl.constexpr,
):
    request = tl.program_id(1)
    if tl.load(Gate) == 0:
        return
    slot = tl.load(Slots + request).to(tl.int64)
    first = tl.load(Starts + request).to(tl.int64)
    seq_len = tl.load(SeqLens + request)
    batch_row = tl.load(BatchRows + request)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    if (slot < 0) | (tl.program_id(0) * PAGES >= num_pages):
        return
    body_end = seq_len - local_tokens
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    g = tl.arange(0, BLOCK_G)

    mass = tl.zeros((PAGES,), tl.float32)
    body = tl.zeros((PAGES,), tl.float32)
    peak = tl.zeros((PAGES,), tl.float32)
    for layer in range(NUM_LAYERS):
        for kv_head in range(NUM_KV_HEADS):
            # The group as a factor tells the compiler how far loads are aligned, which strides would not.
            earlier_heads = tl.cast(layer * NUM_KV_HEADS + kv_head, tl.int64)
            of_head = Logits + (earlier_heads * max_tokens + first) * GROUP
            head = batch_row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + g
            log_sum = tl.load(LogSums + layer * log_sums_layer_stride + head, mask=g < GROUP, other=0.0)
            log_sum = log_sum * log_sums_scale
            on_page = tl.zeros((PAGES, BLOCK_G), tl.float32)
            for start in range(0, PAGE_SIZE, PAGE_TILE):
                in_page = start + tl.arange(0, PAGE_TILE)
                token = page[:, None] * PAGE_SIZE + in_page[None, :]
                exists = (in_page < PAGE_SIZE)[None, :] & (token < seq_len)
                logits = tl.load(
                    of_head + token[:, :, None] * GROUP + g[None, None, :],
                    mask=exists[:, :, None] & (g < GROUP)[None, None, :],
                    other=float("-inf"),
                ).to(tl.float32)
                probability = tl.exp(logits - log_sum[None, None, :])
                on_page += tl.sum(probability, axis=1)
                in_body = (token >= sink_tokens) & (token < body_end)
                body += tl.sum(tl.where(in_body, tl.sum(probability, axis=2), 0.0), axis=1)
            mass += tl.sum(on_page, axis=1)
            peak = tl.maximum(peak, tl.max(on_page, axis=1))

    peak = tl.minimum(peak, 1.0)  # Rounded logits may add up to more.
    samples: tl.constexpr = NUM_LAYERS * NUM_KV_HEADS * GROUP
    mask = page < num_pages
    out = PeakRows + slot * row_stride + page
    tl.store(out, tl.maximum(tl.load(out, mask=mask, other=0.0), peak), mask=mask)
    tl.atomic_add(MassRows + slot, tl.sum(mass, axis=0) / samples)
    tl.store(Body + request * body_stride + page, body / samples, mask=mask)
    tl.store(BodyTotals + request * body_stride + tl.program_id(0), tl.sum(body, axis=0) / samples)


@triton.jit(do_not_specialize=_SIZES)
def _body_rows_kernel(
    SeqLens,
    Slots,
    Gate,
    BodyRows,
    Body,
    BodyTotals,
    row_stride,
    body_stride,
    empty_body,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(1)
    if tl.load(Gate) == 0:
        return
    slot = tl.load(Slots + request).to(tl.int64)
    seq_len = tl.load(SeqLens + request)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    if (slot < 0) | (tl.program_id(0) * BLOCK >= num_pages):
        return
    num_totals = tl.cdiv(num_pages, PAGES)
    total = tl.zeros((1,), tl.float32)
    for start in range(0, num_totals, BLOCK):
        i = start + tl.arange(0, BLOCK)
        totals = tl.load(BodyTotals + request * body_stride + i, mask=i < num_totals, other=0.0)
        total += tl.sum(totals[None, :], axis=1)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (page < num_pages) & (total > empty_body)
    body = tl.load(Body + request * body_stride + page, mask=mask, other=0.0)
    out = BodyRows + slot * row_stride + page
    tl.store(out, tl.load(out, mask=mask, other=0.0) + body / tl.where(mask, total, 1.0), mask=mask)


def reduce_logits(
    step: DecodeLogits,
    observed: ObservedLogits,
    rows: PageRows,
    *,
    gate: torch.Tensor,
    max_seq_len: int,
    page_size: int,
    sink_tokens: int,
    local_tokens: int,
    log_sums_in_base_2: bool,
) -> None:
    """Adds the scores of one decode step to the requests' rows; asynchronous, can be captured.

    Args:
        step: logits and log-sums of every sampled layer.
        observed: the requests whose logits the step holds.
        rows: what was accumulated so far, contiguous.
        gate: int32 [1] on the device; 0 makes the launches return at once.
        max_seq_len: upper bound of the sequences, on the host.
        log_sums_in_base_2: whether the log-sums are log2(sum(exp(logit))), as FlashInfer returns them.
    """
    num_layers, num_kv_heads, max_tokens, group = step.logits.shape
    num_requests = observed.slots.shape[0]
    max_pages = triton.cdiv(max_seq_len, page_size)
    assert num_requests <= step.body.shape[0], (num_requests, step.body.shape)
    room = min(step.body.shape[1], rows.body.shape[1])
    assert max_pages <= room, (max_pages, room)
    assert step.logits.is_contiguous(), step.logits.stride()
    page_tile = min(TILE_TOKENS, triton.next_power_of_2(page_size))
    pages = TILE_TOKENS // page_tile
    _logit_rows_kernel[(triton.cdiv(max_pages, pages), num_requests)](
        step.logits,
        step.log_sums,
        observed.starts,
        observed.seq_lens,
        observed.batch_rows,
        observed.slots,
        gate,
        rows.peak,
        rows.mass,
        step.body,
        step.body_totals,
        max_tokens,
        step.log_sums.stride(0),
        rows.peak.stride(0),
        step.body.stride(0),
        sink_tokens,
        local_tokens,
        math.log(2) if log_sums_in_base_2 else 1.0,
        NUM_LAYERS=num_layers,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        PAGE_SIZE=page_size,
        PAGES=pages,
        PAGE_TILE=page_tile,
    )
    _body_rows_kernel[(triton.cdiv(max_pages, BODY_BLOCK), num_requests)](
        observed.seq_lens,
        observed.slots,
        gate,
        rows.body,
        step.body,
        step.body_totals,
        rows.body.stride(0),
        step.body.stride(0),
        EMPTY_BODY,
        PAGE_SIZE=page_size,
        PAGES=pages,
        BLOCK=BODY_BLOCK,
    )
