"""Everything but its tokens that a page of KV cache depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from sgl_importance.storage.page_record import DIGEST_BYTES


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
