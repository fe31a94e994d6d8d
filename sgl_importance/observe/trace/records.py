"""The record types of a recording. Version 1; every segment file repeats the header and the field names."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1

Vector = npt.NDArray[Any]
"""One number per page, page 0 of the sequence first."""


class Detail(StrEnum):
    """Level of detail of a recording."""

    FOLDS = "folds"
    """Requests, tree events and one page vector per fold."""
    STEPS = "steps"
    """Beside them the page vectors of every emitting forward pass."""


class EventKind(StrEnum):
    INSERT = "insert"
    HIT = "hit"
    SPLIT = "split"
    EVICT = "evict"
    BACK_UP = "back_up"
    LOAD_BACK = "load_back"
    REMOVE = "remove"
    RESET = "reset"


class _Record(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


class Header(_Record, frozen=True):
    """The first record of every segment file.

    Attributes:
        version: of the format.
        run: identifies one life of one server; segments of the same run share request numbers.
        segment: number of the segment within the directory.
        schema: field names by record type, in the order of the fields on disk.
        created: seconds since the epoch at the start of the run.
        page_size: tokens per page.
        digest: how page digests are made.
        model: name or path of the model, without its folders.
        layers: attention layers that emit; empty where not known.
        options: settings of the importance signal, by name, and those of sglang that shadow caches ask for.
        capacity_tokens: size of each tier that the server sized, in tokens; of the host from the first
            request on, when the header is repeated.
        cost: constants of the cost model, by name.
        detail: how much is recorded.
    """

    version: int
    run: str
    segment: int
    schema: dict[str, tuple[str, ...]]
    created: float
    page_size: int
    digest: str
    model: str
    layers: tuple[int, ...]
    options: dict[str, Any]
    capacity_tokens: dict[str, int]
    cost: dict[str, float]
    detail: Detail


class Pages(_Record, frozen=True):
    """Pages that this segment file has not named yet; they are numbered on from ``first``.

    Attributes:
        first: number of the first page.
        digests: chained digests of 16 bytes each, concatenated.
    """

    first: int
    digests: bytes


class RequestAdmitted(_Record, frozen=True):
    """A request entered the running batch.

    Attributes:
        request: number of the request within the run, from 0, in order of first sight.
        rid: sglang's id of the request.
        clock: admitted requests so far, this one included; the serial of its query.
        microseconds: since the start of the run.
        queued_microseconds: between the request's arrival at the scheduler and its admission.
        input_tokens: prompt length.
        cached_tokens: prompt tokens found in the cache, by tier.
        pages: whole pages of the prompt. On disk runs of (first page, number of pages), after reading page
            numbers that are dense within the directory; int64.
    """

    request: int
    rid: str
    clock: int
    microseconds: int
    queued_microseconds: int
    input_tokens: int
    cached_tokens: dict[str, int]
    pages: Vector


class RequestFinished(_Record, frozen=True):
    """A request ended, or lost its KV for the time being.

    Attributes:
        reason: "length", "stop", "abort", "retracted" or sglang's word for it.
        output_tokens: generated tokens so far.
        pages: whole pages of prompt and output, as in ``RequestAdmitted``.
        answer_end: what the answer ended with: "tool_call", "end_of_turn", "length", "abort", or "unknown",
            as it is in recordings that were written before the field was there. An ``AnswerTold`` that
            follows amends "unknown".
    """

    request: int
    clock: int
    microseconds: int
    reason: str
    output_tokens: int
    pages: Vector
    answer_end: str = "unknown"


class AnswerTold(_Record, frozen=True):
    """It became known how the answer of a request had ended, behind its ``RequestFinished``.

    Attributes:
        clock: admitted requests by then.
        microseconds: since the start of the run.
        answer_end: as in ``RequestFinished``, and never "unknown".
    """

    request: int
    clock: int
    microseconds: int
    answer_end: str


class Fold(_Record, frozen=True):
    """Page scores of one phase of a request, as folded into the nodes of its path.

    Attributes:
        query: serial of the query.
        weight: share of the query that the fold stands for.
        first: whether it is the query's first fold.
        body: body mass per page, sums to 1; float32 [num_pages].
        peak: largest probability per page; float32 [num_pages].
    """

    request: int
    query: int
    clock: int
    weight: float
    first: bool
    body: Vector
    peak: Vector


class Step(_Record, frozen=True):
    """Page scores of one request in one emitting forward pass.

    Attributes:
        phase: "prefill" or "decode".
        seq_len: tokens of the sequence, the query tokens included.
        query_tokens: observed query tokens, the last ones of the sequence.
        mass: mean attention mass per page, sums to 1; float16 [num_pages].
        body: mean body mass per page; float16 [num_pages].
        peak: maximum over heads, layers and query tokens; float16 [num_pages].
    """

    request: int
    phase: str
    seq_len: int
    query_tokens: int
    mass: Vector
    body: Vector
    peak: Vector


class PageLists(_Record, frozen=True):
    """The pages that one token of a request attends to most, and those that it read where a selector chose.

    Pages are counted from the start of the sequence. The token is the last one of its pass: a generated one,
    or the last of a prompt or of its part.

    Attributes:
        forward_pass: number of the pass within the run, from 1.
        seq_len: tokens that it sees, itself included.
        new_tokens: tokens of the request that the pass computes, the last of which it is.
        layers: attention layers, in the order of the lists.
        kv_heads: of each layer.
        pages: of largest attention mass, best first; uint16 or uint32 [layers, kv_heads, listed pages].
        mass: of these pages, mean over the query heads of the KV head; float16, the same shape. The masses
            of all pages of the context would sum to 1, or to what the head's sink leaves.
        num_read: pages that a selector chose, of each layer; -1 where the token read all.
        read: these pages, those of a layer ascending; uint16 or uint32 [sum of ``num_read``].
        shares: of its attention that the selector estimated there; float32, the same shape.
    """

    request: int
    forward_pass: int
    seq_len: int
    new_tokens: int
    layers: tuple[int, ...]
    kv_heads: int
    pages: Vector
    mass: Vector
    num_read: tuple[int, ...]
    read: Vector
    shares: Vector


class TreeEvent(_Record, frozen=True):
    """Something happened to a node of the radix tree.

    Attributes:
        kind: of event. A split names the new parent, whose pages were cut off its child's; a removal
            means that no tier holds the node any more; an insert of a known node, which only lower tiers
            held, that it was computed again.
        tier: tier that it happened on; where several could be meant, the upper one.
        clock: admitted requests so far.
        request: request that caused it; None where none did, or it is not known.
        node: id of the node within the run; 0 for a reset.
        parent: id of its parent; for a split the child's.
        depth_pages: pages between the root and the node.
        num_pages: pages of the node.
        digest: chained digest of the node's last page, which names the whole path; empty for a reset.
    """

    kind: EventKind
    tier: str
    clock: int
    request: int | None
    node: int
    parent: int
    depth_pages: int
    num_pages: int
    digest: bytes


class Dropped(_Record, frozen=True):
    """Records that the writer could not keep up with are missing here.

    Attributes:
        records: how many, since the last record of this kind.
    """

    records: int


Record = (
    Header
    | Pages
    | RequestAdmitted
    | RequestFinished
    | AnswerTold
    | Fold
    | Step
    | PageLists
    | TreeEvent
    | Dropped
)

RECORD_TYPES: tuple[type[_Record], ...] = get_args(Record)
SCHEMA = {record.__name__: record.__struct_fields__ for record in RECORD_TYPES}

_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f2"),
    2: np.dtype("<f4"),
    3: np.dtype("<u4"),
    4: np.dtype("<i8"),
    5: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_CODES[value.dtype], value.tobytes())
    raise NotImplementedError(type(value))


def _ext_hook(code: int, data: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.ValidationError(f"arrays of type {code} are not known")
    return np.frombuffer(bytes(data), _DTYPES[code])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record, ext_hook=_ext_hook)


def encode(record: Record) -> bytes:
    """One record as MessagePack: an array of its type's name and its fields; arrays of numbers as
    extensions 1 to 5 (little-endian float16, float32, uint32, int64, uint16)."""
    return _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """Raises:
    msgspec.MsgspecError, ValueError, RecursionError: the payload is none of our records.
    """
    return _decoder.decode(payload)
