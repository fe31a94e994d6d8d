"""Holds a request against a table: what is not sglang's default must pass the rule of its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from sglang_importance.http.requests.fields.field import Field, Table
from sglang_importance.http.requests.fields.refusal import BadField, shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts

_NO_FIELD = object()
_SCALAR = (str, int, float)


@cache
def defaults_of(kind: type) -> Mapping[str, Any]:
    """sglang's defaults of a request class, by field; None where a field must be given.

    Args:
        kind: a dataclass, a pydantic model or a msgspec struct.
    """
    if dataclasses.is_dataclass(kind):
        return {each.name: _dataclass_default(each) for each in dataclasses.fields(kind)}
    if (models := getattr(kind, "model_fields", None)) is not None:
        return {
            name: None if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in models.items()
        }
    import msgspec

    return {
        field.name: None if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(kind)
    }


def _dataclass_default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_values(
    values: Iterable[tuple[str, Any]],
    table: Table,
    defaults: Mapping[str, Any],
    server: ServerFacts,
    *,
    prompts: int | None = None,
    place: str = "",
) -> None:
    """Looks at fields by name; those that are no fields of sglang's class are passed over.

    Args:
        values: of a request.
        table: what it may hold.
        defaults: of sglang's class in the installed release.
        server: what it can do.
        prompts: of a batch; None for a request with a single prompt.
        place: put in front of the field's name in a message.

    Raises:
        BadField: the first one that this server cannot take.
    """
    for name, value in values:
        if value is None or (default := defaults.get(name, _NO_FIELD)) is _NO_FIELD or value is default:
            continue
        if type(value) is type(default) and isinstance(value, _SCALAR) and value == default:
            continue
        row = table.get(name)
        if row is None:
            raise BadField(place + name, "is new in sglang, and not known here yet: leave it out")
        _check_row(place + name, row, value, server, prompts)


def _check_row(place: str, row: Field, value: Any, server: ServerFacts, prompts: int | None) -> None:
    is_batch = (
        prompts is not None
        and row.is_per_prompt
        and isinstance(value, list)
        and not (row.is_list and value and not isinstance(value[0], list))
    )
    if not is_batch:
        if problem := row.rule(value, server):
            raise BadField(place, _without_batch(row, value, problem))
        return
    if len(value) != prompts:
        raise BadField(place, f"is a list of {len(value)} for {prompts} prompts: give one for each")
    for index, each in enumerate(value):
        if each is None and row.is_null_in_lists:
            continue
        if problem := row.rule(each, server):
            raise BadField(f"{place}.{index}", problem)


def _without_batch(row: Field, value: Any, problem: str) -> str:
    if row.is_per_prompt and not row.is_list and isinstance(value, list):
        return f"is a list beside a single prompt ({shown(value)}): {problem}"
    return problem
