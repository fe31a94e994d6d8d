"""The requests of a recording as a load: arrival time, prompt pages and lengths of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sgl_importance.observe.trace.reader import TraceReader
from sgl_importance.observe.trace.records import AnswerTold, RequestAdmitted, RequestFinished, Vector

HEALTH_CHECK_PREFIX = "HEALTH_CHECK"  # how sglang's own requests are named


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        rid: sglang's id of the request, or the one that the client chose.
        seconds: arrival at the scheduler, from the start of the run that began first.
        pages: dense numbers of the prompt's whole pages; int64 [input tokens // page size].
        input_tokens: prompt length.
        output_tokens: generated tokens; 0 where the end was not recorded.
        cached_tokens: prompt tokens that the recording server found in its cache.
        has_partial_page: whether prompt tokens follow the last whole page.
        answer_end: as in ``RequestFinished``, or as it was told later; "unknown" where neither was recorded.
        answer_pages: that the answer filled, behind the prompt's whole pages; as ``pages``.
    """

    rid: str
    seconds: float
    pages: Vector
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    has_partial_page: bool
    answer_end: str = "unknown"
    answer_pages: Sequence[int] = ()


def arrivals(reader: TraceReader, *, health_checks: bool = False) -> list[Arrival]:
    """Requests of a recording in order of arrival.

    Args:
        reader: of the recording.
        health_checks: whether the server's own requests count too.
    """
    page_size = reader.header.page_size
    admitted: dict[tuple[int, int], RequestAdmitted] = {}
    finished: dict[tuple[int, int], RequestFinished] = {}
    told: dict[tuple[int, int], str] = {}
    for record in reader:
        run = reader.run
        match record:
            case RequestAdmitted():
                if health_checks or not record.rid.startswith(HEALTH_CHECK_PREFIX):
                    admitted[run, record.request] = record
            case RequestFinished():
                finished[run, record.request] = record
            case AnswerTold():
                told[run, record.request] = record.answer_end
    starts = [header.created for header in reader.headers]
    began = min(starts, default=0.0)  # not the first run's: a clock may have been put back between two
    found = []
    for key, record in admitted.items():
        seconds = max(0, record.microseconds - record.queued_microseconds) / 1e6
        end = finished.get(key)
        found.append(
            Arrival(
                rid=record.rid,
                seconds=starts[key[0]] - began + seconds,
                pages=record.pages,
                input_tokens=record.input_tokens,
                output_tokens=end.output_tokens if end else 0,
                cached_tokens=sum(record.cached_tokens.values()),
                has_partial_page=record.input_tokens > len(record.pages) * page_size,
                answer_end=told.get(key) or (end.answer_end if end else "unknown"),
                answer_pages=end.pages.tolist()[len(record.pages) :] if end else (),
            )
        )
    return sorted(found, key=lambda arrival: arrival.seconds)


def mooncake_rows(requests: Iterable[Arrival]) -> Iterator[dict[str, object]]:
    """Rows of the format of Mooncake's published traces (github.com/kvcache-ai/Mooncake, FAST 2025).

    ``hash_ids`` are dense and stand for a page and everything before it. A last page that is filled in part
    gets an id of its own, as the format wants: a radix cache keeps whole pages, so none hits it. Mooncake's
    own blocks have 512 tokens, these have the server's page size.
    """
    ids: dict[object, int] = {}
    for number, request in enumerate(requests):
        names: list[object] = request.pages.tolist()
        if request.has_partial_page:
            names.append(("partial", number))
        yield {
            "timestamp": round(request.seconds * 1000),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [ids.setdefault(name, len(ids)) for name in names],
        }
