"""Spoiled workloads, prompts and pinned texts are refused before anything is sent."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sgl_importance_lab.workload.workload_request import WorkloadError, read_requests

from support.fuzz import check_message, check_one_line, damage, examples, json_lines, nested, spoil

NOBODY = "http://127.0.0.1:9"  # the discard port, where nobody answers


MESSAGES = [{"role": "system", "content": "a" * 40}, {"role": "user", "content": "b" * 30}]
REQUESTS = [
    {
        "id": "chat/0/0",
        "kind": "chat",
        "session": "s",
        "seconds": 0.5,
        "max_tokens": 4,
        "prompt": "Alice copper.",
    },
    {
        "id": "chat/0/1",
        "kind": "chat",
        "session": "s",
        "seconds": 1.5,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Alice copper. Question: Alice"}],
        "answer": "copper",
    },
]


@examples(80, 3000)
def test_a_spoiled_workload_is_refused_by_line_or_sent(segment: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(8)
    path = tmp_path / "requests.jsonl"
    codes = Counter[str]()
    for _ in range(count):
        path.write_bytes(json_lines(rng, REQUESTS))
        try:
            read_requests(path)
            codes["read"] += 1
        except WorkloadError as error:
            codes["refused"] += 1
            check_message(error)
        if rng.random() < 0.05:
            assert check_one_line(["workload", "run", str(path), "--url", NOBODY]) == 2
            words = ["study", "sensitivity", str(segment.parent), "--no-figure", "--out", str(tmp_path)]
            assert check_one_line([*words, "--workload", str(path)]) == 2
    assert min(codes.values()) > 0.1 * count, codes


@pytest.mark.parametrize("form", ["messages", "input-ids", "text-file"])
@examples(8, 600)
def test_a_spoiled_prompt_is_refused(tmp_path: Path, form: str, count: int) -> None:
    rng = random.Random(9)
    path = tmp_path / "prompt.json"
    good: Any = MESSAGES if form == "messages" else [1, 2, 3]
    for example in range(count):
        spoiled = json.dumps(spoil(rng, good)).encode()
        path.write_bytes(
            nested(20_000) if example == 0 else damage(rng, spoiled) if rng.random() < 0.4 else spoiled
        )
        for command in ("pin", "prewarm"):
            assert check_one_line([command, f"--{form}", str(path), "--url", NOBODY]) == 2
