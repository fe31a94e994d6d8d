"""Requests as ids of their prompts' blocks, one JSON record to a line; for Bailian and Mooncake."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from sgl_importance_lab.replay.formats.jsonl import (
    BlockId,
    Count,
    Request,
    Seconds,
    add_in_order,
    block_count_error,
    iterate_records,
)
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord
from sgl_importance_lab.replay.trace import Trace, TraceBuilder


class BlockRecord(Struct):
    """One request; ``hash_ids`` are of its prompt's blocks, the last of which may be filled in part."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[BlockId]


RecordT = TypeVar("RecordT", bound=BlockRecord)


def read_blocks(
    path: Path,
    record_type: type[RecordT],
    on_bad_record: OnBadRecord,
    *,
    block_tokens: int,
    prefix_tree: bool,
    name_blocks: Callable[[Sequence[int]], array[int]],
    ticks_per_second: int,
) -> Trace:
    """
    Args:
        path: of the trace.
        record_type: of its lines.
        on_bad_record: called with each line that is left out.
        block_tokens: tokens of a whole block.
        prefix_tree: whether a block counts together with all before it.
        name_blocks: the ids under which the blocks of a prompt count, from those of the record.
        ticks_per_second: unit of the timestamps.
    """
    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=prefix_tree)

    def requests() -> Iterator[Request]:
        for line, record in iterate_records(path, record_type, on_bad_record):
            cause = block_count_error(len(record.hash_ids), record.input_length, block_tokens)
            if cause is not None:
                on_bad_record(BadRecord(path, line, cause))
                continue
            yield Request(
                path,
                line,
                record.timestamp / ticks_per_second,
                name_blocks(record.hash_ids),
                record.input_length,
                record.output_length,
            )

    add_in_order(builder, requests(), on_bad_record)
    return builder.build()
