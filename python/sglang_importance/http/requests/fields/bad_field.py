"""The one line by which a request is refused."""

from __future__ import annotations

from sgl_importance.errors import ImportanceError


class BadField(ImportanceError, ValueError):
    """A field of a request that this server cannot take; the message names it and the cure.

    Attributes:
        field: where it stands in the request, such as ``sampling_params.1.top_k``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


MAX_SHOWN = 60


def shown(value: object) -> str:
    """A value for a message, cut to what fits a line."""
    # Only the beginning is ever looked at: a value may be megabytes long.
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    elif isinstance(value, list | tuple) and len(value) > MAX_SHOWN:
        value = list(value[:MAX_SHOWN])
    elif isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    elif isinstance(value, dict):
        return "an object"
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
