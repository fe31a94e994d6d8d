"""The page lists of a recording, request by request: which pages each token wanted, and which it read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.reader import TraceError, open_trace
from sgl_importance.observe.trace.records import Header, PageLists, RequestAdmitted, RequestFinished

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class ListedRequest:
    """One request whose lists were recorded.

    Attributes:
        rid: of the request.
        input_tokens: prompt length.
        output_tokens: generated tokens; 0 where the end was not recorded.
        pages: numbers of the pages of its sequence; int64. Requests that share a prefix share numbers.
        whole_pages: how many of them a tree would keep: the last one is its own as long as it is not full.
    """

    rid: str
    input_tokens: int
    output_tokens: int = 0
    pages: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    whole_pages: int = 0

    @property
    def kind(self) -> str:
        """Kind of workload, from a request id "kind/session/number"; others have none."""
        kind, slash, _ = self.rid.partition("/")
        return kind if slash else "recorded"


@dataclass(frozen=True, slots=True)
class PageStep:
    """One token of a request: a generated one, or the last of a prompt or of its part.

    Pages are counted from the start of the sequence; ``ListedRequest.pages`` has their numbers.

    Attributes:
        request: index among the requests of the recording.
        forward_pass: number of the pass; steps of one batch share it.
        seq_len: tokens that it sees, itself included.
        new_tokens: tokens of the request that the pass computed, the last of which it is.
        is_generated: whether the token is of the answer, not of the prompt.
        is_behind: whether nobody asked for what it yields: under overlap scheduling a step runs behind the
            last token of an answer.
        layers: attention layers of the lists.
        wanted: pages of largest attention mass, best first; int64 [layers, KV heads, listed pages].
        mass: of these, float32, the same shape. Those of all pages would sum to 1.
        read: pages that a selector chose, ascending, int64, with the share of attention that it estimated in
            each, float32; of each layer, None where all pages were read.
    """

    request: int
    forward_pass: int
    seq_len: int
    new_tokens: int
    is_generated: bool
    is_behind: bool
    layers: tuple[int, ...]
    wanted: Numbers
    mass: Floats
    read: tuple[tuple[Numbers, Floats] | None, ...]


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request ended; ``request`` is its index."""

    request: int


@dataclass(frozen=True, slots=True)
class PageRecording:
    """Page lists of one recording, whole in memory.

    Attributes:
        name: of its directory.
        header: of its first run.
        requests: in the order of their admission.
        events: steps and ends of requests, in the order in which they were recorded.
        num_pages: different pages; ``ListedRequest.pages`` are below it.
        left_out: lists of requests whose admission the recording does not have any more.
    """

    name: str
    header: Header
    requests: Sequence[ListedRequest]
    events: Sequence[PageStep | RequestEnd]
    num_pages: int
    left_out: int

    @property
    def page_size(self) -> int:
        return self.header.page_size

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def steps(self) -> list[PageStep]:
        return [event for event in self.events if isinstance(event, PageStep)]


def load_page_steps(directory: Path) -> PageRecording:
    """Reads the page lists of a recording; those of the server's own requests are left out.

    Raises:
        TraceError: there is no recording, or one without page lists, or one whose lists cannot be right.
    """
    reader = open_trace(directory)
    admitted: dict[tuple[int, int], RequestAdmitted] = {}
    finished: dict[tuple[int, int], RequestFinished] = {}
    events: list[tuple[tuple[int, int], PageLists | RequestFinished]] = []
    for record in reader:
        run = reader.run
        match record:
            case RequestAdmitted():
                admitted.setdefault((run, record.request), record)
            case RequestFinished():
                finished[run, record.request] = record
                events.append(((run, record.request), record))
            case PageLists():
                events.append(((run, record.request), record))
    if not any(isinstance(record, PageLists) for _, record in events):
        raise TraceError(
            f"{directory} holds no page lists: record with trace.pages = 0.4 of --kv-importance-config, or "
            "another share"
        )
    served = {
        key: record for key, record in admitted.items() if not record.rid.startswith(HEALTH_CHECK_PREFIX)
    }
    index = {key: at for at, key in enumerate(served)}
    requests, num_pages = _requests(served, finished, _lengths(events), reader.header.page_size)
    found: list[PageStep | RequestEnd] = []
    for key, record in events:
        if key not in index:
            continue
        if isinstance(record, PageLists):
            found.append(_step(record, index[key], requests[index[key]], reader.header, directory))
        elif record.reason != "retracted":
            found.append(RequestEnd(index[key]))
    left_out = sum(key not in admitted for key, record in events if isinstance(record, PageLists))
    return PageRecording(directory.name, reader.header, requests, found, num_pages, left_out)


def _lengths(
    events: Sequence[tuple[tuple[int, int], PageLists | RequestFinished]],
) -> dict[tuple[int, int], int]:
    """Tokens of the longest sequence that each request was seen with."""
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    for key, record in events:
        if isinstance(record, PageLists):
            lengths[key] = max(lengths[key], record.seq_len)
    return lengths


def _requests(
    admitted: dict[tuple[int, int], RequestAdmitted],
    finished: dict[tuple[int, int], RequestFinished],
    lengths: dict[tuple[int, int], int],
    page_size: int,
) -> tuple[list[ListedRequest], int]:
    """Requests with the numbers of their pages, and how many numbers there are."""
    numbers: dict[object, int] = {}
    requests = []
    for key, record in admitted.items():
        end = finished.get(key)
        known = (record if end is None or len(end.pages) < len(record.pages) else end).pages.tolist()
        needed = max(len(known), -(-lengths.get(key, 0) // page_size))
        # A page that was not full when it was last named belongs to its request alone.
        names: list[object] = [*known, *((key, position) for position in range(len(known), needed))]
        pages = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        requests.append(
            ListedRequest(
                record.rid, record.input_tokens, 0 if end is None else end.output_tokens, pages, len(known)
            )
        )
    return requests, len(numbers)


def _step(record: PageLists, index: int, request: ListedRequest, header: Header, directory: Path) -> PageStep:
    shape = (len(record.layers), record.kv_heads, -1)
    num_pages = -(-record.seq_len // header.page_size)
    ends = np.cumsum([max(count, 0) for count in record.num_read])
    lists = len(record.layers) * record.kv_heads
    is_whole = (
        lists > 0
        and len(record.pages) == len(record.mass)
        and len(record.pages) % lists == 0
        and len(record.num_read) == len(record.layers)
        and len(record.read) == len(record.shares) == int(ends[-1])
        and 0 < record.new_tokens <= record.seq_len
        and all(int(pages.max(initial=0)) < num_pages for pages in (record.pages, record.read))
    )
    if not is_whole:
        raise TraceError(f"{directory} holds page lists that cannot be right: record again")
    end = request.input_tokens + request.output_tokens
    return PageStep(
        request=index,
        forward_pass=record.forward_pass,
        seq_len=record.seq_len,
        new_tokens=record.new_tokens,
        is_generated=record.seq_len > request.input_tokens,
        is_behind=bool(request.output_tokens) and record.seq_len >= end,
        layers=record.layers,
        wanted=record.pages.reshape(shape).astype(np.int64),
        mass=record.mass.reshape(shape).astype(np.float32),
        read=tuple(
            None
            if count < 0
            else (
                record.read[end - count : end].astype(np.int64),
                record.shares[end - count : end].astype(np.float32),
            )
            for count, end in zip(record.num_read, ends.tolist(), strict=True)
        ),
    )
