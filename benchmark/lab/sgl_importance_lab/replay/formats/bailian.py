"""Bailian: production requests of Alibaba's Qwen service as ids of 16-token blocks, with chat and turn.

Format: alibaba-edu/qwen-bailian-usagetraces-anon. Its description says that each block is hashed, not that
the hash covers what came before. Ids are therefore chained here: a block is its id behind its prefix, which
changes nothing where the ids stand for prefixes already. With ``--object-level`` the ids count as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sgl_importance_lab.replay.formats.block_ids import BlockRecord, read_blocks
from sgl_importance_lab.replay.formats.jsonl import holds_records
from sgl_importance_lab.replay.formats.line_reader import OnBadRecord, ReadOptions
from sgl_importance_lab.replay.trace import NO_PARENT, Trace

NAME = "bailian"
BLOCK_TOKENS = 16


class _Record(BlockRecord, kw_only=True):
    chat_id: int | str


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
    return read_blocks(
        path,
        _Record,
        on_bad_record,
        block_tokens=options.block_tokens or BLOCK_TOKENS,
        prefix_tree=not options.object_level,
        name_blocks=partial(array, "Q") if options.object_level else _PrefixIds().chain,
        ticks_per_second=1,
        remark=options.remark,
    )
