"""Hints of a request about its own KV, and their form inside sglang's ``kv_hints`` envelope.

A client writes a plain object; sglang carries an envelope of versioned actions (its
``srt/managers/kv_hints.py``). Both forms are accepted and mean the same. Of an envelope's actions that
are not ours, those of ``shared_actions`` are followed and the rest are ignored; a hint of ours that we do
not know is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, Self
from uuid import uuid4

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from sgl_importance.errors import ImportanceError
from sgl_importance.placement.hints.shared_actions import MOST_SECONDS, as_hints, name_of
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.reuse_class import BlockType

FIELD = "kv_hints"
PROTOCOL_VERSION = "1"
NAMESPACE = "sgl_importance."
ACTION_VERSION = "1"
MAX_TTL_SECONDS = MOST_SECONDS
MAX_BLOCKS = 64
MAX_ACTIONS = 64
MAX_ACTION_NAME = 4096
MAX_PAYLOAD = 1 << 16
"""Of an action, in characters of JSON. Ours and the shared ones hold some hundreds."""
LARGEST_BUDGET = 1e9  # tokens; no context is longer

BlockName = Literal["system", "shared_prefix", "user", "document", "tool_output", "generated"]
BLOCK_TYPES: dict[BlockName, BlockType] = {
    "system": BlockType.SHARED_PREFIX,
    "shared_prefix": BlockType.SHARED_PREFIX,
    "user": BlockType.USER,
    "document": BlockType.USER,
    "tool_output": BlockType.TOOL_OUTPUT,
    "generated": BlockType.GENERATED,
}
EndName = Literal["tool_call", "end_of_turn"]
ANSWER_ENDS: dict[EndName, AnswerEnd] = {
    "tool_call": AnswerEnd.TOOL_CALL,
    "end_of_turn": AnswerEnd.END_OF_TURN,
}

ActionName = Annotated[str, Field(max_length=MAX_ACTION_NAME)]
Position = Annotated[int, Field(strict=True, ge=0)]
Index = Annotated[int, Field(strict=True)]


class BadHint(ImportanceError, ValueError):
    """A hint that cannot be followed.

    Attributes:
        field: path of what is wrong in the request's body, such as ``kv_hints.retain.ttl_seconds``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Action(Protocol):
    """An action of any consumer in an envelope; sglang's ``KvHintAction`` is one."""

    @property
    def action_type(self) -> str: ...

    @property
    def action_version(self) -> str: ...

    @property
    def payload(self) -> Mapping[str, Any]: ...


def _short(payload: dict[str, Any]) -> dict[str, Any]:
    if (length := len(json.dumps(payload))) > MAX_PAYLOAD:
        raise ValueError(f"has {length} characters of JSON, more than {MAX_PAYLOAD}")
    return payload


class _Action(BaseModel):
    """An action of a client, as sglang reads it: unknown fields are ignored, and none is converted."""

    model_config = ConfigDict(strict=True)

    action_id: ActionName
    action_type: ActionName
    action_version: ActionName
    payload: Annotated[dict[str, Any], AfterValidator(_short)] = {}


class _Envelope(BaseModel):
    """sglang's envelope around actions, as a client sends it."""

    model_config = ConfigDict(strict=True)

    protocol_version: str
    message_id: str
    actions: Sequence[_Action] = ()


class _Model(BaseModel):
    # A list that JSON brings may stand for a tuple; nothing else is converted.
    model_config = ConfigDict(extra="forbid", frozen=True)


class Retain(_Model):
    """Keep the prompt's KV by a soft pin, within the budget that all pins share.

    Attributes:
        ttl_seconds: how long at most, in seconds of wall-clock time.
        tokens: of the prompt's beginning that is kept; all of it where None.
    """

    ttl_seconds: Annotated[float, Field(strict=True, gt=0, le=MAX_TTL_SECONDS, allow_inf_nan=False)]
    tokens: Annotated[int, Field(strict=True, gt=0)] | None = None


def _as_range(value: object) -> object:
    return (value, value) if type(value) is int else value


class Block(_Model):
    """Block type of a part of the prompt. Without ``messages`` and ``tokens``: of the part new to the cache.

    Attributes:
        type: ``system`` and ``shared_prefix`` are one type, so are ``user`` and ``document``.
        messages: index of a chat message, or the first and the last of several, both included; negative ones
            count from the end.
        tokens: first token of the prompt and the token behind the last; the prompt's end where null.
    """

    type: BlockName
    messages: Annotated[tuple[Index, Index] | None, BeforeValidator(_as_range)] = None
    tokens: tuple[Position, Position | None] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.messages is not None and self.tokens is not None:
            raise ValueError("give messages or tokens, not both")
        if self.tokens is not None and self.tokens[1] is not None and self.tokens[1] <= self.tokens[0]:
            raise ValueError(f"tokens {list(self.tokens)} are none: the end must be behind the start")
        return self

    @property
    def block_type(self) -> BlockType:
        return BLOCK_TYPES[self.type]


class Hints(_Model):
    """All hints of one request: ``selector`` and ``budget`` may change an answer, ``prefetch`` wants none.

    Attributes:
        retain: keep the prompt's KV for a while.
        drop_after_use: the request's own KV will not be asked for again: evict it first, copy it nowhere. A
            prefix that it shares with other requests keeps its worth.
        demote: what of the request's KV nobody else, or no other session, has asked for leaves the device
            first once the request has ended, where a lower tier keeps it.
        prefetch: generate nothing, only bring the prompt's KV to the device: pages in host or storage are
            loaded, the rest is computed.
        block_types: of parts of the prompt; where parts overlap the later one counts.
        transition: ``tool_call``: the request goes on with the answer of a tool.
        answer_end: who goes on from the answer, whatever the server makes of its last tokens: a program
            (``tool_call``), or a person or nobody (``end_of_turn``).
        session_over: the request is the last of its ``session_id``: once it is answered, what the session
            alone has asked for is given back first.
        selector: ``all``: the answer reads every page of its context, whatever selector the server has.
        budget: tokens of its context that a step of the answer may read where the server has a selector;
            below 1, their share of the context.
        report: answer the tokens found, by tier, and those that had been known and were lost, in
            ``usage.kv_importance`` (OpenAI) or ``meta_info.kv_importance`` (``/generate``).
    """

    retain: Retain | None = None
    drop_after_use: Annotated[bool, Field(strict=True)] = False
    demote: Annotated[bool, Field(strict=True)] = False
    prefetch: Annotated[bool, Field(strict=True)] = False
    block_types: Annotated[tuple[Block, ...], Field(max_length=MAX_BLOCKS)] = ()
    transition: Literal["tool_call"] | None = None
    answer_end: EndName | None = None
    session_over: Annotated[bool, Field(strict=True)] = False
    selector: Literal["all"] | None = None
    budget: Annotated[float, Field(strict=True, gt=0, le=LARGEST_BUDGET, allow_inf_nan=False)] | None = None
    report: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _without_contradiction(self) -> Self:
        if self.drop_after_use and self.retain is not None:
            raise ValueError("retain and drop_after_use contradict each other: give one of them")
        if self.drop_after_use and self.demote:
            raise ValueError("demote and drop_after_use contradict each other: give one of them")
        if self.drop_after_use and self.prefetch:
            raise ValueError("prefetch and drop_after_use contradict each other: give one of them")
        if self.selector is not None and self.budget is not None:
            raise ValueError("selector 'all' has no budget: give one of them")
        return self

    @classmethod
    def parse(cls, value: object) -> Self:
        """Reads the plain form or the envelope.

        Raises:
            BadHint: the value cannot be followed; names the field.
        """
        if not isinstance(value, Mapping):
            raise BadHint(FIELD, f"must be an object, not {type(value).__name__}")
        if not _is_envelope(value):
            return cls._of(value, {})
        return cls.of_actions(_read_envelope(value).actions)

    @classmethod
    def of_actions(cls, actions: Iterable[Action]) -> Self:
        """Reads the actions of an envelope; where a shared one contradicts one of ours, ours counts.

        Raises:
            BadHint: an action of ours cannot be followed; names the field.
        """
        document: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        places: dict[str, str] = {}
        for index, action in enumerate(actions):
            place = f"{FIELD}.actions.{index}"
            kind = action.action_type
            if not kind.startswith(NAMESPACE):
                for name, value in _shared(action, place).items():
                    shared.setdefault(name, value)
                    places.setdefault(name, f"{place}.payload")
                continue
            name = kind.removeprefix(NAMESPACE)
            if name not in cls.model_fields:
                raise BadHint(f"{place}.action_type", _unknown(name))
            if action.action_version != ACTION_VERSION:
                raise BadHint(
                    f"{place}.action_version", f"must be {ACTION_VERSION!r}, the only version of {kind}"
                )
            if name in document:
                raise BadHint(f"{place}.action_type", f"{kind} is given twice")
            document[name] = _value_of(name, action.payload, f"{place}.payload")
            places[name] = f"{place}.payload"
        if document.get("drop_after_use"):
            shared.pop("retain", None)
            shared.pop("demote", None)
        return cls._of({**shared, **document}, places)

    def followed(self, actions: Iterable[Action]) -> list[tuple[str, bool]]:
        """Of the envelope that these hints were read from: the actions that are not ours, by the names of
        ``shared_actions``, and whether each is followed."""
        return [
            (name_of(action.action_type), self._follows(action))
            for action in actions
            if not action.action_type.startswith(NAMESPACE)
        ]

    def _follows(self, action: Action) -> bool:
        wanted = as_hints(action.action_type, action.action_version, action.payload)
        return bool(wanted) and all(getattr(self, name) == getattr(Hints(**wanted), name) for name in wanted)

    @classmethod
    def _of(cls, document: Mapping[str, Any], places: Mapping[str, str]) -> Self:
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
        path = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden" and len(path) == 1:
            raise BadHint(f"{FIELD}.{path[0]}", _unknown(path[0]))
        named = places.get(path[0], f"{FIELD}.{path[0]}") if path else FIELD
        raise BadHint(".".join([named, *path[1:]]), _in_terms_of_json(problem))

    def actions(self) -> list[dict[str, Any]]:
        """The form in which sglang carries hints to its scheduler: one action for each that is given."""
        document = self.model_dump(mode="json", exclude_defaults=True)
        return [
            _Action(
                action_id=name,
                action_type=NAMESPACE + name,
                action_version=ACTION_VERSION,
                payload=_payload_of(name, value),
            ).model_dump()
            for name, value in document.items()
        ]

    def envelope(self, original: object = None) -> dict[str, Any]:
        """The envelope around ``actions``.

        Args:
            original: the client's value that ``parse`` has read; of an envelope, the head and the actions
                of others are kept.
        """
        head: Mapping[str, Any] = {"protocol_version": PROTOCOL_VERSION, "message_id": uuid4().hex}
        others: list[Any] = []
        if isinstance(original, Mapping) and _is_envelope(original):
            head = original
            others = [
                action
                for action in original.get("actions", ())
                if not action["action_type"].startswith(NAMESPACE)
            ]
        return {**head, "actions": [*self.actions(), *others]}


def _is_envelope(value: Mapping[str, Any]) -> bool:
    return not _Envelope.model_fields.keys().isdisjoint(value)


def _read_envelope(value: Mapping[str, Any]) -> _Envelope:
    """
    Raises:
        BadHint: it is no envelope, or holds hints of the plain form, too; names the field.
    """
    given = " and ".join(name for name in _Envelope.model_fields if name in value)
    for name in value:
        if name in Hints.model_fields:
            as_action = f"make it an action of type {NAMESPACE}{name}, or leave {given} out"
            raise BadHint(f"{FIELD}.{name}", f"would be ignored beside {given}: {as_action}")
    actions = value.get("actions")
    if isinstance(actions, list) and len(actions) > MAX_ACTIONS:  # before pydantic reads each of them
        raise BadHint(f"{FIELD}.actions", f"{len(actions)} are more than {MAX_ACTIONS}: send fewer")
    try:
        return _Envelope.model_validate(dict(value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    field = ".".join([FIELD, *map(str, problem["loc"])])
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        heads = " and ".join(name for name, head in _Envelope.model_fields.items() if head.is_required())
        raise BadHint(field, f"is missing beside {given}: an envelope has {heads}")
    raise BadHint(field, _in_terms_of_json(problem))


def _shared(action: Action, place: str) -> dict[str, Any]:
    try:
        return as_hints(action.action_type, action.action_version, action.payload)
    except ValueError as error:
        raise BadHint(
            f"{place}.payload.{str(error).partition(':')[0]}", str(error).partition(": ")[2]
        ) from None


def _in_terms_of_json(problem: Mapping[str, Any]) -> str:
    """A message of pydantic's without the names of our classes and of Python's types."""
    if problem["type"] == "model_type":
        return "must be an object"
    text: str = problem["msg"]
    return text.removeprefix("Value error, ").replace("tuple", "list").replace("Tuple", "List")


_OBJECTS = ("retain",)


def _payload_of(name: str, value: Any) -> dict[str, Any]:
    """An action's payload is always an object."""
    return value if name in _OBJECTS else {"value": value}


def _value_of(name: str, payload: Any, place: str) -> Any:
    if name in _OBJECTS:
        return payload
    if not isinstance(payload, Mapping) or payload.keys() != {"value"}:
        raise BadHint(place, 'must be an object with the single key "value"')
    return payload["value"]


def _unknown(name: str) -> str:
    return f"unknown hint {name!r}; known are {', '.join(sorted(Hints.model_fields))}"
