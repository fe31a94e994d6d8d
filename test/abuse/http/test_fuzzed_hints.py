"""Every form of ``kv_hints``, right and wrong, on every route that takes it, as a stream and not."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from sgl_importance.placement.hints.hints import BLOCK_TYPES, BadHint, Hints

from support.seeded_fuzz import every_run_and_nightly, fuzz
from support.servers import ServerProcess

pytestmark = pytest.mark.server

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")
MESSAGES = [
    {"role": "system", "content": "Alice copper. Bruno lantern. " * 8},
    {"role": "user", "content": "Clara compass. " * 8},
]

some = st.sampled_from
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-1, 1e9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
blocks = st.fixed_dictionaries(
    {"type": some(sorted(BLOCK_TYPES))},
    optional={
        "messages": st.integers(-3, 3) | st.lists(st.integers(-2, 2), min_size=2, max_size=2),
        "tokens": st.tuples(st.integers(0, 20), st.none() | st.integers(0, 300)).map(list),
    },
)
fields = {
    "retain": st.fixed_dictionaries({"ttl_seconds": st.floats(0.1, 5)}),
    "drop_after_use": st.booleans(),
    "prefetch": st.booleans(),
    "block_types": st.lists(blocks, max_size=3),
    "transition": st.just("tool_call"),
    "report": st.booleans(),
}
plain = st.fixed_dictionaries({}, optional=fields)


def enveloped(hints: dict[str, Any], others: list[Any]) -> dict[str, Any]:
    actions = [
        {
            "action_id": name,
            "action_type": f"sgl_importance.{name}",
            "action_version": "1",
            "payload": value if name == "retain" else {"value": value},
        }
        for name, value in hints.items()
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": [*actions, *others]}


foreign = {"action_id": "1", "action_type": "elsewhere.tier", "action_version": "9", "payload": {"a": 1}}
envelopes = st.builds(enveloped, plain, some([[], [foreign]]))


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A right form with one place replaced, removed or added."""
    value = copy.deepcopy(draw(plain | envelopes))
    inner, target = value, value
    while isinstance(inner, dict | list) and inner:
        target = inner
        key = draw(some(sorted(inner)) if isinstance(inner, dict) else st.integers(0, len(inner) - 1))
        inner = target[key]
        if draw(st.booleans()):
            break
    if not target:
        return draw(anything)
    how = draw(some(["replace", "remove", "add"]))
    if how == "remove":
        del target[key]
    elif how == "replace" or isinstance(target, list):
        target[key] = draw(anything)
    else:
        target[draw(st.text(max_size=4) | some(sorted(fields)))] = draw(anything)
    return value


def parsed(value: Any) -> Hints | None:
    try:
        return Hints.parse(value)
    except BadHint:
        return None


def has_place_in_messages(hints: Hints) -> bool:
    return any(block.messages is not None for block in hints.block_types)


@every_run_and_nightly
def test_hints_are_followed_or_refused_by_name(server: ServerProcess, client: httpx.Client, share: int):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/completions": {"prompt": "Alice copper. " * 20, "max_tokens": 2},
        "/generate": {"text": "Alice copper. " * 20, "sampling_params": {"max_new_tokens": 2}},
    }
    seen: dict[int, int] = {}

    def send(path: str, value: Any, stream: bool) -> None:
        body = {"model": server.name} if path != "/generate" else {}
        answer = client.post(path, json={**body, **bodies[path], "stream": stream, "kv_hints": value})
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        hints = parsed(value)
        # sglang takes what is empty for none.
        if hints is None and (value or path != "/generate"):
            assert value is None or answer.status_code == 400, answer.text
        elif hints is not None and not has_place_in_messages(hints):
            assert answer.status_code == 200, answer.text
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert "kv_hints" in json.dumps(answer.json())
        else:
            assert '"error"' not in answer.text

    values = plain | envelopes | damaged() | damaged() | anything
    fuzz(send, some(ROUTES), values, st.booleans(), count=60 * share)
    assert min(seen[200], seen[400]) > 12 * share, seen


@every_run_and_nightly
def test_hints_of_a_batch(client: httpx.Client, share: int):
    def send(values: Any, stream: bool, samples: int) -> None:
        body = {
            "text": ["Alice copper. " * 10, "Bruno lantern. " * 10],
            "sampling_params": {"max_new_tokens": 1, "n": samples},
            "stream": stream,
            "kv_hints": values,
        }
        answer = client.post("/generate", json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            assert '"error"' not in answer.text
        else:
            assert "kv_hints" in json.dumps(answer.json())

    one = st.none() | plain | envelopes | damaged()
    fuzz(send, st.lists(one, max_size=3) | one, st.booleans(), st.integers(1, 2), count=20 * share)
