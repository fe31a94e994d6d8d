"""Recorded bodies of requests: which of them share a prefix, as on a server that serves them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.line_reader import ReadOptions

from support.workloads.replay_traces import write_records

CHAT = {"messages": [{"role": "user", "content": "u" * 200}]}


@pytest.mark.parametrize(
    "field",
    [
        *("system", "instructions", "cache_salt", "extra_key", "lora_path", "model", "reasoning_effort"),
        *("chat_template", "functions"),
    ],
)
def test_bodies_that_differ_ahead_of_the_messages_share_nothing(tmp_path: Path, field: str) -> None:
    one, two = CHAT | {field: "a" * 40}, CHAT | {field: "b" * 40}
    trace = read_trace(write_records(tmp_path / "chat.jsonl", one, {"body": two}, one))
    assert trace.request(0).tolist() == trace.request(2).tolist()
    shared = set(trace.request(0).tolist()) & set(trace.request(1).tolist())
    assert not shared


SALTED = {"metadata": {"cache_salt": "a"}}


@pytest.mark.parametrize(
    ("one", "two", "shares"),
    [
        (CHAT | {"cache_salt": "a"}, CHAT | SALTED, True),  # read from both places
        (CHAT | SALTED, CHAT | {"metadata": {"cache_salt": "b"}}, False),
        (CHAT | SALTED, CHAT | {"metadata": {"user_id": "b"}}, False),
        (CHAT | {"options": {"extra_key": "a"}}, CHAT | {"options": {"extra_key": "b"}}, False),
        (CHAT | {"thinking": {"type": "enabled", "budget_tokens": 9}}, CHAT, False),
        (CHAT | {"tools": [{"name": "a" * 40}]}, CHAT | {"tools": [{"name": "b" * 40}]}, False),
        (CHAT | {"tools": [{"name": "a" * 40}], "tool_choice": "none"}, CHAT, True),
        (CHAT | {"temperature": 0.5, "stop": ["a"], "tool_choice": "auto"}, CHAT, True),
        ({"input": "u" * 200}, {"input": [{"role": "user", "content": "u" * 200}]}, True),
        ({"input": "u" * 200, "encoding_format": "float"}, {"prompt": "u" * 200}, True),
        (
            {"input": "u" * 200, "reasoning": {"effort": "low"}},
            {"input": "u" * 200, "reasoning": {"effort": "high"}},
            False,
        ),
        (CHAT | {"output_config": {"effort": "low"}}, CHAT | {"output_config": {"effort": "high"}}, False),
        ({"input": "u" * 200, "reasoning": {"summary": "auto"}}, {"input": "u" * 200}, True),
        ({"text": "u" * 200, "sampling_params": {"n": 2}}, {"prompt": "u" * 200, "max_tokens": 1}, True),
        ({"text": ["u" * 200], "cache_salt": ["a"]}, {"prompt": "u" * 200, "cache_salt": "a"}, True),
        ({"input_ids": [5] * 40}, {"prompt": [5] * 40}, True),
        ({"input_ids": [[5] * 40]}, {"input": [[5] * 40]}, True),
        ({"instances": [{"text": "u" * 200}]}, {"input": ["u" * 200]}, True),
        (
            {"instances": [{"input_ids": [5] * 40}], "parameters": {"cache_salt": "a"}},
            {"input_ids": [5] * 40},
            False,
        ),
        ({"query": "u" * 40, "items": ["a", "b"]}, {"text": ["u" * 40 + "a", "u" * 40 + "b"]}, True),
        ({"query": [5] * 40, "items": [[1]], "item_first": True}, {"input_ids": [1, *[5] * 40]}, True),
    ],
)
def test_bodies_share_what_a_server_would_share(tmp_path: Path, one: Any, two: Any, shares: bool) -> None:
    trace = read_trace(write_records(tmp_path / "chat.jsonl", one, two), format_name="openai-chat")
    half = trace.num_requests // 2
    pairs = [(trace.request(index).tolist(), trace.request(index + half).tolist()) for index in range(half)]
    assert all(first for first, _ in pairs)
    assert all((first == second) == shares for first, second in pairs)


def test_a_batch_has_a_salt_for_each_prompt(tmp_path: Path) -> None:
    one = {"prompt": ["u" * 200, "v" * 200], "cache_salt": ["a", "b"]}
    trace = read_trace(write_records(tmp_path / "chat.jsonl", one, one | {"cache_salt": ["a", "c"]}))
    rows = [trace.request(index).tolist() for index in range(4)]
    assert rows[0] == rows[2]
    assert not set(rows[1]) & set(rows[3])


def test_breakpoints_that_roll_on_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    """Anthropic's clients mark the last messages, and each turn others."""

    def turn(number: int) -> dict[str, Any]:
        def content(index: int) -> Any:
            part = {"type": "text", "text": f"{index}" * 60}
            if index < number - 1:
                return part["text"] if index % 2 else [part]
            return [part | {"cache_control": {"type": "ephemeral"}}]

        system = [{"type": "text", "text": "s" * 60, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        messages = [{"role": "user", "content": content(index)} for index in range(number)]
        return {"system": system if number % 2 else "s" * 60, "messages": messages}

    trace = read_trace(write_records(tmp_path / "chat.jsonl", *map(turn, range(1, 5))))
    rows = [trace.request(index).tolist() for index in range(4)]
    for before, after in pairwise(rows):
        assert after[: len(before)] == before


def test_what_cannot_be_followed_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = write_records(tmp_path / "chat.jsonl", *[CHAT | {"previous_response_id": "r"}] * 3, CHAT)
    read_trace(path, ReadOptions(remark=said.append))
    assert [text.partition(":")[2][:40] for text in said] == [" 3 requests with previous_response_id: w"]
