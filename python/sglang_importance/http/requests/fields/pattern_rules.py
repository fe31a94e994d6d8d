"""Rules for ``stop_regex``, which sglang's scheduler searches in every step with Python's ``re``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sglang_importance.http.requests.fields.refusal import shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts

# Part of Python's own re; sglang reads patterns with it too (sampling/sampling_params.py).
sre: Any = re._parser

MAX_BYTES = 256
MAX_PATTERNS = 32
MAX_OPEN_REPEATS = 2
"""Of no fixed length: a search takes time by this power of the answer's length."""


def stop_patterns(value: Any, server: ServerFacts) -> str | None:
    """One regular expression, or a list of them."""
    if not isinstance(value, list | tuple):
        return _pattern(value)
    if len(value) > MAX_PATTERNS:
        return f"is a list of {len(value)}: give at most {MAX_PATTERNS}"
    return next((problem for each in value if (problem := _pattern(each))), None)


def _pattern(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be a regular expression, not {shown(value)}"
    if len(value) > MAX_BYTES or len(value.encode(errors="replace")) > MAX_BYTES:
        return f"has more than {MAX_BYTES} bytes: give a shorter one"
    return _problem(value)


@lru_cache(maxsize=256)
def _problem(pattern: str) -> str | None:
    try:
        pattern.encode()
        re.compile(pattern)
        parsed = sre.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        return f"{shown(pattern)} is no regular expression of Python's: {shown(str(error))}"
    repeats = list(_repeats(parsed, 0))
    if any(depth for depth in repeats):
        return (
            f"{shown(pattern)} repeats what repeats or branches, and a search could take forever: "
            "give a pattern without repeats inside of repeats"
        )
    if len(repeats) > MAX_OPEN_REPEATS:
        return f"{shown(pattern)} has {len(repeats)} repeats: give at most {MAX_OPEN_REPEATS}"
    return None


def _repeats(parsed: Iterable[Any], depth: int) -> Iterable[int]:
    """For each repeat without a fixed length, and each branch in one, in how many others it stands."""
    for kind, value in parsed:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            low, high, inner = value
            if low == high:
                yield from _repeats(inner, depth)
            elif high == 1:  # an optional part takes twice the time, in a repeat forever
                if depth:
                    yield depth
                yield from _repeats(inner, depth)
            else:
                yield depth
                yield from _repeats(inner, depth + 1)
        elif kind == sre.BRANCH:
            if depth:
                yield depth
            for branch in value[1]:
                yield from _repeats(branch, depth)
        elif kind == sre.SUBPATTERN:
            yield from _repeats(value[3], depth)
        elif kind == sre.ATOMIC_GROUP:
            yield from _repeats(value, depth)
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            yield from _repeats(value[1], depth)
        elif kind == sre.GROUPREF_EXISTS:
            for branch in value[1:]:
                yield from _repeats(branch or (), depth)
