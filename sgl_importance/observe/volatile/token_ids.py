"""Token ids of a prompt as an array that can be compared at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, int32 [tokens]."""

_CHUNK = 1024


def token_ids(tokens: Sequence[int], limit: int) -> Ids:
    """A copy of the first ``limit`` tokens."""
    head = tokens[:limit]
    if isinstance(head, array) and head.typecode == "q":
        return np.frombuffer(head, np.int64).astype(np.int32)
    return np.array(head, np.int32)


def common_prefix(first: Ids, second: Ids) -> int:
    """Tokens that both begin with."""
    end = min(len(first), len(second))
    for start in range(0, end, _CHUNK):
        differs = first[start : min(start + _CHUNK, end)] != second[start : min(start + _CHUNK, end)]
        place = int(differs.argmax())
        if differs[place]:
            return start + place
    return end
