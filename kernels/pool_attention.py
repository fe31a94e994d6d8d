"""Attention of single queries to the tokens of a KV pool where they lie; compiled for CPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_importance_kernels.jit import njit

CHUNK_TOKENS = 512
"""Of a context that a thread takes at a time. A constant, so that sums do not depend on threads and batch."""
_BLOCK_TOKENS = 64  # whose keys, and then values, are read while the logits stay in the nearest cache
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@njit(
    "void(float32[:,:,:,::1], float32[:,:,::1], float32[:,:,::1], int64[::1], int64[:,::1], float32, "
    "float32[:,:,:,::1], float32[:,:,::1])",
    **_OPTIONS,
)
def _attend_chunks(
    queries: Floats,
    keys: Floats,
    values: Floats,
    locations: Ints,
    chunks: Ints,
    scale: float,
    outputs: Floats,
    log_sums: Floats,
) -> None:
    """Attention to parts of contexts, block by block (Milakov and Gimelshein, 2018).

    Args:
        queries: [rows, KV heads, queries of each, dimension].
        keys: [pool tokens, KV heads, at least the dimension].
        values: [pool tokens, KV heads, at least the value dimension].
        locations: of the contexts' tokens in the pool, one context after the other.
        chunks: [chunks, 3] of row, first of ``locations``, and the one behind its last.
        scale: factor on the logits.
        outputs: results, [chunks, KV heads, queries of each, value dimension].
        log_sums: results, [chunks, KV heads, queries of each].
    """
    kv_heads, group, dim = queries.shape[1:]
    value_dim = outputs.shape[3]
    weights = np.empty((group, _BLOCK_TOKENS), np.float32)
    largest = np.empty((kv_heads, group), np.float32)
    sums = np.empty((kv_heads, group), np.float32)
    for chunk in range(len(chunks)):
        row, first, stop = chunks[chunk]
        largest[:] = -np.inf
        sums[:] = 0
        outputs[chunk] = 0
        for start in range(first, stop, _BLOCK_TOKENS):
            tokens = min(_BLOCK_TOKENS, stop - start)
            for head in range(kv_heads):
                for token in range(tokens):
                    key = keys[locations[start + token], head]
                    for each in range(group):
                        query = queries[row, head, each]
                        logit = np.float32(0.0)
                        for number in range(dim):
                            logit += query[number] * key[number]
                        weights[each, token] = logit * scale
                for each in range(group):
                    before = largest[head, each]
                    top = before
                    for token in range(tokens):
                        top = max(top, weights[each, token])
                    if top > before:
                        factor = np.exp(before - top)
                        largest[head, each] = top
                        sums[head, each] *= factor
                        for number in range(value_dim):
                            outputs[chunk, head, each, number] *= factor
                    total = np.float32(0.0)
                    for token in range(tokens):
                        weight = np.exp(weights[each, token] - top)
                        weights[each, token] = weight
                        total += weight
                    sums[head, each] += total
                # Four at a time: the output is loaded and stored as often as values are read.
                by_four = tokens - tokens % 4
                for token in range(0, by_four, 4):
                    value0 = values[locations[start + token], head]
                    value1 = values[locations[start + token + 1], head]
                    value2 = values[locations[start + token + 2], head]
                    value3 = values[locations[start + token + 3], head]
                    for each in range(group):
                        output = outputs[chunk, head, each]
                        weight0, weight1 = weights[each, token], weights[each, token + 1]
                        weight2, weight3 = weights[each, token + 2], weights[each, token + 3]
                        for number in range(value_dim):
                            output[number] += (
                                weight0 * value0[number]
                                + weight1 * value1[number]
                                + weight2 * value2[number]
                                + weight3 * value3[number]
                            )
                for token in range(by_four, tokens):
                    value = values[locations[start + token], head]
                    for each in range(group):
                        output = outputs[chunk, head, each]
                        weight = weights[each, token]
                        for number in range(value_dim):
                            output[number] += weight * value[number]
        for head in range(kv_heads):
            for each in range(group):
                log_sums[chunk, head, each] = largest[head, each] + np.log(sums[head, each])
                for number in range(value_dim):
                    outputs[chunk, head, each, number] /= sums[head, each]


@njit(
    "void(int64[:,::1], float32[:,:,:,::1], float32[:,:,::1], float32[:,:,:,::1], float32[:,:,::1])",
    **_OPTIONS,
)
def _merge_chunks(
    chunks: Ints, outputs: Floats, log_sums: Floats, merged: Floats, merged_log_sums: Floats
) -> None:
    """Attention to whole contexts from that to their parts.

    Args:
        chunks: as in ``_attend_chunks``, a row's one after the other.
        outputs: of the chunks.
        log_sums: of the chunks.
        merged: results, [rows, KV heads, queries of each, value dimension].
        merged_log_sums: results, [rows, KV heads, queries of each].
    """
    merged[:] = 0
    merged_log_sums[:] = -np.inf
    kv_heads, group, value_dim = merged.shape[1:]
    for chunk in range(len(chunks)):
        row = chunks[chunk, 0]
        for head in range(kv_heads):
            for each in range(group):
                before, part = merged_log_sums[row, head, each], log_sums[chunk, head, each]
                top = max(before, part)
                total = top + np.log(np.exp(before - top) + np.exp(part - top))
                kept, added = np.exp(before - total), np.exp(part - total)
                merged_log_sums[row, head, each] = total
                for number in range(value_dim):
                    merged[row, head, each, number] = (
                        kept * merged[row, head, each, number] + added * outputs[chunk, head, each, number]
                    )


def can_attend_pool(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``attend_pool`` reads such buffers: float32, and a token's heads in a row."""
    return all(
        buffer.device.type == "cpu" and buffer.dtype == torch.float32 and _whole_rows(buffer) is not None
        for buffer in (keys, values)
    )


def attend_pool(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    locations: list[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query a row to the row's context. A row's result depends on its own context only.

    Takes as many threads as torch does.

    Args:
        queries: [rows, heads, dimension]; heads are a multiple of the KV heads.
        keys: [pool tokens, KV heads, dimension]; ``can_attend_pool``.
        values: [pool tokens, KV heads, value dimension]; they may be a part of the keys.
        locations: of each row's context in the pool, [tokens], at least one.
        scale: factor on the logits.

    Returns:
        Outputs [rows, heads, value dimension] and logs of the sums of exponentials [rows, heads], float32.
    """
    num_rows, heads, _ = queries.shape
    kv_heads, value_dim = values.shape[1:]
    group = heads // kv_heads
    chunks = []
    first = 0
    for row, of_row in enumerate(locations):
        stop = first + len(of_row)
        assert first < stop, "a row without a context"
        chunks += [(row, part, min(part + CHUNK_TOKENS, stop)) for part in range(first, stop, CHUNK_TOKENS)]
        first = stop
    key_rows, value_rows = _whole_rows(keys), _whole_rows(values)
    assert key_rows is not None
    assert value_rows is not None
    table = np.array(chunks, np.int64)
    inputs = (
        queries.float().view(num_rows, kv_heads, group, -1).contiguous().numpy(),
        key_rows.numpy(),
        value_rows.numpy(),
        torch.cat(locations).long().numpy(),
    )
    outputs = np.empty((len(chunks), kv_heads, group, value_dim), np.float32)
    log_sums = np.empty((len(chunks), kv_heads, group), np.float32)

    def attend(start: int, stop: int) -> None:
        part = slice(start, stop)
        _attend_chunks(*inputs, table[part], scale, outputs[part], log_sums[part])

    # What is less than a chunk takes less time than to wake a thread.
    num_threads = max(1, min(torch.get_num_threads(), first // CHUNK_TOKENS))
    bounds = [len(chunks) * thread // num_threads for thread in range(num_threads + 1)]
    others = [_helpers().submit(attend, *bounds[thread : thread + 2]) for thread in range(1, num_threads)]
    attend(*bounds[:2])
    for other in others:
        other.result()
    merged = torch.empty(num_rows, kv_heads, group, value_dim)
    merged_log_sums = torch.empty(num_rows, kv_heads, group)
    _merge_chunks(table, outputs, log_sums, merged.numpy(), merged_log_sums.numpy())
    return merged.flatten(1, 2), merged_log_sums.flatten(1, 2)


def _whole_rows(buffer: torch.Tensor) -> torch.Tensor | None:
    """A buffer [tokens, KV heads, dimension] as one without gaps, its rows widened to what lies between them.

    Latents hold a token's value in its key: rows of the values are as far apart as those of the keys.
    """
    if buffer.is_contiguous():
        return buffer
    tokens, kv_heads, _ = buffer.shape
    width = buffer.stride(0)
    if kv_heads > 1 or buffer.stride(2) != 1 or buffer.storage_offset() > 0:
        return None
    if tokens * width * buffer.element_size() > buffer.untyped_storage().nbytes():
        return None
    return buffer.as_strided((tokens, 1, width), (width, width, 1))


@cache
def _helpers() -> ThreadPoolExecutor:
    """Threads beside the one that calls, as many as torch has; idle ones cost nothing but their stacks."""
    return ThreadPoolExecutor(torch.get_num_threads() - 1, thread_name_prefix="attention")
