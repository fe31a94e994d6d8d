"""A pass over the keys of one layer that leaves log-sums per page, beside any attention backend.

Attention itself is not touched: the probe reads the queries that the layer was called with and the keys
that lie in the paged cache after its call, decode or extend alike. A probed layer reads its K once more and
no V: half the bytes of a decode attention, at the sampled layers of the sampled steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.tiles import MIN_DOT_ROWS, add_log_sums, dot_dtype, log_sum, soft_capped

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
KEY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TILE_TOKENS = 128
"""Keys per tile: 8 pages of 16 tokens, whose log-sums fill one 32-byte sector per head."""
MAX_TILE_ROWS = 64
MAX_HEAD_DIM = 256
SCRATCH_BYTES = 8192
"""Shared memory of a program beside its tiles of queries and keys: for reductions and changes of layout."""
TARGET_PROGRAMS = 1024
"""Programs to aim for: a few per multiprocessor of the largest cards; more splits only add launch work."""


# What differs between batches and servers must not be compiled in: no step waits for a compiler.
@triton.jit(
    do_not_specialize=(
        "out_stride_query",
        "out_stride_head",
        "max_pages",
        "max_queries",
        "sink_tokens",
        "local_tokens",
        "query_blocks",
    ),
    do_not_specialize_on_alignment=("Locations", "LogSumsOut"),
)
def _qk_probe_kernel(
    Q,
    K,
    Locations,
    LocationStarts,
    SeqLens,
    FirstQueryRows,
    NumQueries,
    Gate,
    LogSumsOut,
    q_stride_row,
    q_stride_head,
    k_stride_row,
    k_stride_head,
    out_stride_query,
    out_stride_head,
    max_pages,
    max_queries,
    scale,
    sink_tokens,
    local_tokens,
    query_blocks,
    LOGIT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // query_blocks
    query_block = tl.program_id(1) % query_blocks
    request = tl.program_id(2)
    if tl.load(Gate) == 0:
        return
    num_queries = tl.load(NumQueries + request)
    # A tile row is a (query token, query head of the group) pair.
    row = query_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_query = query < num_queries
    if query_block * BLOCK_M >= num_queries * GROUP:
        return

    seq_len = tl.load(SeqLens + request)
    position = seq_len - num_queries + query
    body_end = tl.maximum(position + 1 - local_tokens, 0)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)

    dim = tl.arange(0, BLOCK_D)
    q_row = (tl.load(FirstQueryRows + request) + query).to(tl.int64)
    q = tl.load(
        Q + q_row[:, None] * q_stride_row + head[:, None] * q_stride_head + dim[None, :],
        mask=is_query[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    locations = Locations + tl.load(LocationStarts + request)
    out_row = (request * max_queries + query).to(tl.int64) * out_stride_query + head * out_stride_head
    out = LogSumsOut + out_row

    TILE: tl.constexpr = PAGES * PAGE_TILE
    num_blocks = tl.cdiv(num_pages, PAGES)
    per_split = tl.cdiv(num_blocks, tl.num_programs(0))
    # The body begins in one page and ends, for the query tokens at hand, in a few.
    sink_page = sink_tokens // PAGE_SIZE
    first_end_page = tl.maximum(seq_len - num_queries + 1 - local_tokens, 0) // PAGE_SIZE
    last_end_page = tl.maximum(seq_len - local_tokens, 0) // PAGE_SIZE
    for block in range(split * per_split, tl.minimum((split + 1) * per_split, num_blocks)):
        page = block * PAGES + tl.arange(0, PAGES)
        has_border = (block == sink_page // PAGES) | (
            (block >= first_end_page // PAGES) & (block <= last_end_page // PAGES)
        )
        log_sums = tl.full((BLOCK_M, PAGES), float("-inf"), tl.float32)
        body_log_sums = tl.full((BLOCK_M, PAGES), float("-inf"), tl.float32)
        for start in range(0, PAGE_SIZE, PAGE_TILE):
            in_page = start + tl.arange(0, PAGE_TILE)
            token = tl.reshape(page[:, None] * PAGE_SIZE + in_page[None, :], (TILE,))
            exists = tl.reshape((page[:, None] >= 0) & (in_page[None, :] < PAGE_SIZE), (TILE,)) & (
                token < seq_len
            )
            location = tl.load(locations + token, mask=exists, other=0).to(tl.int64)
            k = tl.load(
                K + location[None, :] * k_stride_row + kv_head * k_stride_head + dim[:, None],
                mask=exists[None, :] & (dim < HEAD_DIM)[:, None],
                other=0.0,
            )
            logits = tl.dot(q, k.to(DOT_DTYPE), input_precision="ieee") * scale
            if LOGIT_CAP > 0:
                logits = soft_capped(logits, LOGIT_CAP)
            visible = exists[None, :] & (token[None, :] <= position[:, None])
            logits = tl.where(visible, logits, float("-inf"))
            paged = tl.reshape(logits, (BLOCK_M, PAGES, PAGE_TILE))
            log_sums = add_log_sums(log_sums, log_sum(paged, 2))
            if has_border:
                in_body = (token[None, :] >= sink_tokens) & (token[None, :] < body_end[:, None])
                paged = tl.reshape(tl.where(in_body, logits, float("-inf")), (BLOCK_M, PAGES, PAGE_TILE))
                body_log_sums = add_log_sums(body_log_sums, log_sum(paged, 2))

        writes = is_query[:, None] & (page < num_pages)[None, :]
        tl.store(out[:, None] + page[None, :], log_sums, mask=writes)
        if has_border:
            at_sink = (page == sink_page)[None, :]
            at_query = page[None, :] == (body_end // PAGE_SIZE)[:, None]
            borders = out[:, None] + max_pages + (page * 0)[None, :]
            tl.store(borders, body_log_sums, mask=writes & at_sink)
            tl.store(borders + 1, body_log_sums, mask=writes & at_query)


def refusal(
    *,
    key_dtype: torch.dtype,
    query_dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    num_heads: int,
    num_kv_heads: int,
) -> str | None:
    """The reason why the probe cannot score such a layer, to end a sentence with; None where it can.

    ``value_head_dim`` tells multi-head latent attention, whose queries meet a compressed key that is also the
    value: there the query that a backend sees may or may not be absorbed, so a score would be a guess.
    """
    if head_dim != value_head_dim:
        return f"keys of {head_dim} and values of {value_head_dim} dimensions (latent attention)"
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} dimensions, more than {MAX_HEAD_DIM}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} KV heads"
    if key_dtype not in KEY_DTYPES:
        return f"keys in {key_dtype}"
    if query_dtype not in QUERY_DTYPES:
        return f"queries in {query_dtype}"
    return None


def tile_rows(rows: int, head_dim: int, itemsize: int, page_size: int, shared_memory: int) -> int:
    """Rows of a tile of queries: a power of two, no more than are needed, and as the GPU's memory allows.

    Args:
        rows: query tokens of a request times query heads of a group.
        itemsize: of the type that queries and keys are multiplied in, in bytes.
        shared_memory: bytes that one program can have; 101,376 of Ada and consumer Blackwell are the least.

    Returns:
        0 where not even the smallest tile fits.
    """
    pages, page_tile = tile_of(page_size)
    of_token = max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim)) * itemsize
    tile = min(MAX_TILE_ROWS, max(MIN_DOT_ROWS, triton.next_power_of_2(rows)))
    while tile >= MIN_DOT_ROWS and (pages * page_tile + tile) * of_token + SCRATCH_BYTES > shared_memory:
        tile //= 2
    return tile if tile >= MIN_DOT_ROWS else 0


def shared_memory(device: torch.device | str) -> int:
    """Bytes that one program can have; plenty where nothing but the interpreter runs."""
    if torch.device(device).type != "cuda":
        return 1 << 20
    facts = torch.cuda.get_device_properties(device)
    return int(getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block))


def _product_dtype(query_dtype: torch.dtype, key_dtype: torch.dtype) -> tl.dtype:
    """The narrowest type that holds queries and keys without rounding."""
    wide = query_dtype if key_dtype in FLOAT8 else torch.promote_types(query_dtype, key_dtype)
    return dot_dtype(wide)


def tile_of(page_size: int) -> tuple[int, int]:
    """Pages of a tile, and tokens that it takes of each page at a time.

    A page of more tokens than a tile is gone through in several, of half the size: the sums that are carried
    from one to the next need registers, and whole tiles spilled them.
    """
    if page_size > TILE_TOKENS // 2:
        return 1, TILE_TOKENS // 2
    page_tile = triton.next_power_of_2(page_size)
    return TILE_TOKENS // page_tile, page_tile


def probe_layer(
    q: torch.Tensor,
    k: torch.Tensor,
    queries: PagedQueries,
    log_sums: LogSums,
    layer: int,
    *,
    gate: torch.Tensor,
    scale: float,
    logit_cap: float = 0.0,
    page_size: int,
    sink_tokens: int,
    local_tokens: int,
) -> None:
    """Writes the page log-sums of one layer; asynchronous, allocates nothing, can be captured.

    Args:
        q: queries after positional encoding, [rows, num_heads, head_dim], last dimension contiguous.
        k: the key buffer of the layer, [locations, num_kv_heads, head_dim], last dimension contiguous, in a
            dtype of ``KEY_DTYPES``; of float8 keys, ``scale`` includes their own.
        layer: index among the sampled layers.
        gate: int32 [1] on the device; 0 makes the launch return at once.
        scale: factor on the dot product.
        logit_cap: soft cap of the scaled logits; 0 means none.
        page_size: tokens per page, any.
        sink_tokens: S, first tokens of the sequence outside the body.
        local_tokens: R, last tokens seen by a query token, itself included, outside the body.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    why = refusal(
        key_dtype=k.dtype,
        query_dtype=q.dtype,
        head_dim=head_dim,
        value_head_dim=k.shape[2],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    assert why is None, why
    assert q.stride(2) == 1, q.stride()
    assert k.stride(2) == 1, k.stride()
    assert num_heads == log_sums.num_heads, (num_heads, log_sums.num_heads)
    assert queries.num_requests <= log_sums.max_requests, (queries.num_requests, log_sums.max_requests)
    assert queries.max_queries <= log_sums.max_queries, (queries.max_queries, log_sums.max_queries)
    assert -(-queries.max_seq_len // page_size) <= log_sums.max_pages, (queries.max_seq_len, page_size)
    group = num_heads // num_kv_heads
    rows = queries.max_queries * group
    product_dtype = _product_dtype(q.dtype, k.dtype)
    itemsize = product_dtype.primitive_bitwidth // 8
    block_m = tile_rows(rows, head_dim, itemsize, page_size, shared_memory(k.device))
    assert block_m, (head_dim, product_dtype, page_size)
    query_blocks = triton.cdiv(rows, block_m)
    pages, page_tile = tile_of(page_size)
    blocks = triton.cdiv(triton.cdiv(queries.max_seq_len, page_size), pages)
    others = num_kv_heads * query_blocks * queries.num_requests
    splits = max(1, min(blocks, TARGET_PROGRAMS // max(1, others)))
    values = log_sums.values[layer]
    _qk_probe_kernel[(splits, num_kv_heads * query_blocks, queries.num_requests)](
        q,
        k,
        queries.locations,
        queries.location_starts,
        queries.seq_lens,
        queries.first_query_rows,
        queries.num_queries,
        gate,
        values,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        values.stride(0),
        values.stride(1),
        log_sums.max_pages,
        log_sums.max_queries,
        scale,
        sink_tokens,
        local_tokens,
        query_blocks,
        LOGIT_CAP=logit_cap,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim)),
        BLOCK_M=block_m,
        PAGE_SIZE=page_size,
        PAGES=pages,
        PAGE_TILE=page_tile,
        DOT_DTYPE=product_dtype,
    )
