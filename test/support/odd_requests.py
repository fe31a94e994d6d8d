"""Requests with one odd field, or two, on every route that computes: seeded, and of each field's kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

ROUTES = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/encode", "/classify"),
)
_WEIGHTS = (12, 4, 4, 2, 2, 1, 1, 1, 1, 1)

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, -7, 1113, 1114, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, 2**70, -(2**70)),
    *(0.0, 0.5, -0.5, 1.0, 1e-300, 1e300, -1e300, 3.4e38, float("nan"), float("inf"), float("-inf")),
)
TEXTS: tuple[Any, ...] = (
    *(
        "",
        "x",
        "a" * 300,
        "((",
        "(a+)+$",
        "a{9999999}",
        "[",
        "\x00",
        "\ud800",
        "é💥",
        "2.2.2.2",
        "{}",
        "null",
    ),
    *(
        '{"type": "object"}',
        '{"type": "string", "maxLength": 1000000000}',
        "root ::= root root",
        "auto",
        "last",
    ),
    *("HEALTH_CHECK_1", "high", "[" * 5000),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], {}, [None], [[]], [{}], {"": None}, {"id": 5}, {"id": "nobody"}, {"x": 1}),
    *(
        [1],
        [1, 2],
        [[1], [2]],
        [1.5],
        ["a"],
        ["a", "b"],
        [True],
        [2**70],
        [-1],
        [1114],
        {"1": 1e308},
        {"1": -100},
    ),
    *(
        {"a": {"b": {"c": 1}}},
        {"__req__": 1},
        {"enabled": True},
        {"type": "json_object"},
        {"type": "nothing"},
    ),
)
LARGE: tuple[Any, ...] = ("a" * 1_000_000, list(range(100_000)), {"a": "b" * 500_000}, ["a"] * 1000)


@dataclass(frozen=True)
class OddRequest:
    """One request.

    Attributes:
        path: of its route.
        body: with the odd fields in it.
        odd: names of these.
    """

    path: str
    body: dict[str, Any]
    odd: tuple[str, ...]

    def to(self, model: str) -> dict[str, Any]:
        """The body for a server whose model has that name: Responses takes no other."""
        is_named = self.path == "/v1/responses" and self.body.get("model") == "default"
        return {**self.body, "model": model} if is_named else self.body


def value_of(rng: random.Random) -> Any:
    """Something that some field may not be."""
    kind = rng.random()
    if kind < 0.01:
        return rng.choice(LARGE)
    if kind < 0.4:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return rng.choice(TEXTS)
    if kind < 0.9:
        return rng.choice(OTHERS)
    return [value_of(rng) for _ in range(rng.choice((1, 1, 2, 2, 3)))]


def typed(rng: random.Random, annotation: str) -> Any:
    """Something of the field's own type, which may be out of its range."""
    small = ("bool", rng.random() < 0.5), ("int", rng.choice((-1, 0, 1, 2, 5, 40, 300)))
    makers = (
        *small,
        ("float", rng.choice((0.0, 0.1, 0.5, 1.0, 1.5, -1.0, 2.0))),
        (
            "str",
            rng.choice(("", "x", "Alice copper.", "a|b", "[0-9]+", '{"type": "object"}', 'root ::= "a"')),
        ),
        ("List[int]", [rng.randrange(1114) for _ in range(rng.randrange(1, 5))]),
        ("List[str]", [rng.choice("abc") for _ in range(2)]),
        ("Dict", rng.choice(({}, {"1": 2.0}, {"a": "b"}, {"id": "nobody"}, {"type": "text"}))),
    )
    fitting = [value for kind, value in makers if kind in annotation]
    return rng.choice(fitting) if fitting else value_of(rng)


class OddRequests:
    """Makes them.

    Args:
        rng: seeded by the caller.
        fields: annotations of the fields of each route's request class, by name.
        sampling: annotations of sampling parameters, by name.
        vocabulary: number of token ids that the model has.
        largest: number of odd fields in one request, at most.
    """

    def __init__(
        self,
        rng: random.Random,
        fields: dict[str, dict[str, str]],
        sampling: dict[str, str],
        vocabulary: int,
        largest: int = 2,
    ) -> None:
        self._rng = rng
        self._fields = fields
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._numbers = (1, *range(1, largest + 1))

    def next(self) -> OddRequest:
        rng = self._rng
        (path,) = rng.choices(ROUTES, _WEIGHTS)
        body = self._plain(path)
        if rng.random() < 0.25 and path != "/v1/score":
            body["stream"] = True
        if rng.random() < 0.3 and path == "/generate":
            body["return_logprob"] = True
        odd = tuple(self._spoil(path, body) for _ in range(rng.choice(self._numbers)))
        return OddRequest(path, body, odd)

    def _spoil(self, path: str, body: dict[str, Any]) -> str:
        rng = self._rng
        if path == "/generate" and rng.random() < 0.4:
            params = body.get("sampling_params")
            if isinstance(params, dict):
                name = rng.choice(sorted(self._sampling))
                body["sampling_params"] = {**params, name: self._value(self._sampling[name])}
                return f"sampling_params.{name}"
        name = rng.choice(sorted(self._fields[path]))
        body[name] = self._value(self._fields[path][name])
        return name

    def _value(self, annotation: str) -> Any:
        return typed(self._rng, annotation) if self._rng.random() < 0.6 else value_of(self._rng)

    def _plain(self, path: str) -> dict[str, Any]:
        rng = self._rng
        ids = [rng.randrange(10, self._vocabulary) for _ in range(rng.choice((3, 40, 40, 200)))]
        messages = [{"role": "user", "content": "Alice copper. Bruno lantern."}]
        model = {"model": "default"}
        few = {"max_new_tokens": 3, "temperature": 0}
        if path == "/generate":
            prompt = rng.choice(
                (
                    {"input_ids": ids},
                    {"text": "Alice copper."},
                    {"input_ids": [ids, ids[:3]]},
                    {"text": ["a", "b"]},
                )
            )
            return {**prompt, "sampling_params": few}
        if path in ("/encode", "/classify"):
            return rng.choice(({"text": "Alice copper."}, {"input_ids": ids}, {"text": ["a", "b"]}))
        return {
            "/v1/completions": {**model, "prompt": ids, "max_tokens": 3},
            "/v1/chat/completions": {**model, "messages": messages, "max_tokens": 3},
            "/v1/responses": {**model, "input": "Alice copper.", "max_output_tokens": 5},
            "/v1/messages": {**model, "messages": messages, "max_tokens": 3},
            "/v1/embeddings": {**model, "input": "Alice copper."},
            "/v1/score": {**model, "query": [5, 6], "items": [[7], [8]], "label_token_ids": [9, 10]},
            "/v1/rerank": {"query": "Alice", "documents": ["copper", "lantern"]},
        }[path]
