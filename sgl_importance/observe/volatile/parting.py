"""The place where two prompts part, if they go on alike behind it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

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


MAX_FIELD = 512
"""Tokens of the longest text that counts as a field in front of stable text."""
MIN_RUN = 64
"""Tokens behind a field that must be alike: fewer are what a chat's template repeats."""

_PROBES = (16, 64, 256, MAX_FIELD)  # tokens behind the place: one of them lies behind a field that is shorter
_PROBE_TOKENS = 16
_MAX_FOUND = 8


class Parting(NamedTuple):
    """Two prompts with a field that differs.

    Attributes:
        start: tokens in front of the field, which both have.
        end: of the field in the one prompt, in tokens from its start.
        known_end: of the field in the other.
        run_end: of the text that both have behind the field, in tokens of the one prompt.
    """

    start: int
    end: int
    known_end: int
    run_end: int

    @property
    def run(self) -> int:
        """Tokens that both have behind the field."""
        return self.run_end - self.end


def parting(ids: Ids, known: Ids) -> Parting | None:
    """Where ``ids`` parts from ``known`` and joins it again; None where it does not do both."""
    start = common_prefix(ids, known)
    if start == min(len(ids), len(known)):
        return None
    for offset in _PROBES:
        joined = _joined(ids, known, start, start + offset)
        if joined is not None and joined.run >= MIN_RUN:
            return joined
    return None


def _joined(ids: Ids, known: Ids, start: int, at: int) -> Parting | None:
    """The longest run of both around ``at`` in ``ids``; None where none lies behind a field of MAX_FIELD."""
    probe = ids[at : at + _PROBE_TOKENS].tobytes()
    if len(probe) < _PROBE_TOKENS * ids.itemsize:
        return None
    around = known[start : at + MAX_FIELD + _PROBE_TOKENS].tobytes()
    best: Parting | None = None
    found = around.find(probe)
    for _ in range(_MAX_FOUND):
        if found < 0:
            break
        if found % ids.itemsize == 0:
            known_at = start + found // ids.itemsize
            before = _common_suffix(ids[start:at], known[start:known_at])
            run_end = at + common_prefix(ids[at:], known[known_at:])
            each = Parting(start, at - before, known_at - before, run_end)
            if best is None or each.run > best.run:
                best = each
        found = around.find(probe, found + 1)
    return best


def _common_suffix(first: Ids, second: Ids) -> int:
    return common_prefix(first[::-1], second[::-1])
