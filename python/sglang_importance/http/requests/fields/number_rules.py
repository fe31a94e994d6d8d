"""Rules for numbers, in the ranges that sglang's messages between processes and its tensors can hold."""

from __future__ import annotations

import math
from typing import Any

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.field import Rule
from sglang_importance.http.requests.fields.server_facts import ServerFacts

INT32 = 2**31 - 1
INT64 = 2**63 - 1


def integer(low: int, high: int, *, cure: str = "") -> Rule:
    """Whole numbers; true, false and 1.0 are none, where sglang's scheduler reads the field.

    Args:
        low: the least.
        high: the greatest.
        cure: what to say besides.
    """
    wanted = f"must be a whole number from {low} to {high}{cure}"

    def check(value: Any, server: ServerFacts) -> str | None:
        if type(value) is int and low <= value <= high:
            return None
        return f"{wanted}, not {shown(value)}"

    return check


def real(low: float, high: float) -> Rule:
    """Finite numbers from ``low`` to ``high``."""
    wanted = f"must be a number from {low:g} to {high:g}"

    def check(value: Any, server: ServerFacts) -> str | None:
        if type(value) in (int, float) and low <= value <= high and math.isfinite(value):
            return None
        return f"{wanted}, not {shown(value)}"

    return check


def within_context(low: int) -> Rule:
    """Whole numbers up to the model's context."""

    def check(value: Any, server: ServerFacts) -> str | None:
        return integer(low, server.context_length, cure=" (the model's context)")(value, server)

    return check


def data_rank(value: Any, server: ServerFacts) -> str | None:
    """One of the data-parallel ranks."""
    return integer(0, max(server.data_ranks, 1) - 1, cure=" (--dp-size)")(value, server)


def top_k(value: Any, server: ServerFacts) -> str | None:
    """sglang keeps it in 32 bits."""
    if value == -1 and type(value) is int:
        return None
    return integer(1, 1 << 30, cure=", or -1 for all tokens")(value, server)


def top_logprobs(value: Any, server: ServerFacts) -> str | None:
    """sglang asks the logits for so many."""
    if type(value) is int and value > server.vocabulary:
        return f"{shown(value)} is more than the model's vocabulary of {server.vocabulary}"
    return integer(0, server.vocabulary)(value, server)
