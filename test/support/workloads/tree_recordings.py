"""Recordings of requests that are branches of a binary tree."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from sgl_importance.observe.trace.records import Detail, Fold
from sgl_importance_lab.study.recording import Query, Recording

from support.workloads.recordings import PAGE_SIZE, make_header

branches = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 3), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


def make_recording(drawn: list[tuple[list[int], int, int]], device_tokens: int = 4096) -> Recording:
    """Requests as (branches of a binary tree, prompt tokens behind the last whole page, output tokens)."""
    names: dict[tuple[int, ...], int] = {}
    queries = []
    for order, (branch, rest, output) in enumerate(drawn):
        pages = [names.setdefault(tuple(branch[: i + 1]), len(names)) for i in range(len(branch))]
        tokens = len(pages) * PAGE_SIZE + rest
        generated = (tokens + output) // PAGE_SIZE - len(pages)
        # Generated pages are nobody else's.
        more = [names.setdefault((*branch, -1 - order, i), len(names)) for i in range(generated)]
        body = np.ones(len(pages) + 1, np.float32) / (len(pages) + 1)
        query = Query(f"k/{order}/0", order + 1, np.array(pages), np.array(pages + more), tokens, output)
        query.folds = [Fold(order, order, order, 0.5, first, body, body) for first in (True, False)]
        queries.append(query)
    header = make_header(
        options={"policy": "observe", "half_life_queries": 32.0},
        capacity_tokens={"device": device_tokens},
        detail=Detail.FOLDS,
    )
    return Recording("hand", (header,), queries, [b""] * len(names))


def drawn_requests(seed: int, count: int = 120) -> list[tuple[list[int], int, int]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 2, 5).tolist(), int(rng.integers(0, 4)), 3) for _ in range(count)]
