"""What policies that follow sessions know of the requests of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
NO_REQUEST = -1


@dataclass(frozen=True, slots=True)
class SessionRequests:
    """Requests of a trace with their sessions, each read off nothing but what came before it.

    Attributes:
        blocks: as ``Trace.blocks``; int64 [accesses].
        offsets: as ``Trace.offsets``; int64 [requests + 1].
        seconds: when each request came; float64 [requests].
        tokens: of its prompt and its answer; int64 [requests].
        called_tool: whether its answer ended with the call of a tool; bool [requests].
        before: the request of the same session whose text it goes on from, or NO_REQUEST; int64 [requests].
        turns: its place in its session, 1 for the first request; int64 [requests].
    """

    blocks: IntArray
    offsets: IntArray
    seconds: NDArray[np.float64]
    tokens: IntArray
    called_tool: NDArray[np.bool_]
    before: IntArray
    turns: IntArray

    @classmethod
    def of(
        cls,
        blocks: IntArray,
        offsets: IntArray,
        seconds: NDArray[np.float64],
        tokens: IntArray,
        called_tool: NDArray[np.bool_],
        before: IntArray,
    ) -> SessionRequests:
        """Follows ``before`` through each session; the arguments are the attributes."""
        turns = np.ones(len(before), dtype=np.int64)
        for request in np.flatnonzero(before != NO_REQUEST).tolist():
            turns[request] = turns[before[request]] + 1
        return cls(blocks, offsets, seconds, tokens, called_tool, before, turns)
