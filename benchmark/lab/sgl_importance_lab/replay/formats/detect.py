"""Chooses the reader of a trace: named by the user, or found by looking into the file."""

from __future__ import annotations

from codecs import BOM_UTF8
from importlib import import_module
from pathlib import Path
from typing import cast

from sgl_importance.json_text import BadJson, read_json
from sgl_importance_lab.replay.formats.jsonl import numbered_lines
from sgl_importance_lab.replay.formats.line_reader import (
    OnBadRecord,
    ReadOptions,
    TraceError,
    TraceReader,
    refuse_bad_record,
)
from sgl_importance_lab.replay.formats.request_bodies import BODY_PLACES, PROMPT_FIELDS
from sgl_importance_lab.replay.trace import Trace

READERS = {
    "recorded": "recorded",
    "mooncake": "mooncake",
    "bailian": "bailian",
    "openai-chat": "openai_chat",
    "kv-cache-tester": "kv_cache_tester",
    "oracle-general": "oracle_general",
}
"""Name on the command line -> module of this package, in the order in which detection asks them."""
_PACKINGS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
"""First bytes of files that are packed."""
FORMATS_OF_TEXT = ("openai-chat",)
FORMATS_OF_SESSIONS = ("kv-cache-tester",)


def load_reader(name: str) -> TraceReader:
    """
    Raises:
        TraceError: there is no such format.
    """
    if name not in READERS:
        raise TraceError(f"unknown format {name!r}; known: {', '.join(READERS)}")
    return cast(TraceReader, import_module(f"{__package__}.{READERS[name]}"))


def detect_reader(path: Path) -> TraceReader:
    """
    Raises:
        TraceError: no format matches.
    """
    _check_kind(path)
    for name in READERS:
        reader = load_reader(name)
        if reader.matches(path):
            return reader
    if nearest := _nearest_format(path):
        return load_reader(nearest)
    if _is_azure_csv(path):
        raise TraceError(
            f"{path}: an Azure LLM trace has arrival times and token counts but no prefix ids, "
            "so nothing says which requests share blocks and it cannot be replayed"
        )
    if packing := _packing_of(path):
        raise TraceError(
            f"{path}: packed by {packing}, or part of a file that is: unpack it first, or fetch it again"
        )
    if path.is_dir() and not any(path.iterdir()):
        raise TraceError(f"{path}: an empty folder: name a trace, or the folder of a recording")
    if path.is_file() and not path.stat().st_size:
        raise TraceError(f"{path}: an empty file: name a trace, or the folder of a recording")
    if _is_json_array(path):
        raise TraceError(
            f"{path}: a JSON array: write one record a line, as by: jq -c '.[]' FILE > FILE.jsonl"
        )
    raise TraceError(f"{path}: unknown format; name it with --format ({', '.join(READERS)})")


def _nearest_format(path: Path) -> str | None:
    """The format whose fields the first line has, if not as they must be: its reader says what is wrong."""
    if not path.is_file():
        return None
    with path.open("rb") as lines:
        try:
            record = read_json(next(numbered_lines(lines), (0, b""))[1])
        except BadJson:
            return None
    if not isinstance(record, dict):
        return None
    if "hash_ids" in record:
        return "bailian" if "chat_id" in record else "mooncake"
    body = next((record[name] for name in BODY_PLACES if isinstance(record.get(name), dict)), record)
    return "openai-chat" if any(name in body for name in PROMPT_FIELDS) else None


def depends_on_seed(path: Path, format_name: str | None) -> bool:
    """Whether a seed decides in which order the requests come.

    Raises:
        TraceError: no format matches.
    """
    return (format_name or detect_reader(path).NAME) in FORMATS_OF_SESSIONS


def _check_kind(path: Path) -> None:
    """
    Raises:
        TraceError: it is no file and no folder: who reads a pipe twice waits, or misses its beginning.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(
            f"{path}: a pipe or a device, and a trace is read more than once: write it to a file first"
        )


def _packing_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(8)
    return next((name for start, name in _PACKINGS.items() if head.startswith(start)), None)


def _is_json_array(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(64).removeprefix(BOM_UTF8).split()
    return bool(head) and head[0].startswith(b"[")


def _is_azure_csv(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline(200).strip().startswith(b"TIMESTAMP,ContextTokens")


def read_trace(
    path: Path,
    options: ReadOptions | None = None,
    *,
    format_name: str | None = None,
    on_bad_record: OnBadRecord = refuse_bad_record,
) -> Trace:
    """Reads a trace of a named or detected format.

    Raises:
        TraceError: the file is missing, its format is unknown, a record is bad and ``on_bad_record`` says
            stop, or no request is left.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    _check_kind(path)
    try:
        reader = load_reader(format_name) if format_name else detect_reader(path)
        if options is not None and options.tokenizer is not None and reader.NAME not in FORMATS_OF_TEXT:
            raise TraceError(f"{path}: {reader.NAME} holds no text: leave out --tokenizer")
        if options is not None and options.alive is not None and reader.NAME not in FORMATS_OF_SESSIONS:
            raise TraceError(f"{path}: {reader.NAME} says when each request came: leave out --alive")
        trace = reader.read(path, options or ReadOptions(), on_bad_record)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if trace.num_accesses == 0:
        raise TraceError(f"{path}: holds no request with a whole or started block")
    return trace
