"""What the body of a request says of its KV: ``cache_salt``, ``extra_key`` and ``kv_hints``.

They stand at the top of a body, and where a family of routes has a place for what it does not know: OpenAI's
and Anthropic's ``metadata``, Ollama's ``options``, Vertex's ``parameters``. sglang's models of requests drop
fields that they do not know without a word; of these three none may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_importance.json_text import read_json
from sgl_importance.placement.hints.hints import FIELD, BadHint, Hints
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.text_rules import name_problem

NAMESPACE_FIELDS = ("cache_salt", "extra_key")
FIELDS = (*NAMESPACE_FIELDS, FIELD)

TOP = ""
METADATA = "metadata"
"""Its values are texts: hints stand there as JSON."""
PLACES = (TOP, METADATA, "options", "parameters", "sampling_params", "extra_body", "instances")
"""Where a client may think that a field belongs; the last two are read nowhere."""

Namespace = str | list[str] | None


@dataclass(frozen=True)
class KvFields:
    """The three fields of one body, None where they are not given.

    Attributes:
        cache_salt: a text, or one for each prompt of a batch.
        extra_key: the same.
        hints_value: ``kv_hints`` as the client sent it.
        hints: the same, read.
        session_id: of the body's top, where it is a text.
    """

    cache_salt: Namespace = None
    extra_key: Namespace = None
    hints_value: object = None
    hints: Hints | None = None
    session_id: str | None = None

    def given(self) -> tuple[str, ...]:
        """Names of the fields that say something."""
        said = {"cache_salt": self.cache_salt, "extra_key": self.extra_key, FIELD: self.hints}
        return tuple(name for name in FIELDS if said[name] is not None)


def read_fields(body: Mapping[str, Any], places: Sequence[str], *, takes_lists: bool) -> KvFields:
    """Reads the fields where a route reads them.

    Args:
        body: of the request.
        places: of ``PLACES``. Of several hints those at the first count: a gateway may carry both.
        takes_lists: whether a namespace may be a list, one for each prompt.

    Raises:
        BadField: a field stands where nobody reads it, is no name, or has two values.
        BadHint: a hint cannot be followed; names the field.
    """
    refuse_elsewhere(body, places)
    value = _hints_value(body, places)
    return KvFields(
        cache_salt=_namespace(body, "cache_salt", places, takes_lists),
        extra_key=_namespace(body, "extra_key", places, takes_lists),
        hints_value=value,
        hints=None if value is None else Hints.parse(value),
        session_id=_session_id(body),
    )


def refuse_elsewhere(body: Mapping[str, Any], places: Sequence[str]) -> None:
    """
    Raises:
        BadField: one of the fields stands at none of these places; names where it would be read.
    """
    for path, name in _given(body):
        if path.split(".")[0] not in places:
            raise BadField(_path(path, name), f"is not read there: give {_path(places[0], name)}")


def refuse_all(body: Mapping[str, Any], route: str, instead: str) -> None:
    """
    Raises:
        BadField: one of the fields is given, wherever.
    """
    for path, name in _given(body):
        raise BadField(_path(path, name), f"{route} cannot keep it: use {instead}, or leave it out")


def _given(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Paths of places, and the fields that stand there and say something."""
    for place in PLACES:
        found = body if place == TOP else body.get(place)
        for path, holder in (
            [(f"{place}.{index}", each) for index, each in enumerate(found)]
            if isinstance(found, list)
            else [(place, found)]
        ):
            if isinstance(holder, Mapping):
                yield from ((path, name) for name in FIELDS if holder.get(name) not in (None, "", {}))


def _namespace(body: Mapping[str, Any], name: str, places: Sequence[str], takes_lists: bool) -> Namespace:
    known: Namespace = None
    for place in places:
        holder = body if place == TOP else body.get(place)
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if value in (None, ""):
            continue
        _check_names(_path(place, name), value, takes_lists=takes_lists and place == TOP)
        if known is not None and value != known:
            raise BadField(_path(place, name), f"is not what {_path(places[0], name)} says: give it once")
        known = value
    return known


def _check_names(path: str, value: Any, *, takes_lists: bool) -> None:
    """
    Raises:
        BadField: it is neither a name nor, where lists are taken, a list of names.
    """
    is_list = takes_lists and isinstance(value, list)
    names = {f"{path}.{at}": each for at, each in enumerate(value)} if is_list else {path: value}
    for field, each in names.items():
        if problem := name_problem(each):
            raise BadField(field, problem)


def _session_id(body: Mapping[str, Any]) -> str | None:
    """What stands elsewhere is the client's own, such as a ``session_id`` in its ``metadata``.

    Raises:
        BadField: it is no name.
    """
    value: str | None = body.get("session_id")
    if value in (None, ""):
        return None
    _check_names("session_id", value, takes_lists=False)
    return value


def _hints_value(body: Mapping[str, Any], places: Sequence[str]) -> object:
    for place in places:
        holder = body if place == TOP else body.get(place)
        value = holder.get(FIELD) if isinstance(holder, Mapping) else None
        if value is None:
            continue
        if place != METADATA:
            return value
        try:
            return read_json(value)
        except (TypeError, ValueError):
            raise BadHint(f"{METADATA}.{FIELD}", "Input should be JSON in a text") from None
    return None


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
