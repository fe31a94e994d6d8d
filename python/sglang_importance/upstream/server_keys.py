"""The keys of a server, kept out of what sglang prints and tells of its arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FIELDS = ("api_key", "admin_api_key")
MASK = "***"
COMMAND = "launch_command"
"""Under this name sglang tells the words of its command line."""
PRINTING = "sglang.srt.entrypoints.engine"
"""The logger of the line with all arguments."""


def without_keys(told: Any, server_args: Any) -> Any:
    """A JSON document about a server, in which nobody finds its keys.

    Args:
        told: as sglang tells it.
        server_args: sglang's, with the keys.
    """
    if isinstance(told, list):
        return [without_keys(each, server_args) for each in told]
    if not isinstance(told, dict):
        return told
    document = {}
    for name, value in told.items():
        if name in FIELDS and value:
            document[name] = MASK
        elif name == COMMAND and value:
            document[name] = _masked(value, keys_of(server_args))
        else:
            document[name] = without_keys(value, server_args)
    return document


@contextmanager
def unprinted_keys(server_args: Any) -> Iterator[None]:
    """Meanwhile sglang's line with its arguments has no key in it."""
    quoted = [repr(key) for key in keys_of(server_args)]

    def mask(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str):
            record.msg = _masked(record.msg, quoted)
        return True

    printing = logging.getLogger(PRINTING)
    printing.addFilter(mask)
    try:
        yield
    finally:
        printing.removeFilter(mask)


def keys_of(server_args: Any) -> list[str]:
    """Those that the server has; the longest first, of which another may be a part."""
    keys = [key for field in FIELDS if (key := getattr(server_args, field, None))]
    return sorted(keys, key=len, reverse=True)


def _masked(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text
