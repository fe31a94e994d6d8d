"""Long lists in a body, looked at before sglang's models read it.

pydantic tries every kind of element on every element of a list, and FastAPI writes down each error: 100,000
elements of a wrong kind hold the process that answers everybody for half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

from pydantic import BaseModel, ValidationError

from sglang_importance.http.requests.fields.bad_field import BadField, shown

LONG = 1000
"""Elements of a list that is looked at."""
MOST_ERRORS = 1000
"""Of a body that FastAPI still writes down: a few milliseconds."""
_OBJECTS = frozenset({"messages", "content", "tools"})
"""Lists of objects, each of which becomes at least one token."""
_TOKENS = frozenset({"input_ids", "prompt"})


def check_long_lists(body: Any, model: Any, context_length: int) -> None:
    """Looks at the long lists of a body as JSON brought it.

    Args:
        body: of the request.
        model: that will read it; None where it is not known.
        context_length: tokens of a prompt with its answer, at most.

    Raises:
        BadField: a list has an element that cannot stand there, or more of them than the server can take.
    """
    is_suspect = False
    objects = _OBJECTS | ({"input"} if getattr(model, "__name__", "") == "ResponsesRequest" else set())
    for path, name, found in _long_lists(body):
        kind = _KINDS[type(next((each for each in found if each is not None), {}))]
        expected = "object" if name in objects else kind
        # Element by element only where there is one to name: a prompt of 100,000 ids comes here.
        strange = {each for each in set(map(type, found)) - {NoneType} if _KINDS[each] != expected}
        if strange:
            index = next(at for at, each in enumerate(found) if type(each) in strange)
            raise BadField(f"{path}.{index}", f"must be {_WORDS[expected]}, not {shown(found[index])}")
        if name in objects and len(found) > context_length:
            problem = f"{len(found)} of them are more than the {context_length} tokens of the context"
            raise BadField(path, f"{problem}: send fewer")
        is_suspect |= not (name in _TOKENS and kind == "number")
    if is_suspect and isinstance(model, type) and issubclass(model, BaseModel):
        _count_errors(body, model)


def _count_errors(body: Any, model: type[BaseModel]) -> None:
    try:
        model.model_validate(body)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:
            path = max(_long_lists(body), key=lambda found: len(found[2]))[0]
            raise BadField(path, f"has elements that {model.__name__} cannot read") from None


def _long_lists(body: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Path, name and elements of each long list."""
    waiting = [("", "", body)]
    while waiting:
        path, name, found = waiting.pop()
        if type(found) is dict:
            waiting += [(f"{path}.{key}".lstrip("."), key, each) for key, each in found.items()]
        elif type(found) is list:
            if len(found) > LONG:
                yield path, name, found
            if not _NESTED.isdisjoint(map(type, found)):
                waiting += [
                    (f"{path}.{index}", "", each) for index, each in enumerate(found) if type(each) in _NESTED
                ]


_NESTED = frozenset({dict, list})
_KINDS = {
    dict: "object",
    list: "list",
    str: "text",
    int: "number",
    float: "number",
    bool: "flag",
}
"""Of what a JSON parser makes, but for None."""
_WORDS = {"object": "an object", "list": "a list", "text": "a text", "number": "a number", "flag": "a flag"}
