"""Modes that run without page scores: nobody has read their attention rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PAIRED_KEYS = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms of speculative decoding whose radix tree looks each token up with the one behind it."""
SPECULATION = ("NGRAM", "STANDALONE", *PAIRED_KEYS)
"""Algorithms that a policy runs beside."""
FP8 = ("fp8_e4m3", "fp8_e5m2")


def unscored_modes(args: Any) -> Iterator[str]:
    """The modes that are on, each with its flag, as in a sentence.

    A step that verifies drafts asks several queries for each request, most of them of tokens that are thrown
    away. A quantized key is a key only with its scale, which no producer reads.

    Args:
        args: sglang's arguments as typed or as resolved; a field that is absent counts as off.
    """
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm is not None:
        yield f"speculative decoding (--speculative-algorithm {algorithm})"
    dtype = getattr(args, "kv_cache_dtype", None)
    if dtype in FP8:
        yield f"a quantized KV cache (--kv-cache-dtype {dtype})"
