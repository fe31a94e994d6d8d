"""JSON lines: typed records with the line each came from, and requests in order of time."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sgl_importance.json_text import BadJson, decode_json
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord
from sgl_importance_lab.replay.trace import TraceBuilder

RecordT = TypeVar("RecordT", bound=msgspec.Struct)
DETECTION_LINES = 16

Count = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=1e18)]
BlockId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def numbered_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, by number from 1; without the mark that some editors begin a file with."""
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


def iterate_records(
    path: Path, record_type: type[RecordT], on_bad_record: OnBadRecord
) -> Iterator[tuple[int, RecordT]]:
    """Line number and record of every line that holds one; blank lines are no records."""
    decoder = msgspec.json.Decoder(record_type)
    with path.open("rb") as lines:
        for number, line in numbered_lines(lines):
            try:
                record = decode_json(decoder.decode, line)
            except BadJson as error:
                on_bad_record(BadRecord(path, number, str(error)))
            else:
                yield number, record


def holds_records(
    path: Path, record_type: type[RecordT], accept: Callable[[RecordT], bool] = lambda record: True
) -> bool:
    """Whether one of the first lines is such a record: a bad first line alone decides nothing."""
    if not path.is_file():
        return False
    decoder = msgspec.json.Decoder(record_type)
    with path.open("rb") as lines:
        for _, line in islice(numbered_lines(lines), DETECTION_LINES):
            try:
                record = decode_json(decoder.decode, line)
            except BadJson:
                continue
            if accept(record):
                return True
    return False


@dataclass(slots=True)
class Request:
    """A request on its way into a trace, and the line that it came from."""

    path: Path
    line: int
    seconds: float
    blocks: Sequence[object]
    input_tokens: int
    output_tokens: int


def add_in_order(builder: TraceBuilder, requests: Iterable[Request], on_bad_record: OnBadRecord) -> None:
    """Adds the requests in order of time, which starts at the first; equal times keep the file's order."""
    ordered = sorted(requests, key=lambda request: request.seconds)
    start = ordered[0].seconds if ordered else 0.0
    for request in ordered:
        try:
            builder.add(
                request.blocks,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                seconds=request.seconds - start,
            )
        except ValueError as error:
            on_bad_record(BadRecord(request.path, request.line, str(error)))


def block_count_error(blocks: int, input_tokens: int, block_tokens: int) -> str | None:
    """The reason why so many blocks cannot be the prompt; None if they can, with or without a block begun."""
    whole, begun = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if blocks in (whole, begun):
        return None
    return f"{blocks} hash_ids, but {input_tokens} tokens make {begun} blocks of {block_tokens}"
