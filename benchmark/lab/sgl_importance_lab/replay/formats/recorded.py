"""Recordings of our own servers: the directory that ``--kv-importance-trace`` named.

Blocks are the server's pages, named by their chained digests. Only whole pages count, as a radix cache
keeps no others.
"""

from __future__ import annotations

from pathlib import Path

from sgl_importance.observe.trace import TraceError as RecordingError
from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import arrivals
from sgl_importance.observe.trace.segments import segment_files
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord, ReadOptions, TraceError
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

NAME = "recorded"
ANSWER_ENDS = {end.name.lower(): end for end in AnswerEnd}


def matches(path: Path) -> bool:
    return path.is_dir() and bool(segment_files(path))


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; records that a crash cut off are left out silently."""
    try:
        recording = open_trace(path)
        page_size = recording.header.page_size
        requests = arrivals(recording)
    except RecordingError as error:
        raise TraceError(str(error)) from error
    if options.block_tokens not in (None, page_size):
        raise TraceError(f"{path}: its pages have {page_size} tokens: drop --block-tokens")
    builder = TraceBuilder(path.name, page_size, prefix_tree=not options.object_level)
    for number, request in enumerate(requests, start=1):
        try:
            builder.add(
                request.pages.tolist(),
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                seconds=request.seconds - requests[0].seconds,
                answer_end=ANSWER_ENDS.get(request.answer_end, AnswerEnd.UNKNOWN),
                answer=request.answer_pages,
            )
        except ValueError as error:
            on_bad_record(BadRecord(path, number, str(error)))
    return builder.build()
