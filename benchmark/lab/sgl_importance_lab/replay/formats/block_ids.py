"""Requests as ids of their prompts' blocks, one JSON record to a line; for Bailian and Mooncake."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from sgl_importance_lab.replay.formats.arrival_times import ArrivalTimes
from sgl_importance_lab.replay.formats.jsonl import (
    Count,
    Request,
    Seconds,
    add_in_order,
    block_count_error,
    iterate_records,
)
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

WideBlockId = Annotated[int, Meta(ge=0)]
"""Of 64 bits; msgspec's own bounds have 63."""


class BlockRecord(Struct):
    """One request; ``hash_ids`` are of its prompt's blocks, the last of which may be filled in part."""

    input_length: Count
    hash_ids: list[WideBlockId]
    timestamp: Seconds | msgspec.UnsetType = msgspec.UNSET
    output_length: Count | msgspec.UnsetType = msgspec.UNSET
    session_id: str | int | None = None
    delay: Seconds | None = None


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
    remark: Callable[[str], None],
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
        remark: gets what records left out.
    """
    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=prefix_tree)

    without_output = 0
    times = ArrivalTimes()

    def requests() -> Iterator[Request]:
        nonlocal without_output
        for line, record in iterate_records(path, record_type, on_bad_record):
            cause = block_count_error(len(record.hash_ids), record.input_length, block_tokens)
            if cause is not None:
                on_bad_record(BadRecord(path, line, cause))
                continue
            try:
                blocks = name_blocks(record.hash_ids)
            except OverflowError:
                on_bad_record(BadRecord(path, line, "hash_ids has a number of more than 64 bits"))
                continue
            ticks = record.timestamp
            own = None if isinstance(ticks, msgspec.UnsetType) else ticks / ticks_per_second
            output_tokens = record.output_length
            if isinstance(output_tokens, msgspec.UnsetType):
                without_output += 1
                output_tokens = 0
            yield Request(
                path,
                line,
                times.of(own, record.session_id, record.delay),
                blocks,
                record.input_length,
                output_tokens,
            )

    add_in_order(builder, requests(), on_bad_record)
    if times.without_time:
        remark(
            f"{path}: {times.without_time} requests without timestamp: each follows the one above it at once"
        )
    if without_output:
        remark(f"{path}: {without_output} requests without output_length: counted as 0 tokens")
    return builder.build()
