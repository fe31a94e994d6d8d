"""openai-chat: JSON lines of full prompts, as bodies of chat or completion requests, or as plain text.

A record holds one of ``messages``, ``prompt`` or ``input`` (with ``tools``), or a ``body`` that does, as in
files for the batch API; ``timestamp`` and ``output`` are optional. A list of prompts is as many requests.
aiperf's names are read too: ``text_input``, ``payload``, ``output_length``, and ``session_id`` with ``delay``
in place of a time (its ``mooncake_trace`` loader). Anthropic's ``system`` and Responses' ``instructions``
stand in front of the messages; bodies that name another model, salt, key, adapter or template argument share
nothing; other fields are ignored. A folder is read as one trace: its ``.jsonl`` files, such as one per
session, merged by time. A timestamp may be ISO 8601 or a number since any moment, in seconds, milliseconds or
microseconds: Unix times are told apart by size.

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
from sgl_importance_lab.replay.formats.arrival_times import ArrivalTimes
from sgl_importance_lab.replay.formats.jsonl import (
    Count,
    Request,
    Seconds,
    add_in_order,
    holds_records,
    iterate_records,
)
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
ONE_PROMPT = "needs exactly one of messages, prompt and input, and it must not be empty"
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Record(Struct):
    messages: list[Message] | None = None
    prompt: str | list[TokenId | str | list[TokenId]] | None = None
    text_input: str | None = None
    input: str | list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    body: _Record | None = None
    payload: _Record | None = None
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
    output_length: Count | None = None
    timestamp: float | str | None = None
    session_id: str | int | None = None
    delay: Seconds | None = None

    @property
    def request(self) -> _Record:
        """What was sent."""
        return self.body or self.payload or self


def matches(path: Path) -> bool:
    return any(holds_records(file, _Record, lambda record: bool(_prompts(record))) for file in _files(path))


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
            times = ArrivalTimes()
            for line, record in iterate_records(file, _Record, on_bad_record):
                try:
                    prompts = _encode(record, encoder)
                    own = None if record.timestamp is None else _seconds(record.timestamp)
                except PromptError as error:
                    on_bad_record(BadRecord(file, line, str(error)))
                    continue
                seconds = times.of(own, record.session_id, record.delay)
                follows_another += bool(record.request.previous_response_id)
                root = root_digest(NAME, options.tokenizer, _namespace(record))
                for tokens in prompts:
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


def read_bodies(path: Path, on_bad_record: OnBadRecord) -> Iterator[dict[str, Any]]:
    """What each record asks for: the body of a chat (``messages``, ``tools``) or completion (``prompt``)."""
    for file in _files(path):
        for line, record in iterate_records(file, _Record, on_bad_record):
            prompts = _prompts(record)
            if not prompts or not all(prompts):
                on_bad_record(BadRecord(file, line, ONE_PROMPT))
            tools = {"tools": record.request.tools} if record.request.tools else {}
            head = _head(record)
            for prompt in prompts:
                if isinstance(prompt, str) and (head or tools):
                    prompt = [{"role": "user", "content": prompt}]
                if isinstance(prompt, str) or isinstance(prompt[0], int):
                    yield {"prompt": prompt}
                else:
                    yield {"messages": [*head, *prompt], **tools}


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _prompts(record: _Record) -> list[str | list[int] | list[Message]]:
    """The prompts of the record, of which only one field may hold some; none if there is none, or more."""
    request = record.request
    given = (request.messages, request.prompt, request.text_input, request.input)
    present: list[Any] = [field for field in given if field]
    if len(present) != 1:
        return []
    (only,) = present
    is_batch = only is request.prompt and isinstance(only, list) and not isinstance(only[0], int)
    return only if is_batch else [only]


def _encode(record: _Record, encoder: Encoder) -> list[list[int]]:
    prompts = _prompts(record)
    if not all(prompts) or not prompts:
        raise PromptError(ONE_PROMPT)
    if len({type(prompt) for prompt in prompts}) > 1:
        raise PromptError("prompt: texts and lists of tokens in one list")
    request = record.request
    return [_encode_one(prompt, _head(record), request.tools, encoder) for prompt in prompts]


def _head(record: _Record) -> list[Message]:
    texts = (record.request.system, record.request.instructions)
    return [{"role": "system", "content": text} for text in texts if text]


def _encode_one(
    prompt: str | list[int] | list[Message],
    head: list[Message],
    tools: list[dict[str, Any]] | None,
    encoder: Encoder,
) -> list[int]:
    if isinstance(prompt, str):
        if not head and not tools:
            return encoder.text(prompt)
        return encoder.chat([*head, {"role": "user", "content": prompt}], tools)
    if isinstance(prompt[0], int):
        if not all(isinstance(token, int) for token in prompt):
            raise PromptError("prompt: tokens and texts in one list")
        return [token for token in prompt if isinstance(token, int)]
    messages = [message for message in prompt if isinstance(message, dict)]
    return encoder.chat([*head, *messages], tools)


def _namespace(record: _Record) -> str:
    request = record.request
    named = {name: value for name in NAMESPACE if (value := getattr(request, name))}
    return json.dumps(named, sort_keys=True) if named else ""


def _output_tokens(record: _Record, encoder: Encoder) -> int:
    if record.output is None:
        return record.output_length or 0
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
