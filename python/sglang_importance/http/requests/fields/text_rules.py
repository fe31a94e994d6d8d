"""Rules for texts: sglang's messages between processes are UTF-8, and names are kept beside each request."""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.field import Rule
from sglang_importance.http.requests.fields.server_facts import ServerFacts

MAX_NAME = 4096
"""Characters of an id, key, salt or name."""


def text(most: int | None = None, *, least: int = 0) -> Rule:
    """Texts that can be written as UTF-8.

    Args:
        most: characters; None for any number.
        least: characters.
    """

    def check(value: Any, server: ServerFacts) -> str | None:
        return _text_problem(value, most, least)

    return check


def name_problem(value: Any) -> str | None:
    """What keeps a value from being an id, key, salt or name; None where nothing does."""
    return _text_problem(value, MAX_NAME, 0)


def _text_problem(value: Any, most: int | None, least: int) -> str | None:
    if not isinstance(value, str):
        return f"must be a text, not {shown(value)}"
    if len(value) < least:
        return "must not be empty"
    if most is not None and len(value) > most:
        return f"has {len(value)} characters: give at most {most}"
    if not is_utf8(value):
        return "holds half a surrogate pair, which is no character: send proper UTF-8"
    return None


def is_utf8(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


name = text(MAX_NAME)


def prompt_text(value: Any, server: ServerFacts) -> str | None:
    """A prompt as text."""
    if not server.has_tokenizer:
        return "the server has no tokenizer (--skip-tokenizer-init): give input_ids"
    return text(least=1)(value, server)


def texts(number: int, most: int) -> Rule:
    """One text, or a list of them.

    Args:
        number: of texts, at most.
        most: characters of each.
    """
    one = text(most)

    def check(value: Any, server: ServerFacts) -> str | None:
        if not isinstance(value, list | tuple):
            return one(value, server)
        if len(value) > number:
            return f"is a list of {len(value)}: give at most {number}"
        return next((problem for each in value if (problem := one(each, server))), None)

    return check


def text_map(value: Any, server: ServerFacts) -> str | None:
    """An object whose values are texts."""
    if not isinstance(value, dict):
        return f"must be an object, not {shown(value)}"
    for pair in value.items():
        if problem := next((problem for each in pair if (problem := name(each, server))), None):
            return f"{shown(pair[0])} {problem}"
    return None


def metric_labels(value: Any, server: ServerFacts) -> str | None:
    """A label that its metrics do not have would end sglang's loop over answers, and the server."""
    if problem := text_map(value, server):
        return problem
    if unknown := sorted(set(value) - server.metric_labels):
        return (
            f"the server's metrics have no label {shown(unknown[0])}: leave it out, "
            "or name it in --tokenizer-metrics-allowed-custom-labels"
        )
    return None
