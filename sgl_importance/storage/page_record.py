"""The record of one page: a header that says what the page is, and the page's bytes.

==========  =====  =============================================================
field       bytes  meaning
==========  =====  =============================================================
magic       8      tells a page from any other file
version     2      of this format
reserved    2      zero
depth       4      pages in front of this one in its sequence
length      8      bytes of the body
page        32     digest of the page's key (its tokens and all tokens before)
identity    32     digest of the model that computed it (``ModelIdentity``)
body_crc    4      CRC-32C of the body
header_crc  4      CRC-32C of all fields above
==========  =====  =============================================================

Little-endian. The body is what upstream's file backend would store: the page as the host pool lays it out.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sgl_importance.errors import ImportanceError
from sgl_importance.storage.checksum import crc32c

MAGIC = b"KVPAGE\x1a\n"
VERSION = 1
DIGEST_BYTES = 32

_FIELDS = struct.Struct(f"<8sHHIQ{DIGEST_BYTES}s{DIGEST_BYTES}sI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


class MissReason(StrEnum):
    """The reason why a page was not served from storage."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    IDENTITY = "identity"
    PAGE = "page"
    LENGTH = "length"
    BODY = "body"
    TIMEOUT = "timeout"
    IO = "io"
    WEIGHTS = "weights"


class PageMiss(ImportanceError):
    """A page cannot be served."""

    def __init__(self, reason: MissReason) -> None:
        self.reason = reason
        super().__init__(reason.value)


class PageDamaged(PageMiss):
    """There is a page, and it is not what was asked for."""


@dataclass(frozen=True, slots=True)
class PageHeader:
    """A header that is intact: its fields are what was written."""

    depth: int
    length: int
    page: bytes
    identity: bytes
    body_crc: int


def page_digest(key: str) -> bytes:
    """32 bytes that stand for a key of upstream's (a chained SHA-256 of tokens, in hexadecimal)."""
    return blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def encode_header(*, page: bytes, identity: bytes, depth: int, body: NDArray[np.uint8]) -> bytes:
    """The header [HEADER_BYTES] of a page whose body is ``body`` [length]."""
    fields = _FIELDS.pack(MAGIC, VERSION, 0, depth, body.nbytes, page, identity, crc32c(body))
    return fields + _CRC.pack(crc32c(fields))


def decode_header(raw: bytes) -> PageHeader:
    """Reads the header of a record.

    Raises:
        PageDamaged: ``raw`` is no intact header of this version.
    """
    if len(raw) < HEADER_BYTES:
        raise PageDamaged(MissReason.TRUNCATED)
    fields = raw[: _FIELDS.size]
    magic, version, _, depth, length, page, identity, body_crc = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise PageDamaged(MissReason.MAGIC)
    # Before the version: a flipped bit there is damage, not another format.
    if _CRC.unpack_from(raw, _FIELDS.size) != (crc32c(fields),):
        raise PageDamaged(MissReason.HEADER)
    if version != VERSION:
        raise PageDamaged(MissReason.VERSION)
    return PageHeader(depth, length, page, identity, body_crc)


def check_page(raw: bytes, body: NDArray[np.uint8], *, page: bytes, identity: bytes) -> None:
    """Checks that ``raw`` and ``body`` [length] are the page asked for, of the model asked for.

    Raises:
        PageDamaged: they are not.
    """
    header = decode_header(raw)
    if header.identity != identity:
        raise PageDamaged(MissReason.IDENTITY)
    if header.page != page:
        raise PageDamaged(MissReason.PAGE)
    if header.length != body.nbytes:
        raise PageDamaged(MissReason.LENGTH)
    if crc32c(body) != header.body_crc:
        raise PageDamaged(MissReason.BODY)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model and the shape of its pages: equal identities compute interchangeable pages.

    Attributes:
        weights: fingerprint of every parameter and buffer in memory, after loading.
        weights_version: the operator's label for them.
        config: digest of the model's configuration.
        dtype: element type of the KV cache.
        layout: order of a page's axes in the host pool.
        page_size: tokens per page.
        page_bytes: bytes of a page on one rank.
        layers, heads, head_dim: shape of a token's KV on one rank.
        tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size: which part of the model the rank holds.
        sglang: version of sglang.
    """

    weights: str
    weights_version: str
    config: str
    dtype: str
    layout: str
    page_size: int
    page_bytes: int
    layers: int
    heads: int
    head_dim: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    sglang: str

    def digest(self) -> bytes:
        """32 bytes that differ wherever any attribute differs."""
        return blake2b(self.to_json().encode(), digest_size=DIGEST_BYTES).digest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)
