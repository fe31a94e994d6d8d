"""From page log-sums of all sampled layers to mass, body mass and peak, added to the requests' rows.

Two launches per emitting step, three where a request has several query tokens: each of them then has programs
of its own, and what these leave is added up behind them. The sums of a page are added by one program in a
fixed order, so that the same step gives the same bits of all that is folded; only the mass, a check, is added
up by atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.page_rows import EMPTY_BODY, PageRows
from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.tiles import add_log_sums, body_log_sums, log_sum

TOTALS_BLOCK = 1024
ROWS_BLOCK = 128
HEADS_BLOCK = 16


# What differs between batches and servers must not be compiled in: no step waits for a compiler.
_SIZES = (
    "layer_stride",
    "query_stride",
    "head_stride",
    "max_pages",
    "max_queries",
    "sink_tokens",
    "local_tokens",
    "num_queries_total",
)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=("LogSumsIn",))
def _totals_kernel(
    LogSumsIn,
    Totals,
    SeqLens,
    NumQueries,
    Gate,
    layer_stride,
    query_stride,
    head_stride,
    max_pages,
    max_queries,
    sink_tokens,
    local_tokens,
    num_queries_total,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-sums of one head over all pages and over the body."""
    # Of a grid's axes only the first passes 65535, which requests times queries may.
    request = tl.program_id(0) // max_queries
    query = tl.program_id(0) % max_queries
    head = tl.program_id(1) % NUM_HEADS
    layer = (tl.program_id(1) // NUM_HEADS).to(tl.int64)
    if tl.load(Gate) == 0:
        return
    num_queries = tl.load(NumQueries + request)
    if query >= num_queries:
        return
    visible = tl.load(SeqLens + request) - num_queries + query + 1
    body_end = tl.maximum(visible - local_tokens, 0)
    query_row = (request * max_queries + query).to(tl.int64)
    row = LogSumsIn + layer * layer_stride + query_row * query_stride + head * head_stride

    everything = tl.full((1,), float("-inf"), tl.float32)
    body = tl.full((1,), float("-inf"), tl.float32)
    num_pages = tl.cdiv(visible, PAGE_SIZE)
    for start in range(0, num_pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        log_sums = tl.load(row + page, mask=page < num_pages, other=float("-inf"))
        of_body = body_log_sums(page, log_sums, row + max_pages, sink_tokens, body_end, PAGE_SIZE)
        everything = add_log_sums(everything, log_sum(log_sums[None, :], 1))
        body = add_log_sums(body, log_sum(of_body[None, :], 1))
    total = Totals + 2 * ((layer * num_queries_total + query_row) * NUM_HEADS + head)
    tl.store(total + tl.arange(0, 1), everything)
    tl.store(total + 1 + tl.arange(0, 1), body)


@triton.jit(
    do_not_specialize=(*_SIZES, "row_stride"),
    do_not_specialize_on_alignment=("LogSumsIn",),
)
def _rows_kernel(
    LogSumsIn,
    Totals,
    SeqLens,
    NumQueries,
    Slots,
    Gate,
    BodyRows,
    PeakRows,
    MassRows,
    Partials,
    layer_stride,
    query_stride,
    head_stride,
    row_stride,
    max_pages,
    max_queries,
    sink_tokens,
    local_tokens,
    num_queries_total,
    empty_body,
    NUM_HEADS: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TO_PARTIALS: tl.constexpr,
):
    """Scores of one block of pages for one query token: added to its request's row where it is the only one,
    else left among the partials."""
    # Of a grid's axes only the first passes 65535, which requests times queries may.
    request = tl.program_id(0) // max_queries
    query = tl.program_id(0) % max_queries
    if tl.load(Gate) == 0:
        return
    num_queries = tl.load(NumQueries + request)
    if query >= num_queries:
        return
    seq_len = tl.load(SeqLens + request)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK >= num_pages:
        return
    samples: tl.constexpr = NUM_LAYERS * NUM_HEADS
    mass = tl.zeros((BLOCK,), tl.float32)
    peak = tl.zeros((BLOCK,), tl.float32)
    body = tl.zeros((BLOCK,), tl.float32)
    body_total = 0.0
    visible = seq_len - num_queries + query + 1
    body_end = tl.maximum(visible - local_tokens, 0)
    sees = page < tl.cdiv(visible, PAGE_SIZE)
    query_row = (request * max_queries + query).to(tl.int64)
    for layer in range(NUM_LAYERS):
        layer_totals = Totals + 2 * NUM_HEADS * (layer * num_queries_total + query_row)
        layer_row = LogSumsIn + tl.cast(layer, tl.int64) * layer_stride + query_row * query_stride
        for first_head in range(0, NUM_HEADS, HEADS):
            head = first_head + tl.arange(0, HEADS)
            is_head = head < NUM_HEADS
            total = layer_totals + 2 * head
            everything = tl.load(total, mask=is_head, other=0.0)
            of_body = tl.load(total + 1, mask=is_head, other=float("-inf"))
            body_total += tl.sum(tl.exp(of_body - everything), axis=0)
            row = layer_row + head * head_stride
            log_sums = tl.load(
                row[:, None] + page[None, :],
                mask=is_head[:, None] & sees[None, :],
                other=float("-inf"),
            )
            probability = tl.exp(log_sums - everything[:, None])
            mass += tl.sum(probability, axis=0)
            peak = tl.maximum(peak, tl.max(probability, axis=0))
            in_body = body_log_sums(
                page[None, :] + (head * 0)[:, None],
                log_sums,
                row[:, None] + max_pages,
                sink_tokens,
                # Rows of tiles beyond the heads hold no border.
                tl.where(is_head, body_end, 0)[:, None],
                PAGE_SIZE,
            )
            body += tl.sum(tl.exp(in_body - everything[:, None]), axis=0)
    # The mean over layers and heads cancels, but the threshold is on the mean.
    has_body = body_total / samples > empty_body
    body = tl.where(has_body, body / tl.where(has_body, body_total, 1.0), 0.0)

    slot = tl.load(Slots + request).to(tl.int64)
    mask = page < num_pages
    if TO_PARTIALS:
        out = Partials + 2 * query_row * max_pages + page
        tl.store(out, body, mask=mask)
        tl.store(out + max_pages, peak, mask=mask)
    else:
        out = BodyRows + slot * row_stride + page
        tl.store(out, tl.load(out, mask=mask, other=0.0) + body, mask=mask)
        out = PeakRows + slot * row_stride + page
        tl.store(out, tl.maximum(tl.load(out, mask=mask, other=0.0), peak), mask=mask)
    tl.atomic_add(MassRows + slot, tl.sum(mass, axis=0) / samples)


@triton.jit(do_not_specialize=("row_stride", "max_pages", "max_queries"))
def _partials_kernel(
    Partials,
    SeqLens,
    NumQueries,
    Slots,
    Gate,
    BodyRows,
    PeakRows,
    row_stride,
    max_pages,
    max_queries,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds what the query tokens of one request left of a block of pages, in their order, to its row."""
    request = tl.program_id(1)
    if tl.load(Gate) == 0:
        return
    num_queries = tl.load(NumQueries + request)
    num_pages = tl.cdiv(tl.load(SeqLens + request), PAGE_SIZE)
    if (num_queries == 0) | (tl.program_id(0) * BLOCK >= num_pages):
        return
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = page < num_pages
    body = tl.zeros((BLOCK,), tl.float32)
    peak = tl.zeros((BLOCK,), tl.float32)
    for query in range(num_queries):
        partial = Partials + 2 * (request * max_queries + query).to(tl.int64) * max_pages + page
        body += tl.load(partial, mask=mask, other=0.0)
        peak = tl.maximum(peak, tl.load(partial + max_pages, mask=mask, other=0.0))
    slot = tl.load(Slots + request).to(tl.int64)
    out = BodyRows + slot * row_stride + page
    tl.store(out, tl.load(out, mask=mask, other=0.0) + body, mask=mask)
    out = PeakRows + slot * row_stride + page
    tl.store(out, tl.maximum(tl.load(out, mask=mask, other=0.0), peak), mask=mask)


def reduce_log_sums(
    log_sums: LogSums,
    queries: PagedQueries,
    rows: PageRows,
    *,
    gate: torch.Tensor,
    page_size: int,
    sink_tokens: int,
    local_tokens: int,
) -> None:
    """Adds the scores of one step to the requests' rows; asynchronous, allocates nothing, can be captured.

    Args:
        log_sums: written for every sampled layer and all of ``queries``.
        rows: what was accumulated so far, contiguous.
        gate: int32 [1] on the device; 0 makes the launches return at once.
        page_size, sink_tokens, local_tokens: as they were for the log-sums.
    """
    max_pages = triton.cdiv(queries.max_seq_len, page_size)
    assert max_pages <= rows.body.shape[1], (max_pages, rows.body.shape)
    values, totals = log_sums.values, log_sums.totals
    max_queries = log_sums.max_queries
    shared = (sink_tokens, local_tokens, values.shape[1])
    _totals_kernel[(queries.num_requests * max_queries, log_sums.num_layers * log_sums.num_heads)](
        values,
        totals,
        queries.seq_lens,
        queries.num_queries,
        gate,
        *values.stride()[:3],
        log_sums.max_pages,
        max_queries,
        *shared,
        NUM_HEADS=log_sums.num_heads,
        PAGE_SIZE=page_size,
        BLOCK=TOTALS_BLOCK,
    )
    page_blocks = triton.cdiv(max_pages, ROWS_BLOCK)
    partials = log_sums.partials
    _rows_kernel[(queries.num_requests * max_queries, page_blocks)](
        values,
        totals,
        queries.seq_lens,
        queries.num_queries,
        queries.slots,
        gate,
        *rows,
        totals if partials is None else partials,
        *values.stride()[:3],
        rows.body.stride(0),
        log_sums.max_pages,
        max_queries,
        *shared,
        EMPTY_BODY,
        NUM_HEADS=log_sums.num_heads,
        NUM_LAYERS=log_sums.num_layers,
        PAGE_SIZE=page_size,
        BLOCK=ROWS_BLOCK,
        HEADS=HEADS_BLOCK,
        TO_PARTIALS=partials is not None,
    )
    if partials is not None:
        _partials_kernel[(page_blocks, queries.num_requests)](
            partials,
            queries.seq_lens,
            queries.num_queries,
            queries.slots,
            gate,
            rows.body,
            rows.peak,
            rows.body.stride(0),
            log_sums.max_pages,
            max_queries,
            PAGE_SIZE=page_size,
            BLOCK=ROWS_BLOCK,
        )
