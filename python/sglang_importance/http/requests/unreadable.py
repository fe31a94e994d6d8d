"""Errors of sglang's own code at what a client wrote, where it expects something else.

The tables of ``fields`` are to name each; what they miss is still the client's error, not the server's.
"""

from __future__ import annotations

import re

import msgspec

UNREADABLE = (
    *(TypeError, AttributeError, LookupError, AssertionError, OverflowError, UnicodeError, RecursionError),
    *(re.error, msgspec.MsgspecError),
)
"""What Python raises at a value of another shape; none of them says that a machine has failed."""


def unreadable(error: BaseException) -> str:
    """The one line of a refusal."""
    said = " ".join(str(error).split())[:200]
    return f"sglang cannot read this request ({type(error).__name__}: {said}): look at its fields' types"
