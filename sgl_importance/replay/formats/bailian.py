"""Bailian: production requests of Alibaba's Qwen service as ids of 16-token blocks, with chat and turn.

Format: alibaba-edu/qwen-bailian-usagetraces-anon. Its description says that each block is hashed, not that
the hash covers what came before. Ids are therefore chained here: a block is its id behind its prefix, which
changes nothing where the ids stand for prefixes already. With ``--object-level`` the ids count as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from sgl_importance.replay.formats.jsonl import (
    BlockId,
    Count,
    Request,
    Seconds,
    add_in_order,
    block_count_error,
    holds_records,
    iterate_records,
)
from sgl_importance.replay.formats.line_reader import BadRecord, OnBadRecord, ReadOptions
from sgl_importance.replay.trace import NO_PARENT, Trace, TraceBuilder

NAME = "bailian"
BLOCK_TOKENS = 16


class _Record(Struct):
    chat_id: int | str
    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[BlockId]


class _PrefixIds:
    """Numbers every pair of a prefix and the block that follows it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def chain(self, blocks: Sequence[int]) -> array[int]:
        chained = array("q")
        prefix = NO_PARENT
        for block in blocks:
            prefix = self._ids.setdefault((prefix, block), len(self._ids))
            chained.append(prefix)
        return chained


def matches(path: Path) -> bool:
    return holds_records(path, _Record)


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; timestamps are seconds."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=not options.object_level)
    prefixes = _PrefixIds()

    def requests() -> Iterator[Request]:
        for line, record in iterate_records(path, _Record, on_bad_record):
            cause = block_count_error(len(record.hash_ids), record.input_length, block_tokens)
            if cause is not None:
                on_bad_record(BadRecord(path, line, cause))
                continue
            blocks = record.hash_ids
            yield Request(
                path,
                line,
                record.timestamp,
                array("q", blocks) if options.object_level else prefixes.chain(blocks),
                record.input_length,
                record.output_length,
            )

    add_in_order(builder, requests(), on_bad_record)
    return builder.build()
