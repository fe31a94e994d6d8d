"""A recording as the studies read it: one object per query, with all of its page scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.records import Fold, Header, RequestAdmitted, RequestFinished, Step, Vector

Scores = npt.NDArray[np.float64]
UNKNOWN_KIND = "recorded"


@dataclass(slots=True)
class Query:
    """One request.

    Attributes:
        rid: of the request.
        clock: its serial; queries come in this order.
        prompt_pages: dense numbers of the prompt's whole pages.
        pages: the same of prompt and output; equal to ``prompt_pages`` until the end was recorded.
        input_tokens: prompt length.
        output_tokens: generated tokens.
        cached_tokens: prompt tokens that the recording server found in its cache.
        folds: in the order of their events.
        prefill: emitting prefill passes.
        decode: emitting decode steps whose token was part of the answer.
    """

    rid: str
    clock: int
    prompt_pages: Vector
    pages: Vector
    input_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    folds: list[Fold] = field(default_factory=list)
    prefill: list[Step] = field(default_factory=list)
    decode: list[Step] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Kind of workload, from a request id "kind/session/number"; others have none."""
        kind, slash, _ = self.rid.partition("/")
        return kind if slash else UNKNOWN_KIND

    def add_step(self, step: Step) -> None:
        (self.prefill if step.phase == "prefill" else self.decode).append(step)

    def body(self) -> Scores:
        """Share of the query's attention on each page: its folds by their weights; sums to 1 if any."""
        return self._seen("body")

    def peak(self) -> Scores:
        """As ``body``, the folds' peaks."""
        return self._seen("peak")

    def _seen(self, quantity: str) -> Scores:
        total = np.zeros(max((len(fold.body) for fold in self.folds), default=0))
        weight = sum(fold.weight for fold in self.folds)
        for fold in self.folds:
            vector = getattr(fold, quantity)
            total[: len(vector)] += fold.weight / weight * vector
        return total


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording.

    Attributes:
        name: of its directory.
        headers: of its runs; settings are those of the first.
        queries: in the order of their admission.
        digests: chained digest of each page number.
    """

    name: str
    headers: Sequence[Header]
    queries: Sequence[Query]
    digests: Sequence[bytes]

    @property
    def header(self) -> Header:
        return self.headers[0]

    @property
    def page_size(self) -> int:
        return self.header.page_size

    @property
    def num_requests(self) -> int:
        return len(self.queries)


def load_recording(directory: Path) -> Recording:
    """Reads a whole recording; the server's own requests are left out.

    Raises:
        sgl_importance.observe.trace.TraceError: there is no recording.
    """
    reader = open_trace(directory)
    queries: dict[tuple[int, int], Query] = {}
    # A request is admitted when its prefill is processed; under overlap its first decode step ran by then.
    early: dict[tuple[int, int], list[Step]] = {}
    for record in reader:
        run = reader.run
        match record:
            case RequestAdmitted():
                query = Query(
                    record.rid,
                    record.clock,
                    record.pages,
                    record.pages,
                    record.input_tokens,
                    cached_tokens=sum(record.cached_tokens.values()),
                )
                queries[run, record.request] = query
                for step in early.pop((run, record.request), ()):
                    query.add_step(step)
            case RequestFinished() if (run, record.request) in queries:
                query = queries[run, record.request]
                query.pages = record.pages
                query.output_tokens = record.output_tokens
            case Fold() if (run, record.request) in queries:
                queries[run, record.request].folds.append(record)
            case Step():
                known = queries.get((run, record.request))
                if known is None:
                    early.setdefault((run, record.request), []).append(record)
                else:
                    known.add_step(record)
    for query in queries.values():
        # The step behind the last token, which overlap scheduling runs, is no part of the answer.
        end = query.input_tokens + query.output_tokens
        query.decode = [step for step in query.decode if step.seq_len < end or not query.output_tokens]
    found = [query for query in queries.values() if not query.rid.startswith(HEALTH_CHECK_PREFIX)]
    return Recording(directory.name, tuple(reader.headers), found, reader.digests)
