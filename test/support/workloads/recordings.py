"""Recordings made by hand: what each query saw is known to the last page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.observe.trace.records import (
    FORMAT_VERSION,
    SCHEMA,
    Detail,
    Fold,
    Header,
    RequestAdmitted,
    RequestFinished,
    Step,
)
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance_lab.study.recording import Query, Recording

PAGE_SIZE = 4
COST = {
    "prefill_seconds_per_token": 1e-5,
    "prefill_seconds_per_token_pair": 1e-9,
    "bytes_per_token": 4096,
    "host_bytes_per_second": 1e9,
    "storage_bytes_per_second": 1e8,
}


def make_header(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "run": "run",
        "segment": 0,
        "schema": SCHEMA,
        "created": 0.0,
        "page_size": PAGE_SIZE,
        "digest": "",
        "model": "by hand",
        "layers": (0,),
        "options": {"policy": "observe", "half_life_queries": 32.0, "window": 32, "g": "auto"},
        "capacity_tokens": {"device": 64},
        "cost": COST,
        "detail": Detail.STEPS,
    }
    return Header(**{**fields, **changes})


def make_fold(body: Sequence[float], weight: float = 1.0, first: bool = True) -> Fold:
    vector = np.array(body, np.float32)
    return Fold(0, 1, 1, weight, first, vector, vector)


def make_step(mass: Sequence[float], phase: str = "decode", query_tokens: int = 1) -> Step:
    vector = np.array(mass, np.float16)
    return Step(0, phase, PAGE_SIZE * len(mass), query_tokens, vector, vector, vector)


def make_query(pages: Sequence[int], rid: str = "documents/0/0", **fields: Any) -> Query:
    numbers = np.array(pages, np.int64)
    return Query(rid, 1, numbers, numbers, PAGE_SIZE * len(pages), **fields)


def make_recording(queries: Sequence[Query], name: str = "hand", **header: Any) -> Recording:
    pages = max(int(query.pages.max()) for query in queries) + 1
    digests = [page.to_bytes(16) for page in range(pages)]
    return Recording(name, (make_header(**header),), list(queries), digests)


def write_recording(
    directory: Path, *, contexts: int = 2, queries: int = 60, pages: int = 12, seed: int = 0, **header: Any
) -> None:
    """Queries about shared contexts; each looks at page 1 of its context and one page of its own choice."""
    rng = np.random.default_rng(seed)
    writer = TraceWriter(directory, make_header(**header), max_bytes=1 << 24)
    for request in range(contexts * queries):
        context = request % contexts
        prompt = [1000 * context + i for i in range(pages * PAGE_SIZE)] + [request + 10**6] * PAGE_SIZE
        body = np.zeros(pages + 1, np.float32)
        body[1] += 0.5
        body[rng.integers(pages)] += 0.5
        sequence = TokenSequence((None, None), prompt)
        rid = f"documents/{context}/{request}"
        writer.put(make_step_record(request, "prefill", body, len(prompt), 2))
        # Under overlap scheduling the first decode step runs before the prefill is processed.
        writer.put(make_step_record(request, "decode", body, len(prompt) + 1, 1))
        writer.put(
            RequestAdmitted(request, rid, request + 1, request, 0, len(prompt), {"device": 0}, NO_PAGES),
            sequence,
        )
        writer.put(Fold(request, request + 1, request + 1, 0.5, True, body, body))
        for step in (2, 3):
            writer.put(make_step_record(request, "decode", body, len(prompt) + step, 1))
        writer.put(Fold(request, request + 1, request + 1, 0.5, False, body, body))
        end = TokenSequence((None, None), [*prompt, 1, 2, 3])
        writer.put(RequestFinished(request, request + 1, request, "length", 3, NO_PAGES), end)
    writer.close()


def make_step_record(request: int, phase: str, body: np.ndarray, seq_len: int, query_tokens: int) -> Step:
    vector = body.astype(np.float16)
    return Step(request, phase, seq_len, query_tokens, vector, vector, vector)
