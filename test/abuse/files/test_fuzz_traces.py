"""Spoiled traces are refused by line, or read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance_lab.replay.formats.detect import READERS, read_trace
from sgl_importance_lab.replay.formats.line_reader import BadRecord, TraceError
from sgl_importance_lab.replay.formats.oracle_general import RECORD

from support.fuzz import check_message, check_one_line, damage, examples, json_lines, value

BLOCKS = {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}
CHAT = {
    "messages": [{"role": "system", "content": "a" * 40}, {"role": "user", "content": "b" * 30}],
    "timestamp": "2025-01-01T10:00:00Z",
    "output": "c",
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
ANSWERED = {"t": 0.0, "type": "n", "in": 200, "out": 5, "stop": "tool_use", "hash_ids": [1, 2, 3]}
LINES: dict[str, list[Any]] = {
    "mooncake": [{**BLOCKS, "timestamp": 10 * index, "hash_ids": [0, index + 1]} for index in range(6)],
    "bailian": [
        {**BLOCKS, "chat_id": index, "parent_chat_id": -1, "type": "text", "turn": 1, "input_length": 32}
        for index in range(6)
    ],
    "openai-chat": [
        CHAT,
        {"body": CHAT, "custom_id": "x"},
        {"prompt": "d" * 50, "timestamp": 1.7e9},
        {"prompt": list(range(40))},
        {"input": "e" * 50},
        {"input": CHAT["messages"]},
    ],
    "kv-cache-tester": [
        {
            "id": f"{index}",
            "block_size": 64,
            "requests": [ANSWERED, {**ANSWERED, "t": 9.0, "hash_runs": [1, 3]}],
        }
        for index in range(5)
    ]
    + [{"id": "s", "block_size": 64, "requests": [{"t": 9.0, "type": "subagent", "requests": [ANSWERED]}]}],
}


@pytest.mark.parametrize("name", LINES)
@examples(100, 4000)
def test_a_spoiled_trace_is_refused_by_line_or_read(tmp_path: Path, name: str, count: int) -> None:
    rng = random.Random(name)
    path = tmp_path / "trace.jsonl"
    refused = read = 0
    for example in range(count):
        path.write_bytes(json_lines(rng, LINES[name]))
        bad: list[BadRecord] = []
        strict = rng.random() < 0.5
        try:
            if strict:
                trace = read_trace(path, format_name=name if rng.random() < 0.7 else None)
            else:
                trace = read_trace(path, format_name=name, on_bad_record=bad.append)
        except TraceError as error:
            refused += 1
            check_message(error)
        else:
            read += 1
            trace.check_integrity()
            assert trace.num_requests + len(bad) >= 1
        if example % 50 == 0:
            check_one_line(
                ["replay", str(path), "--capacity-blocks", "3", "--policies", "lru", "--jobs", "1"]
            )
            check_one_line(["size", str(path), "--hours", "1", "--jobs", "1"])
    assert refused > 0.1 * count
    assert read > 0.1 * count


def oracle_general() -> bytes:
    records = np.zeros(40, RECORD)
    records["time"] = np.arange(40) // 3
    records["object"] = np.arange(40) % 7
    records["size"] = 100
    records["next"] = np.where(np.arange(40) < 33, np.arange(40) + 7, -1)
    return records.tobytes()


@examples(100, 10_000)
def test_a_spoiled_binary_trace(tmp_path: Path, count: int) -> None:
    rng = random.Random(4)
    path = tmp_path / "trace.oracleGeneral.bin"
    read = 0
    for _ in range(count):
        path.write_bytes(damage(rng, oracle_general()))
        bad: list[BadRecord] = []
        try:
            trace = read_trace(path, format_name="oracle-general", on_bad_record=bad.append)
        except TraceError as error:
            check_message(error)
        else:
            read += 1
            trace.check_integrity()
    assert read > 0.5 * count


@pytest.mark.parametrize("name", READERS)
@examples(25, 3000)
def test_what_is_no_trace_at_all(tmp_path: Path, name: str, count: int) -> None:
    rng = random.Random(5)
    path = tmp_path / "trace"
    for _ in range(count):
        kind = rng.random()
        path.write_bytes(rng.randbytes(rng.randrange(300)) if kind < 0.5 else json.dumps(value(rng)).encode())
        for given in (name, None):
            try:
                read_trace(path, format_name=given)
            except TraceError as error:
                check_message(error)
