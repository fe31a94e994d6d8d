"""A trace of sessions in Mooncake's format."""

from __future__ import annotations

import json
from pathlib import Path


def write_session_trace(path: Path, requests: int) -> Path:
    """Three sessions behind one shared block, in turns, each a block longer every time."""
    paths, lines = [[0], [0], [0]], []
    for turn in range(requests):
        blocks = paths[turn % 3]
        blocks.append(turn + 1)
        request = {"timestamp": turn * 1000, "input_length": 512 * len(blocks), "output_length": 1}
        lines.append(json.dumps({**request, "hash_ids": blocks}) + "\n")
    path.write_text("".join(lines))
    return path
