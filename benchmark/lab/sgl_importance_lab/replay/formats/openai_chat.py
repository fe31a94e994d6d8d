"""openai-chat: JSON lines of full prompts, as bodies of any request that sglang computes, or as plain text.

A record is a body (``request_bodies.py``), or holds one as ``body`` or ``payload``; ``timestamp`` and
``output`` are optional. A list of prompts is as many requests. aiperf's names are read too: ``text_input``,
``payload``, ``output_length``, and ``session_id`` with ``delay`` in place of a time (its ``mooncake_trace``
loader). Anthropic's ``system`` and Responses' ``instructions`` stand in front of the messages; bodies that
name another model, salt, key, adapter or template argument share nothing; other fields are ignored. A folder
is read as one trace: its ``.jsonl`` files, such as one per session, merged by time. A timestamp may be ISO
8601 or a number since any moment, in seconds, milliseconds or microseconds: Unix times are told apart by
size.

Prompts are cut into blocks of whole tokens; a last block that is only begun does not count, because a server
caches whole pages. Its tokens still count as prompt tokens. Blocks are named by chained digests, as ghosts
are. Generated text is cached only when a later prompt contains it, as part of that prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
from sgl_importance_lab.replay.formats.request_bodies import Message, Prompt, RequestBody, as_computed
from sgl_importance_lab.replay.formats.token_counts import Encoder, PromptError, load_encoder
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

NAME = "openai-chat"
BLOCK_TOKENS = 16

ONE_PROMPT = "needs exactly one of messages, prompt and input, and it must not be empty"


class _Record(RequestBody):
    body: RequestBody | None = None
    payload: RequestBody | None = None
    output: Any = None
    output_length: Count | None = None
    timestamp: float | str | None = None
    session_id: str | int | None = None
    delay: Seconds | None = None

    @property
    def request(self) -> RequestBody:
        """What was sent."""
        return self.body or self.payload or self


def matches(path: Path) -> bool:
    return any(
        holds_records(file, _Record, lambda record: bool(record.request.prompts())) for file in _files(path)
    )


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; without a tokenizer a token is a byte of UTF-8."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    encoder = load_encoder(options.tokenizer)
    files = _files(path)
    if not files:
        raise TraceError(f"{path}: a folder without .jsonl files")

    not_followed: Counter[str] = Counter()

    def requests() -> Iterator[Request]:
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
                not_followed.update(record.request.not_followed())
                for index, tokens in enumerate(prompts):
                    root = root_digest(NAME, options.tokenizer, record.request.namespace(index))
                    digests = chain_digests(root, tokens, block_tokens)
                    yield Request(file, line, seconds, digests, len(tokens), _output_tokens(record, encoder))

    builder = TraceBuilder(path.stem, block_tokens, prefix_tree=not options.object_level)
    add_in_order(builder, requests(), on_bad_record)
    for field, number in not_followed.items():
        options.remark(
            f"{path}: {number} requests with {field}: what it stands for is not in the trace, and counts as "
            "nothing"
        )
    return builder.build()


def read_bodies(path: Path, on_bad_record: OnBadRecord) -> Iterator[dict[str, Any]]:
    """What each record asks for: the body of a chat (``messages``, ``tools``) or completion (``prompt``)."""
    for file in _files(path):
        for line, record in iterate_records(file, _Record, on_bad_record):
            request = record.request
            prompts = request.prompts()
            if not prompts or not all(prompts):
                on_bad_record(BadRecord(file, line, ONE_PROMPT))
            tools = {"tools": offered} if (offered := request.offered_tools()) else {}
            head = request.head()
            for prompt in prompts:
                if isinstance(prompt, str) and (head or tools):
                    prompt = [{"role": "user", "content": prompt}]
                if isinstance(prompt, str) or isinstance(prompt[0], int):
                    yield {"prompt": prompt}
                else:
                    yield {"messages": [*head, *prompt], **tools}


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def _encode(record: _Record, encoder: Encoder) -> list[list[int]]:
    request = record.request
    prompts = request.prompts()
    if not all(prompts) or not prompts:
        raise PromptError(ONE_PROMPT)
    if len({type(prompt) for prompt in prompts}) > 1:
        raise PromptError("prompt: texts and lists of tokens in one list")
    head, tools = as_computed(request.head()), as_computed(request.offered_tools())
    return [_encode_one(prompt, head, tools, encoder) for prompt in prompts]


def _encode_one(
    prompt: Prompt, head: list[Message], tools: list[dict[str, Any]] | None, encoder: Encoder
) -> list[int]:
    if isinstance(prompt, str):
        if not head and not tools:
            return encoder.text(prompt)
        return encoder.chat([*head, {"role": "user", "content": prompt}], tools)
    if isinstance(prompt[0], int):
        if not all(isinstance(token, int) for token in prompt):
            raise PromptError("prompt: tokens and texts in one list")
        return [token for token in prompt if isinstance(token, int)]
    messages = [as_computed(message) for message in prompt if isinstance(message, dict)]
    return encoder.chat([*head, *messages], tools)


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
