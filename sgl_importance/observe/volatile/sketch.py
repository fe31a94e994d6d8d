"""A few hashes that prompts with mostly the same beginning have in common, wherever they part.

The smallest hashes of the runs of GRAM tokens in the head of a prompt: two prompts share each of them with
the probability that one of their runs is in both (Broder, On the resemblance and containment of documents,
1997). A prefix would not do, since text that changes may stand in front of everything.
"""

from __future__ import annotations

import numpy as np

from sgl_importance.observe.volatile.token_ids import Ids

HEAD = 512
"""Tokens whose runs are hashed."""
GRAM = 16
HASHES = 8

_BASE = 0x9E3779B97F4A7C15  # odd, without a pattern in its bits
_MASK = (1 << 64) - 1
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def sketch(ids: Ids) -> list[int]:
    """At most HASHES distinct hashes; none of fewer than GRAM tokens."""
    hashes = ids[:HEAD].astype(np.uint64) + np.uint64(1)
    width, factor = 1, _BASE
    while width < GRAM:  # runs of twice the width are made of two neighbours
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor & _MASK
    if not len(hashes):
        return []
    hashes ^= hashes >> np.uint64(31)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    few = min(2 * HASHES, len(hashes))  # some may be the same
    smallest: set[int] = set(np.partition(hashes, few - 1)[:few].tolist())
    return sorted(smallest)[:HASHES]
