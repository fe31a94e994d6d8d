"""Sums of table entries that four bits at a time choose, for 32 tokens together: one vector instruction looks
up 32 of them (PQ Fast Scan, André et al., 2015).

Written as LLVM's own instructions, since numba knows no vectors. Any processor runs them; those with a byte
shuffle (SSSE3 and later) do so at the speed that this is for.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has no annotations
from numba import types
from numba.extending import intrinsic

CHUNK = 16
"""Tokens whose bytes lie together."""
TABLE_BYTES = 2 * 2 * CHUNK
"""Of the entries for a byte: for its lower four bits and its upper, their lower bytes and then the upper."""

_INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
_BYTES = ir.VectorType(ir.IntType(8), CHUNK)
_TWO = ir.VectorType(ir.IntType(8), 2 * CHUNK)
_SUMS = ir.VectorType(_INT16, CHUNK)


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
