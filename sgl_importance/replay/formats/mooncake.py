"""Mooncake: production requests as ids of 512-token blocks, each standing for itself and all before it.

Format: kvcache-ai/Mooncake, FAST25-release. A last block that is filled in part has an id too, so it counts
as a block; hits in it count the tokens that it holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
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
from sgl_importance.replay.trace import Trace, TraceBuilder

NAME = "mooncake"
BLOCK_TOKENS = 512


class _Record(Struct):
    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[BlockId]


class _Detected(_Record, forbid_unknown_fields=True):
    """Bailian records hold the same fields and more."""


def matches(path: Path) -> bool:
    return holds_records(path, _Detected)


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; timestamps are milliseconds."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=not options.object_level)

    def requests() -> Iterator[Request]:
        for line, record in iterate_records(path, _Record, on_bad_record):
            cause = block_count_error(len(record.hash_ids), record.input_length, block_tokens)
            if cause is not None:
                on_bad_record(BadRecord(path, line, cause))
                continue
            yield Request(
                path,
                line,
                record.timestamp / 1000,
                array("q", record.hash_ids),
                record.input_length,
                record.output_length,
            )

    add_in_order(builder, requests(), on_bad_record)
    return builder.build()
