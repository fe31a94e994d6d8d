"""Token ids of a prompt as an array that can be compared at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, int32 [tokens]."""

_CHUNK = 256


def token_ids(tokens: Sequence[int], limit: int) -> Ids:
    """A copy of the first ``limit`` tokens."""
    head = tokens[:limit]
    if isinstance(head, array) and head.typecode == "q":
        return np.frombuffer(head, np.int64).astype(np.int32)
    return np.array(head, np.int32)


def common_prefix(first: Ids, second: Ids) -> int:
    """Tokens that both begin with."""
    end = min(len(first), len(second))
    start, stop = 0, _CHUNK
    while start < end:  # most prompts part early: to compare all of them takes longest
        differs = first[start : min(stop, end)] != second[start : min(stop, end)]
        place = int(differs.argmax())
        if differs[place]:
            return start + place
        start, stop = stop, 4 * stop
    return end
