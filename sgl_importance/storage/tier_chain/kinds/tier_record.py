"""The record of a page in a tier: that of the verified store, whose body also says what the page continues.

The body is the page, then ``page`` of the record in front of it (32 bytes, zero for the first of a sequence)
and the moment when it was stored (8 bytes, ns). All of it is under the record's checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_importance.storage.page_record import (
    DIGEST_BYTES,
    HEADER_BYTES,
    PageDamaged,
    PageHeader,
    check_page,
    decode_header,
    encode_header,
)

_LINK = struct.Struct(f"<{DIGEST_BYTES}sQ")
LINK_BYTES = _LINK.size
NO_PAGE = bytes(DIGEST_BYTES)

Bytes = NDArray[np.uint8]


class PageName(NamedTuple):
    """Digests of the model and of the page's key (``storage.page_record``)."""

    identity: bytes
    page: bytes


class Listed(NamedTuple):
    """A record as a tier lists it, without a look at its body.

    Attributes:
        parent: digest of the page in front of it; ``NO_PAGE`` for the first of a sequence.
        depth: pages in front of it.
        moment: when it was stored, in ns.
    """

    name: PageName
    parent: bytes
    depth: int
    moment: int


def record_bytes(page_bytes: int) -> int:
    """Size of the record of a page."""
    return HEADER_BYTES + page_bytes + LINK_BYTES


def make_record(name: PageName, page: Bytes, *, parent: bytes, depth: int, moment: int) -> Bytes:
    """The record [record_bytes(len(page))] of a page."""
    record = np.empty(record_bytes(page.nbytes), np.uint8)
    body = record[HEADER_BYTES:]
    body[: page.nbytes] = page
    body[page.nbytes :] = np.frombuffer(_LINK.pack(parent, moment), np.uint8)
    header = encode_header(page=name.page, identity=name.identity, depth=depth, body=body)
    record[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
    return record


def check_record(record: Bytes, name: PageName) -> Bytes:
    """The page in a record, once it is known to be the one of this name.

    Raises:
        PageDamaged: it is not.
    """
    body = record[HEADER_BYTES:]
    check_page(record[:HEADER_BYTES].tobytes(), body, page=name.page, identity=name.identity)
    return body[: body.nbytes - LINK_BYTES]


def list_record(header: bytes, link: bytes) -> Listed | None:
    """What a header and a link say of their record; None where the header is not intact."""
    try:
        fields: PageHeader = decode_header(header)
    except PageDamaged:
        return None
    parent, moment = _LINK.unpack(link)
    return Listed(PageName(fields.identity, fields.page), parent, fields.depth, moment)


class FoundPage(NamedTuple):
    """What a tier lists, and the level of that tier."""

    level: int
    listed: Listed


def by_sequence(found: Iterable[FoundPage]) -> list[FoundPage]:
    """Sequences that were stored last come first, each from its start on.

    A page counts as stored when the last page was that continues it: where not all find room, what is left is
    whole prefixes, and a prefix that many share is not the first to go because it is old. Of a page that is
    in two tiers, the one in the faster tier comes first.
    """
    pages = sorted(found, key=lambda page: -page.listed.depth)
    last: dict[PageName, int] = {}
    for _, listed in pages:
        moment = last[listed.name] = max(last.get(listed.name, 0), listed.moment)
        if listed.parent != NO_PAGE:
            parent = PageName(listed.name.identity, listed.parent)
            last[parent] = max(last.get(parent, 0), moment)
    return sorted(pages, key=lambda page: (-last[page.listed.name], page.listed.depth, page.level))
