"""Products of queries with keys that are kept as a mean and codes of a few bits, compiled for CPUs.

A product is a sum over the bits of a token, each worth its channel's step times a power of two times the
query. So what four bits are worth together is written into a table of 16 for each query, and a page costs
one look-up for each four bits of a token instead of a multiplication for each channel.

Look-ups are for 32 tokens together: one vector instruction makes 32 of them (PQ Fast Scan, André et al.,
2015). They are written as LLVM's own instructions, since numba knows no vectors. Any processor runs them;
those with a byte shuffle (SSSE3 and later) do so at the speed that this is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]  # it has no annotations
from numba import types
from numba.extending import intrinsic

from sgl_importance_kernels.jit import njit

CHUNK = 16
"""Tokens whose bytes lie together."""
TABLE_BYTES = 2 * 2 * CHUNK
"""Of the entries for a byte: for its lower four bits and its upper, their lower bytes and then the upper."""

_INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
_BYTES = ir.VectorType(ir.IntType(8), CHUNK)
_TWO = ir.VectorType(ir.IntType(8), 2 * CHUNK)
_SUMS = ir.VectorType(_INT16, CHUNK)

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = (
    "void(float32[:,:,:,::1], uint8[:,:,::1], float32[:,::1], int32[:,::1], int32[:,::1], float32[:,::1],"
    " int64[::1], int64, int64, float32[:,:,:,::1])"
)
_SPAN = 65535
"""Sums are counted in units that make the largest of them less than this above the least."""
_FACTORS = np.exp2(np.arange(256, dtype=np.uint8).view(np.int8) / 8).astype(np.float32)
"""Of pages, by the byte that says their logarithm."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Whole = npt.NDArray[np.int32]


def _shuffled(builder: Any, one: Any, other: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INT32, len(order)), order))


def _joined(builder: Any, one: Any, other: Any) -> Any:
    return _shuffled(builder, one, other, list(range(2 * CHUNK)))


def _looked_up(builder: Any, table: Any, nibbles: Any) -> Any:
    """Bytes of a table of 16 at 32 places: LLVM makes one instruction of each half, or of both."""
    halves = []
    for first in (0, CHUNK):
        found = ir.Constant(_BYTES, ir.Undefined)
        for lane in range(CHUNK):
            at = builder.zext(builder.extract_element(nibbles, _INT32(first + lane)), _INT32)
            found = builder.insert_element(found, builder.extract_element(table, at), _INT32(lane))
        halves.append(found)
    return _joined(builder, *halves)


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.icmp_signed(">", one, other), one, other)


@intrinsic
def largest_sums(
    typing_context: Any, one: Any, other: Any, stride: Any, count: Any, tables: Any, largest: Any
) -> Any:
    """Looks up and adds, for 16 tokens at each of two places, and keeps the largest. All arguments are uintp.

    Args:
        typing_context: numba's.
        one: address of the first byte of each of 16 tokens.
        other: of 16 others.
        stride: from a token's byte to its next.
        count: bytes of a token, at least one.
        tables: address of ``TABLE_BYTES`` for each byte.
        largest: address of results, int16 [2]: the largest sum of either 16; sums wrap around.
    """
    signature = types.void(*[types.uintp] * 6)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, other, stride, count, tables, largest = arguments

        def load(address: Any) -> Any:
            loaded = builder.load(builder.inttoptr(address, _BYTES.as_pointer()))
            loaded.align = 1
            return loaded

        before = builder.block
        loop, behind = (builder.append_basic_block(name) for name in ("bytes", "behind"))
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(_INT64)
        at.add_incoming(_INT64(0), before)
        totals = [builder.phi(_SUMS) for _ in range(2)]
        first = builder.mul(at, stride)
        codes = _joined(builder, load(builder.add(one, first)), load(builder.add(other, first)))
        added: list[Any] = list(totals)
        entries = builder.add(tables, builder.mul(at, _INT64(TABLE_BYTES)))
        for upper in range(2):
            bits = ir.Constant(_TWO, [4 if upper else 15] * (2 * CHUNK))
            nibbles = builder.lshr(codes, bits) if upper else builder.and_(codes, bits)
            low, high = (
                _looked_up(builder, load(builder.add(entries, _INT64((2 * upper + part) * CHUNK))), nibbles)
                for part in range(2)
            )
            for half in range(2):
                tokens = [place + half * 8 + token for place in (0, CHUNK) for token in range(8)]
                order = [lane for token in tokens for lane in (token, 2 * CHUNK + token)]
                numbers = builder.bitcast(_shuffled(builder, low, high, order), _SUMS)
                added[half] = builder.add(added[half], numbers)
        for total, more in zip(totals, added, strict=True):
            total.add_incoming(ir.Constant(_SUMS, [0] * CHUNK), before)
            total.add_incoming(more, loop)
        following = builder.add(at, _INT64(1))
        at.add_incoming(following, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, count), loop, behind)
        builder.position_at_end(behind)
        best = _larger(builder, *added)
        for distance in (4, 2, 1):
            partners = [at ^ distance for at in range(CHUNK)]
            best = _larger(builder, best, _shuffled(builder, best, best, partners))
        for which in range(2):
            address = builder.add(largest, _INT64(2 * which))
            of_one = builder.extract_element(best, _INT32(8 * which))
            builder.store(of_one, builder.inttoptr(address, _INT16.as_pointer()))
        return context.get_dummy_value()

    return signature, generate


@njit("float32(float32[::1], int32[::1], int32[::1], float32[::1], uint8[:,:,:,::1])", **_OPTIONS)
def _write_tables(query: Floats, widths: Whole, starts: Whole, steps: Floats, tables: Bytes) -> Any:
    """What bits are worth to a query, around the middle of the least sum and the largest.

    Args:
        query: [dimension].
        widths: bits of each channel, [dimension].
        starts: of these among the token's, [dimension].
        steps: of codes, [dimension].
        tables: results, uint8 [bytes of a token, its lower and upper four bits, an entry's lower and upper
            byte, 16].

    Returns:
        The unit of the entries.
    """
    span = np.float32(0.0)
    for channel in range(len(query)):
        span += abs(query[channel] * steps[channel]) * ((1 << widths[channel]) - 1)
    unit = max(span / (_SPAN - 8 * len(tables)), np.finfo(np.float32).tiny)
    worth = np.zeros(8 * len(tables), np.int32)
    for channel in range(len(query)):
        for bit in range(widths[channel]):
            of_bit = query[channel] * steps[channel] * (1 << bit)
            worth[starts[channel] + bit] = np.int32(np.rint(of_bit / unit))
    middle = worth.sum() >> 1
    totals = np.empty(16, np.int32)
    for byte in range(len(tables)):
        for upper in range(2):
            totals[0] = 0 if byte or upper else -middle
            for bit in range(4):
                for bits in range(1 << bit):
                    totals[bits + (1 << bit)] = totals[bits] + worth[8 * byte + 4 * upper + bit]
            for bits in range(16):
                tables[byte, upper, 0, bits] = totals[bits] & 255
                tables[byte, upper, 1, bits] = totals[bits] >> 8 & 255
    return unit


@njit(_SIGNATURE, **_OPTIONS)
def largest_of_codes(
    queries: Floats,
    kept: Bytes,
    units: Floats,
    widths: Whole,
    starts: Whole,
    steps: Floats,
    pages: npt.NDArray[np.int64],
    page_size: int,
    codes_at: int,
    logits: Floats,
) -> None:
    """The largest product of each query with the keys of each page.

    Args:
        queries: float32 [tokens, KV heads, queries of each, dimension].
        kept: of every page of the pool, [pool pages, KV heads, bytes]: the mean as int8, a header whose
            first byte is eight times the binary logarithm of the page's factor, then codes as ``BitTables``
            says.
        units: of the means, float32 [pool pages, KV heads].
        widths: bits of each channel, int32 [KV heads, dimension].
        starts: before how many of a token's bits they begin, int32 [KV heads, dimension].
        steps: of the codes, float32 [KV heads, dimension].
        pages: whose keys count, int64 [pages].
        page_size: tokens per page, a multiple of ``CHUNK``.
        codes_at: where codes begin among the bytes of a page, behind mean and header.
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    num_queries = num_tokens * group
    num_bytes = (kept.shape[2] - codes_at) // page_size
    tables = np.empty((num_queries, num_bytes, 2, 2, CHUNK), np.uint8)
    table_units = np.empty(num_queries, np.float32)
    of_chunk = np.zeros(2, np.int16)
    mean = np.empty(dim, np.float32)
    best = np.empty(2, np.int16)
    for head in range(num_heads):
        for row in range(num_queries):
            table_units[row] = _write_tables(
                queries[row // group, head, row % group],
                widths[head],
                starts[head],
                steps[head],
                tables[row],
            )
        codes = kept.ctypes.data + head * kept.strides[1] + codes_at
        for first in range(0, len(pages), 2):
            count = min(2, len(pages) - first)
            for row in range(num_queries):
                best[:] = 0 if num_bytes == 0 else -32768
                for chunk in range(page_size // CHUNK if num_bytes else 0):
                    one = codes + pages[first] * kept.strides[0] + chunk * CHUNK
                    other = codes + pages[first + count - 1] * kept.strides[0] + chunk * CHUNK
                    largest_sums(  # type: ignore[call-arg]  # numba gives the first
                        np.uintp(one),
                        np.uintp(other),
                        np.uintp(page_size),
                        np.uintp(num_bytes),
                        np.uintp(tables.ctypes.data + row * num_bytes * TABLE_BYTES),
                        np.uintp(of_chunk.ctypes.data),
                    )
                    best[0] = max(best[0], of_chunk[0])
                    best[1] = max(best[1], of_chunk[1])
                for at in range(count):
                    logits[row // group, head, row % group, first + at] = table_units[row] * best[at]
            for at in range(count):
                page = pages[first + at]
                for channel in range(dim):
                    mean[channel] = np.int8(kept[page, head, channel])
                factor = _FACTORS[kept[page, head, dim]]
                for row in range(num_queries):
                    token, query = row // group, row % group
                    of_mean = np.float32(0.0)
                    for channel in range(dim):
                        of_mean += queries[token, head, query, channel] * mean[channel]
                    of_codes = logits[token, head, query, first + at]
                    logits[token, head, query, first + at] = factor * of_codes + of_mean * units[page, head]
