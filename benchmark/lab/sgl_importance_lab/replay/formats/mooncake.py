"""Mooncake: production requests as ids of 512-token blocks, each standing for itself and all before it.

Format: kvcache-ai/Mooncake, FAST25-release. A last block that is filled in part has an id too, so it counts
as a block; hits in it count the tokens that it holds.
"""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path
from typing import Any

from sgl_importance_lab.replay.formats.block_ids import BlockRecord, read_blocks
from sgl_importance_lab.replay.formats.jsonl import holds_records
from sgl_importance_lab.replay.formats.line_reader import OnBadRecord, ReadOptions
from sgl_importance_lab.replay.trace import Trace

NAME = "mooncake"
BLOCK_TOKENS = 512


class _Detected(BlockRecord):
    """Bailian records hold the same fields and more."""

    chat_id: Any = None


def matches(path: Path) -> bool:
    return holds_records(path, _Detected, lambda record: record.chat_id is None)


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; timestamps are milliseconds."""
    return read_blocks(
        path,
        BlockRecord,
        on_bad_record,
        block_tokens=options.block_tokens or BLOCK_TOKENS,
        prefix_tree=not options.object_level,
        name_blocks=partial(array, "Q"),
        ticks_per_second=1000,
        remark=options.remark,
    )
