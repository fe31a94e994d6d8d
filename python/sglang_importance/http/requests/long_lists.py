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
PIECE = 100
"""Messages and their parts that pydantic tries at a time."""
_OBJECTS = frozenset({"messages", "content", "tools"})
"""Lists of objects, each of which becomes at least one token."""
_MESSAGES = ("messages", "input")
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
    objects = _OBJECTS | ({"input"} if getattr(model, "__name__", "") == "ResponsesRequest" else set())
    is_suspect, num_objects = False, 0
    for path, name, found in _lists(body):
        if len(found) > LONG:
            kind = _KINDS[type(next((each for each in found if each is not None), {}))]
            expected = "object" if name in objects else kind
            # Element by element only where there is one to name: a prompt of 100,000 ids comes here.
            strange = {each for each in set(map(type, found)) - {NoneType} if _KINDS[each] != expected}
            if strange:
                index = next(at for at, each in enumerate(found) if type(each) in strange)
                raise BadField(f"{path}.{index}", f"must be {_WORDS[expected]}, not {shown(found[index])}")
            is_suspect |= not (name in _TOKENS and kind == "number")
        num_objects += len(found) if name in objects else 0
        if num_objects > context_length:
            problem = f"{num_objects} messages, parts and tools are more than the {context_length} tokens"
            raise BadField(path, f"{problem} of the context: send fewer")
    if (is_suspect or num_objects > LONG) and isinstance(model, type) and issubclass(model, BaseModel):
        _count_errors(body, model)


def _count_errors(body: Any, model: type[BaseModel]) -> None:
    """Piece by piece, since pydantic tells all errors of what it is given before it can be stopped."""
    errors = 0
    path_of_longest, _, longest = max(_lists(body), key=lambda found: len(found[2]), default=("", "", []))
    for path, piece in _pieces(body):
        try:
            model.model_validate(piece)
        except ValidationError as error:
            errors += error.error_count()
            if errors > MOST_ERRORS:
                where = path_of_longest if len(longest) > LONG else path
                raise BadField(where, f"has elements that {model.__name__} cannot read") from None


def _pieces(body: Any) -> Iterator[tuple[str, Any]]:
    """A body with some of its messages at a time, and where they are; whole where it has none."""
    name = next((each for each in _MESSAGES if type(body) is dict and type(body.get(each)) is list), None)
    if name is None or not body[name]:
        yield "body", body
        return
    piece: list[Any] = []
    size = first = 0
    for index, message in enumerate(body[name]):
        for part in _parts(message):
            first = first if piece else index
            piece.append(part)
            size += 1 + len(part["content"]) if part is not message else 1
            if size >= PIECE:
                yield f"{name}.{first}", {**body, name: piece}
                piece, size = [], 0
    if piece:
        yield f"{name}.{first}", {**body, name: piece}


def _parts(message: Any) -> Iterator[Any]:
    """A message whose content is a list, with some of it at a time; any other as it is."""
    parts = message.get("content") if type(message) is dict else None
    if type(parts) is not list or not parts:
        yield message
        return
    for start in range(0, len(parts), PIECE):
        yield {**message, "content": parts[start : start + PIECE]}


def _lists(body: Any) -> Iterator[tuple[str, str, list[Any]]]:
    """Path, name and elements of each list, however deep."""
    waiting = [("", "", body)]
    while waiting:
        path, name, found = waiting.pop()
        if type(found) is dict:
            waiting += [(f"{path}.{key}".lstrip("."), key, each) for key, each in found.items()]
        elif type(found) is list:
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
