"""Page requests of decode steps, as a sparse-serving system would issue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.documents import shared_contexts
from sgl_importance_lab.study.recording import Query, Recording, Scores

MIN_STEPS = 24
MIN_QUERIES = 8
MIN_CONTEXT_PAGES = 10


@dataclass(frozen=True, slots=True)
class StepScores:
    """One decode step.

    Attributes:
        pages: dense numbers within the stream, page 0 of the sequence first; int64 [num_pages].
        mass: attention mass per page; float64 [num_pages].
        peak: largest probability per page; float64 [num_pages].
    """

    pages: npt.NDArray[np.int64]
    mass: Scores
    peak: Scores


@dataclass(frozen=True, slots=True)
class Stream:
    """Decode steps over one context, in order.

    Attributes:
        kind: of the workload.
        reading: "one answer" for the steps of a single long answer, "shared context" for the steps of many
            queries behind one prefix.
        context_tokens: length of the sequence at the first step.
        num_pages: pages of all steps.
        positions: place of each page in its sequence; int64 [num_pages].
    """

    kind: str
    reading: str
    context_tokens: int
    num_pages: int
    positions: npt.NDArray[np.int64]
    steps: Sequence[StepScores]


def streams(recording: Recording, min_queries: int = MIN_QUERIES) -> list[Stream]:
    """Long answers each for itself; short ones together with the others on their context."""
    found = [
        _stream([query], query.kind, "one answer")
        for query in recording.queries
        if len(query.decode) >= MIN_STEPS
    ]
    short = [query for query in recording.queries if 0 < len(query.decode) < MIN_STEPS]
    for context in shared_contexts(short, min_queries=min_queries, min_pages=MIN_CONTEXT_PAGES):
        if sum(len(query.decode) for query in context.queries) >= MIN_STEPS:
            found.append(_stream(context.queries, context.kind, "shared context"))
    return found


def _stream(queries: Sequence[Query], kind: str, reading: str) -> Stream:
    numbers: dict[object, int] = {}
    positions: list[int] = []
    steps: list[StepScores] = []
    for order, query in enumerate(queries):
        known = query.pages.tolist()
        for step in query.decode:
            pages = []
            for position in range(len(step.mass)):
                # A page that is not full yet belongs to its request alone.
                name = known[position] if position < len(known) else (order, position)
                number = numbers.setdefault(name, len(numbers))
                if number == len(positions):
                    positions.append(position)
                pages.append(number)
            steps.append(
                StepScores(
                    np.array(pages, dtype=np.int64),
                    step.mass.astype(np.float64),
                    step.peak.astype(np.float64),
                )
            )
    first = queries[0]
    return Stream(kind, reading, first.input_tokens, len(numbers), np.array(positions, dtype=np.int64), steps)
