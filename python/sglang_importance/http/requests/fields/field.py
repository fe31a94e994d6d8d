"""What one field of a request may hold: a rule, and whether each prompt of a batch may have its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_importance.http.requests.fields.server_facts import ServerFacts

Rule = Callable[[Any, ServerFacts], str | None]
"""The problem with a value and its cure, without the field's name; None where the server can take it."""


@dataclass(frozen=True)
class Field:
    """One row of a table.

    Attributes:
        rule: for what is not null and not sglang's default.
        is_per_prompt: a batch may give a list, with one value for each of its prompts.
        is_list: what a single prompt has is a list already; that of a batch is one of lists.
        is_null_in_lists: null stands for no value there; elsewhere it would end the scheduler.
    """

    rule: Rule
    is_per_prompt: bool = False
    is_list: bool = False
    is_null_in_lists: bool = False


Table = Mapping[str, Field]
"""Fields by name."""


def anything(value: Any, server: ServerFacts) -> str | None:
    """sglang reads the field itself, and says what is wrong with it."""
    return None


def only_default(reason: str) -> Rule:
    """What this server never takes from a request, empty neither.

    Args:
        reason: why, as a clause.
    """

    def refuse(value: Any, server: ServerFacts) -> str | None:
        return f"{reason}: leave it out"

    return refuse


def text_only(value: Any, server: ServerFacts) -> str | None:
    """Media and how to read them; sglang's own routes send lists of nothing."""
    if server.has_media or is_nothing(value):
        return None
    return "the model reads text only: leave it out"


def is_nothing(value: Any) -> bool:
    return value in (None, {}) or (isinstance(value, list) and all(is_nothing(each) for each in value))


def needs(has: Callable[[ServerFacts], bool], without: str, rule: Rule) -> Rule:
    """A rule for servers that can do something.

    Args:
        has: whether this one can.
        without: what to say where it cannot.
        rule: for the value where it can.
    """
    refuse = only_default(without)

    def check(value: Any, server: ServerFacts) -> str | None:
        return rule(value, server) if has(server) else refuse(value, server)

    return check


def yes_or_no(value: Any, server: ServerFacts) -> str | None:
    return None if value is True or value is False else "must be true or false"


def one_of(*values: str) -> Rule:
    names = ", ".join(f'"{value}"' for value in values)

    def check(value: Any, server: ServerFacts) -> str | None:
        return None if isinstance(value, str) and value in values else f"must be one of {names}"

    return check


def rows(field: Field, names: str) -> Table:
    """The same row under each of the names, with spaces between them."""
    return dict.fromkeys(names.split(), field)


def same(table: Table, names: str) -> Table:
    """The rows of another table with these names, with spaces between them."""
    return {name: table[name] for name in names.split()}
