"""Random traces and written ones, and the public ones where this checkout has them beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from sgl_importance_lab.replay.trace import Trace, TraceBuilder

BLOCK_TOKENS = 4


def shared_data(relative: str) -> Path:
    """A file of the shared data; skips the test where there is none."""
    named = os.environ.get("SGL_IMPORTANCE_DATA")
    folders = [Path(named)] if named else [folder / "shared" / "data" for folder in Path(__file__).parents]
    for folder in folders:
        if (folder / relative).exists():
            return folder / relative
    pytest.skip(f"no {relative} in shared/data or SGL_IMPORTANCE_DATA")


def build_trace(paths: list[list[int]], *, unfilled: int = 0, prefix_tree: bool = True) -> Trace:
    """A trace whose blocks are named by branches: equal starts of two paths are the same blocks."""
    builder = TraceBuilder("test", BLOCK_TOKENS, prefix_tree=prefix_tree)
    for second, path in enumerate(paths):
        blocks = [tuple(path[: depth + 1]) if prefix_tree else path[depth] for depth in range(len(path))]
        tokens = max(BLOCK_TOKENS * len(path) - unfilled, 0)
        builder.add(blocks, input_tokens=tokens, seconds=float(second))
    return builder.build()


paths = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=40)
tree_traces = st.builds(build_trace, paths, unfilled=st.integers(0, BLOCK_TOKENS - 1))
object_traces = st.builds(
    build_trace,
    st.lists(st.lists(st.integers(0, 11), max_size=7), min_size=1, max_size=40),
    prefix_tree=st.just(False),
)


def write_records(path: Path, *lines: dict[str, Any] | str) -> Path:
    """A record a line: JSON of objects, texts as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path
