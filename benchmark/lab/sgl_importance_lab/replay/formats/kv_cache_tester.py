"""kv-cache-tester: recorded sessions of coding agents, each with its own clock and its own block ids.

Format: callanjfox/kv-cache-tester, ``docs/trace_replay_tester.md``. Read is a folder of its JSON files (a
session each), or one file with a session on each line, packed or not, in which ``hash_runs`` (start, count,
start, count, ...) may stand in place of ``hash_ids``. An id stands for its block and all before it; each
session has ids of its own unless ``hash_id_scope`` is "global".

Sessions are replayed ``alive`` at a time: the first ones begin together, and whenever one is over the next
begins, in an order that the seed decides. Within a session all gaps are as recorded. The entry of a sub-agent
that was waited for is written when it ends, so it began its duration earlier; one without a duration was
launched beside its parent (``status`` "async_launched"), and begins at its entry.
"""

from __future__ import annotations

import gzip
import random
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from sgl_importance.json_text import BadJson, decode_json
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.jsonl import DETECTION_LINES, BlockId, Count, Seconds, numbered_lines
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord, ReadOptions, TraceError
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

NAME = "kv-cache-tester"
ALIVE = 20
"""Sessions at a time where nobody says."""
ANSWER_ENDS = {
    "tool_use": AnswerEnd.TOOL_CALL,
    "end_turn": AnswerEnd.END_OF_TURN,
    "stop_sequence": AnswerEnd.END_OF_TURN,
    "max_tokens": AnswerEnd.LENGTH,
}
"""What ``stop`` means; it is empty where a streamed answer was not watched to its end."""
_SUB_AGENT = "subagent"
_MOST_BLOCKS = 2**20  # of one prompt: a run is expanded, so its count must not be believed blindly


class _Entry(Struct, rename={"input_tokens": "in", "output_tokens": "out", "nested": "requests"}):
    """A request, or a sub-agent with its requests."""

    t: Seconds
    type: str = ""
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    stop: str | None = None
    hash_ids: list[BlockId] | None = None
    hash_runs: list[BlockId] | None = None
    duration_ms: Annotated[float, Meta(ge=0, le=1e18)] | None = None
    nested: list[_Entry] | None = None

    def block_ids(self) -> list[int]:
        """
        Raises:
            ValueError: runs that do not come in pairs, or that are too long for a prompt.
        """
        if self.hash_runs is None:
            return self.hash_ids or []
        starts, counts = self.hash_runs[::2], self.hash_runs[1::2]
        if len(starts) != len(counts):
            raise ValueError("hash_runs: a start without a count")
        if sum(counts) > _MOST_BLOCKS:
            raise ValueError(f"hash_runs: {sum(counts)} blocks in one prompt")
        runs = zip(starts, counts, strict=True)
        return list(chain.from_iterable(range(start, start + count) for start, count in runs))


class _Record(Struct):
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    requests: list[_Entry]
    hash_id_scope: str | None = None


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request of a session.

    Attributes:
        seconds: since the session began.
        blocks: names of its whole blocks.
    """

    seconds: float
    blocks: Sequence[object]
    input_tokens: int
    output_tokens: int
    answer_end: AnswerEnd


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded session: its requests in order of time, and the line that it came from."""

    path: Path
    line: int
    requests: Sequence[SessionRequest]


def matches(path: Path) -> bool:
    decoder = msgspec.json.Decoder(_Record)
    try:
        for _, _, text in islice(_texts(path), DETECTION_LINES):
            try:
                record = decode_json(decoder.decode, text)
            except BadJson:
                continue
            if any(entry.hash_ids or entry.hash_runs or entry.nested for entry in record.requests):
                return True
    except (OSError, TraceError):
        return False
    return False


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``."""
    if options.object_level:
        raise TraceError(f"{path}: {NAME} names blocks by their prefix: leave out --object-level")
    block_tokens, sessions = read_sessions(path, options.block_tokens, on_bad_record)
    name = path.name.split(".")[0]
    alive = options.alive or ALIVE
    return merge_sessions(name, block_tokens, sessions, alive, options.seed, on_bad_record)


def read_sessions(
    path: Path, block_tokens: int | None, on_bad_record: OnBadRecord
) -> tuple[int, list[Session]]:
    """
    Args:
        path: file or folder.
        block_tokens: tokens of a block, a multiple of the recorded ones; None takes these.
        on_bad_record: called with each session that is left out.

    Returns:
        Tokens of a block, and the sessions in the order of the file, or of the files' names.

    Raises:
        TraceError: recorded blocks cannot be joined to blocks of ``block_tokens``.
    """
    decoder = msgspec.json.Decoder(_Record)
    sessions: list[Session] = []
    for file, line, text in _texts(path):
        try:
            record = decode_json(decoder.decode, text)
        except BadJson as error:
            is_spread = line == 1 and text.strip() in (b"{", b"[")
            cause = "a session has to be on one line, or alone in a file of a folder" if is_spread else error
            on_bad_record(BadRecord(file, line, str(cause)))
            continue
        block_tokens = block_tokens or record.block_size
        if block_tokens % record.block_size:
            raise TraceError(
                f"{file}:{line}: its blocks have {record.block_size} tokens: "
                f"--block-tokens must be a multiple of that, not {block_tokens}"
            )
        scope = () if record.hash_id_scope == "global" else (len(sessions),)
        try:
            requests = list(_requests(record, block_tokens // record.block_size, scope))
        except ValueError as error:
            on_bad_record(BadRecord(file, line, str(error)))
            continue
        except RecursionError:
            on_bad_record(BadRecord(file, line, "sub-agents within sub-agents, too deeply"))
            continue
        requests.sort(key=lambda request: request.seconds)
        if requests:
            sessions.append(Session(file, line, requests))
    return block_tokens or 1, sessions


def in_order(sessions: Sequence[Session], alive: int, seed: int) -> list[tuple[float, int, SessionRequest]]:
    """Requests of all sessions by time, ``alive`` sessions at a time: second, session's index, request."""
    order = list(range(len(sessions)))
    random.Random(seed).shuffle(order)
    free = [0.0] * max(1, min(alive, len(sessions)))  # when each place is free
    heapify(free)
    merged = []
    for number in order:
        requests = sessions[number].requests
        start = free[0]
        heapreplace(free, start + requests[-1].seconds)
        merged += [(start + request.seconds, number, request) for request in requests]
    merged.sort(key=lambda entry: entry[0])
    return merged


def merge_sessions(
    name: str,
    block_tokens: int,
    sessions: Sequence[Session],
    alive: int,
    seed: int,
    on_bad_record: OnBadRecord,
) -> Trace:
    """One trace of all sessions, ``alive`` of them at a time; the same for the same seed."""
    builder = TraceBuilder(name, block_tokens)
    for seconds, number, request in in_order(sessions, alive, seed):
        try:
            builder.add(
                request.blocks,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                seconds=seconds,
                answer_end=request.answer_end,
            )
        except ValueError as error:
            on_bad_record(BadRecord(sessions[number].path, sessions[number].line, str(error)))
    return builder.build()


def _requests(record: _Record, joined: int, scope: tuple[int, ...]) -> Iterator[SessionRequest]:
    """Requests of a session and of its sub-agents; a block is known by the last of ``joined`` ids."""
    for start, entry in _timed(record.requests):
        if entry.input_tokens is None:
            raise ValueError(f"a request of type {entry.type!r} at {entry.t} s has no `in`")
        ids = entry.block_ids()
        if (len(ids) - 1) * record.block_size > entry.input_tokens:
            raise ValueError(f"{len(ids)} blocks of {record.block_size} for {entry.input_tokens} tokens")
        yield SessionRequest(
            start,
            [(*scope, block) for block in ids[joined - 1 :: joined]],
            entry.input_tokens,
            entry.output_tokens or 0,
            ANSWER_ENDS.get(entry.stop or "", AnswerEnd.UNKNOWN),
        )


def _timed(entries: Iterable[_Entry], start: float = 0.0) -> Iterator[tuple[float, _Entry]]:
    """Requests with their second in the session; those of a sub-agent count from its start."""
    for entry in entries:
        is_unrecorded_agent = entry.type == _SUB_AGENT and entry.input_tokens is None
        if entry.nested is None and not is_unrecorded_agent:
            yield start + entry.t, entry
            continue
        lasted = (entry.duration_ms or 0.0) / 1000
        yield from _timed(entry.nested or (), max(start + entry.t - lasted, 0.0))


def _texts(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """File, line and text of each session; a file in a folder is one session.

    Raises:
        TraceError: a folder without such a file, or a packed file that is damaged.
    """
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise TraceError(
                f"{path}: no .json file in this folder: name the one that holds the sessions themselves, "
                "or a file with a session on each line"
            )
        for file in files:
            yield file, 1, file.read_bytes().removeprefix(BOM_UTF8)
        return
    with path.open("rb") as start:
        is_packed = start.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_packed else path.open("rb") as lines:
        try:
            for number, line in numbered_lines(lines):
                yield path, number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: damaged or cut off ({error}): fetch it again") from error
