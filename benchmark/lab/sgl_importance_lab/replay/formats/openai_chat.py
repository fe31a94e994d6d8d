"""openai-chat: JSON lines of full prompts, as bodies of chat or completion requests, or as plain text.

A record holds one of ``messages`` (with ``tools``), ``prompt`` or ``input``, or a ``body`` that does, as in
files for the batch API; ``timestamp`` and ``output`` are optional. Anthropic's ``system``
and Responses' ``instructions`` stand in front of the messages; bodies that name another model, salt, key,
adapter or template argument share nothing; other fields are ignored. A folder is
read as one trace: its ``.jsonl`` files, such as one per session, merged by time. A timestamp may be ISO 8601
or a number since any moment, in seconds, milliseconds or microseconds: Unix times are told apart by size.

Prompts are cut into blocks of whole tokens; a last block that is only begun does not count, because a server
caches whole pages. Its tokens still count as prompt tokens. Blocks are named by chained digests, as ghosts
are. Generated text is cached only when a later prompt contains it, as part of that prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.replay.formats.jsonl import Request, add_in_order, holds_records, iterate_records
from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord, ReadOptions, TraceError
from sgl_importance_lab.replay.formats.token_counts import Encoder, PromptError, load_encoder
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

NAME = "openai-chat"
BLOCK_TOKENS = 16

Message = dict[str, Any]
NAMESPACE = (
    "model",
    "cache_salt",
    "extra_key",
    "lora_path",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
)
"""Bodies that differ in one of these may differ from the first token on, and count as sharing nothing."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Record(Struct):
    messages: list[Message] | None = None
    prompt: str | list[TokenId] | None = None
    input: str | list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    body: _Record | None = None
    system: Any = None
    instructions: Any = None
    previous_response_id: Any = None
    model: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    lora_path: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    documents: Any = None
    output: Any = None
    timestamp: float | str | None = None


def matches(path: Path) -> bool:
    return any(
        holds_records(file, _Record, lambda record: _prompt(record) is not None) for file in _files(path)
    )


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; without a tokenizer a token is a byte of UTF-8."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    encoder = load_encoder(options.tokenizer)
    files = _files(path)
    if not files:
        raise TraceError(f"{path}: a folder without .jsonl files")

    follows_another = 0

    def requests() -> Iterator[Request]:
        nonlocal follows_another
        for file in files:
            seconds = 0.0
            for line, record in iterate_records(file, _Record, on_bad_record):
                try:
                    tokens = _encode(record, encoder)
                    if record.timestamp is not None:
                        seconds = _seconds(record.timestamp)
                except PromptError as error:
                    on_bad_record(BadRecord(file, line, str(error)))
                    continue
                follows_another += bool((record.body or record).previous_response_id)
                root = root_digest(NAME, options.tokenizer, _namespace(record))
                digests = chain_digests(root, tokens, block_tokens)
                yield Request(file, line, seconds, digests, len(tokens), _output_tokens(record, encoder))

    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=not options.object_level)
    add_in_order(builder, requests(), on_bad_record)
    if follows_another:
        options.remark(
            f"{path}: {follows_another} requests with previous_response_id: what it stands for is not in the "
            "trace, and counts as nothing"
        )
    return builder.build()


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _prompt(record: _Record) -> str | list[int] | list[Message] | None:
    """The only prompt of the record; None if there is none, or more than one."""
    if record.body is not None:
        return _prompt(record.body)
    present = [field for field in (record.messages, record.prompt, record.input) if field]
    return present[0] if len(present) == 1 else None


def _encode(record: _Record, encoder: Encoder) -> list[int]:
    prompt = _prompt(record)
    if prompt is None:
        raise PromptError("needs exactly one of messages, prompt and input, and it must not be empty")
    request = record.body or record
    head = [{"role": "system", "content": text} for text in (request.system, request.instructions) if text]
    if isinstance(prompt, str):
        if not head:
            return encoder.text(prompt)
        return encoder.chat([*head, {"role": "user", "content": prompt}], request.tools)
    if isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    messages = [message for message in prompt if isinstance(message, dict)]
    return encoder.chat([*head, *messages], request.tools)


def _namespace(record: _Record) -> str:
    request = record.body or record
    named = {name: value for name in NAMESPACE if (value := getattr(request, name))}
    return json.dumps(named, sort_keys=True) if named else ""


def _output_tokens(record: _Record, encoder: Encoder) -> int:
    if record.output is None:
        return 0
    return len(encoder.text(record.output if isinstance(record.output, str) else json.dumps(record.output)))


def _seconds(timestamp: float | str) -> float:
    if isinstance(timestamp, str):
        try:
            moment = datetime.fromisoformat(timestamp)
            # One without a zone would mean another time on another machine, and jump twice a year.
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError) as error:
            raise PromptError(f"timestamp {timestamp!r} is neither a number nor ISO 8601") from error
    for unit_per_second in (1e9, 1e6, 1e3):
        if timestamp > 1e8 * unit_per_second:  # 1e8 s is 1973
            return timestamp / unit_per_second
    return timestamp
