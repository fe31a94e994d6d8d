"""Hints are read strictly, travel unchanged, and name what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.placement.hints.block_places import PromptBlocks, locate_messages
from sgl_importance.placement.hints.hints import (
    BLOCK_TYPES,
    MAX_ACTIONS,
    MAX_PAYLOAD,
    BadHint,
    Block,
    Hints,
)
from sgl_importance.reuse.reuse_class import BlockType

names = st.sampled_from(sorted(BLOCK_TYPES))
starts = st.integers(0, 300)
token_ranges = st.tuples(starts, st.integers(1, 300) | st.none()).map(
    lambda pair: [pair[0], None if pair[1] is None else pair[0] + pair[1]]
)
blocks = st.fixed_dictionaries({"type": names}, optional={"tokens": token_ranges}) | st.fixed_dictionaries(
    {"type": names, "messages": st.integers(-9, 9) | st.lists(st.integers(-9, 9), min_size=2, max_size=2)}
)
keeping = st.fixed_dictionaries(
    {},
    optional={
        "retain": st.fixed_dictionaries({"ttl_seconds": st.floats(1e-3, 1e6)}),
        "prefetch": st.booleans(),
    },
)
dropping = st.fixed_dictionaries({}, optional={"drop_after_use": st.booleans()})
rest = st.fixed_dictionaries(
    {},
    optional={
        "block_types": st.lists(blocks, max_size=5),
        "transition": st.just("tool_call"),
        "answer_end": st.sampled_from(["tool_call", "end_of_turn"]),
        "report": st.booleans(),
    },
)
valid = st.tuples(keeping | dropping, rest).map(lambda parts: {**parts[0], **parts[1]})


@given(valid)
def test_the_envelope_means_what_the_plain_form_means(value: dict) -> None:
    hints = Hints.parse(value)
    carried = json.loads(json.dumps(hints.envelope(value)))
    assert {action["action_type"].startswith("sgl_importance.") for action in carried["actions"]} <= {True}
    assert Hints.parse(carried) == hints


def test_an_envelope_keeps_its_head_and_the_actions_of_others() -> None:
    other = {"action_id": "7", "action_type": "elsewhere.tier", "action_version": "3", "payload": {"a": 1}}
    ours = Hints(report=True).actions()
    sent = {"protocol_version": "9", "message_id": "m", "actions": [other, *ours]}
    hints = Hints.parse(sent)
    assert hints == Hints(report=True)
    assert hints.envelope(sent) == {
        "protocol_version": "9",
        "message_id": "m",
        "actions": [*ours, other],
    }


def _action(name: str, payload: object, version: str = "1", **more: object) -> dict:
    kind = f"sgl_importance.{name}"
    return {"action_id": "7", "action_type": kind, "action_version": version, "payload": payload} | more


def _envelope(*actions: object, **more: object) -> dict:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)} | more


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (7, "kv_hints"),
        ([], "kv_hints"),
        ({"pin": True}, "kv_hints.pin"),
        ({"retain": {}}, "kv_hints.retain.ttl_seconds"),
        ({"retain": {"ttl_seconds": 0}}, "kv_hints.retain.ttl_seconds"),
        ({"retain": {"ttl_seconds": "60"}}, "kv_hints.retain.ttl_seconds"),
        ({"retain": {"ttl_seconds": float("inf")}}, "kv_hints.retain.ttl_seconds"),
        ({"retain": {"ttl_seconds": 1, "salt": "x"}}, "kv_hints.retain.salt"),
        ({"drop_after_use": 1}, "kv_hints.drop_after_use"),
        ({"prefetch": "yes"}, "kv_hints.prefetch"),
        ({"report": None}, "kv_hints.report"),
        ({"transition": "retry"}, "kv_hints.transition"),
        ({"answer_end": "abort"}, "kv_hints.answer_end"),
        ({"block_types": {"type": "user"}}, "kv_hints.block_types"),
        ({"block_types": [{"type": "user"}] * 65}, "kv_hints.block_types"),
        ({"block_types": [{"type": "prose"}]}, "kv_hints.block_types.0.type"),
        ({"block_types": [{"type": "user", "messages": True}]}, "kv_hints.block_types.0.messages"),
        ({"block_types": [{"type": "user"}, {"type": "user", "tokens": [-1, 2]}]},
         "kv_hints.block_types.1.tokens.0"),
        ({"block_types": [{"type": "user", "tokens": [5, 5]}]}, "kv_hints.block_types.0"),
        ({"block_types": [{"type": "user", "tokens": [0, 5], "messages": 0}]}, "kv_hints.block_types.0"),
        ({"retain": {"ttl_seconds": 1}, "drop_after_use": True}, "kv_hints"),
        ({"prefetch": True, "drop_after_use": True}, "kv_hints"),
        (_envelope(actions={}), "kv_hints.actions"),
        (_envelope(actions="report"), "kv_hints.actions"),
        (_envelope(actions=None), "kv_hints.actions"),
        (_envelope(3), "kv_hints.actions.0"),
        (_envelope(_action("pin", {})), "kv_hints.actions.0.action_type"),
        (_envelope(_action("report", {"value": True}, "2")), "kv_hints.actions.0.action_version"),
        (_envelope(*[_action("report", {"value": True})] * 2), "kv_hints.actions.1.action_type"),
        (_envelope(_action("report", {"value": 1})), "kv_hints.actions.0.payload"),
        (_envelope(_action("report", {"values": 1})), "kv_hints.actions.0.payload"),
        (_envelope(_action("retain", {"ttl_seconds": -1})), "kv_hints.actions.0.payload.ttl_seconds"),
        # What sglang would refuse of an envelope, in the middle of a stream.
        ({"actions": []}, "kv_hints.protocol_version"),
        ({"protocol_version": "1"}, "kv_hints.message_id"),
        (_envelope(protocol_version=1), "kv_hints.protocol_version"),
        (_envelope(message_id=None), "kv_hints.message_id"),
        (_envelope({"action_type": "elsewhere.tier", "action_version": "1"}), "kv_hints.actions.0.action_id"),
        (_envelope(_action("report", {"value": True}, action_id=3)), "kv_hints.actions.0.action_id"),
        (_envelope({"action_id": "7", "action_type": "elsewhere.tier", "action_version": "1", "payload": 3}),
         "kv_hints.actions.0.payload"),
        # What sglang would drop of an envelope, without a word.
        ({"retain": {"ttl_seconds": 60}, "actions": []}, "kv_hints.retain"),
        (_envelope(_action("retain", {"ttl_seconds": 60}), report=True), "kv_hints.report"),
        ({"message_id": "m", "transition": "tool_call"}, "kv_hints.transition"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(value: object, field: str) -> None:
    with pytest.raises(BadHint) as refused:
        Hints.parse(value)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"retain": {"ttl_seconds": 60}, "actions": []},
            "kv_hints.retain: would be ignored beside actions: make it an action of type "
            "sgl_importance.retain, or leave actions out",
        ),
        (
            {"actions": []},
            "kv_hints.protocol_version: is missing beside actions: an envelope has protocol_version and "
            "message_id",
        ),
        (_envelope(3), "kv_hints.actions.0: must be an object"),
        ({"retain": 3}, "kv_hints.retain: must be an object"),
    ],
)
def test_a_refusal_says_what_to_write_instead(value: object, message: str) -> None:
    with pytest.raises(BadHint) as refused:
        Hints.parse(value)
    assert str(refused.value) == message


def test_what_else_an_envelope_carries_is_sglang_s_business() -> None:
    assert Hints.parse(_envelope(_action("report", {"value": True}, trace="x"), router="y")) == Hints(
        report=True
    )


# ---- messages ----


def test_an_end_that_messages_share_is_looked_for_once() -> None:
    asked: list[int] = []

    def end_of(messages: int) -> int:
        asked.append(messages)
        return 10 * messages

    blocks = [{"type": "user", "messages": index} for index in (0, 1, 2, 1)]
    locate_messages(Hints.parse({"block_types": blocks}), 4, end_of)
    assert sorted(asked) == [0, 1, 2, 3]


def test_messages_become_the_tokens_between_their_ends() -> None:
    ends = [0, 10, 30, 60]
    hints = Hints.parse(
        {
            "block_types": [
                {"type": "system", "messages": 0},
                {"type": "document", "messages": [1, -1]},
                {"type": "tool_output", "messages": -1},
                {"type": "user", "tokens": [3, 4]},
            ]
        }
    )
    located = locate_messages(hints, 3, ends.__getitem__).block_types
    assert [block.tokens for block in located] == [(0, 10), (10, 60), (30, 60), (3, 4)]
    assert all(block.messages is None for block in located)


@pytest.mark.parametrize(("messages", "count"), [(3, 3), (-4, 3), ([2, 1], 3), (0, 0)])
def test_a_message_that_is_not_there_is_refused(messages: object, count: int) -> None:
    hints = Hints.parse({"block_types": [{"type": "user", "messages": messages}]})
    with pytest.raises(BadHint, match=r"^kv_hints\.block_types\.0\.messages: "):
        locate_messages(hints, count, lambda end: 10 * end)


# ---- nodes ----


@given(st.lists(blocks, max_size=6), st.integers(0, 200), st.integers(1, 250), starts, st.integers(1, 100))
def test_a_node_is_what_most_of_its_tokens_are(
    values: list[dict], new_from: int, prompt_tokens: int, start: int, length: int
) -> None:
    named = [Block.model_validate({**value, "messages": None}) for value in values]
    painted: list[BlockType | None] = [None] * (prompt_tokens + 500)
    for block in named:
        first, last = block.tokens or (new_from, None)
        last = prompt_tokens if last is None else min(last, prompt_tokens)
        painted[first:last] = [block.block_type] * max(0, last - first)
    node = painted[start : start + length]
    expected = {each for each in node if node.count(each) == max(map(node.count, node))}
    found = PromptBlocks(named, new_from=new_from, prompt_tokens=prompt_tokens).of(start, start + length)
    assert found in expected


ACTION = {"action_id": "1", "action_type": "kv.deref", "action_version": "1.0", "payload": {}}


@pytest.mark.parametrize(
    ("actions", "problem"),
    [
        ([{}] * (MAX_ACTIONS + 1), f"kv_hints.actions: {MAX_ACTIONS + 1} are more than {MAX_ACTIONS}"),
        ([ACTION, {**ACTION, "action_type": "a" * 5000}], "kv_hints.actions.1.action_type: "),
        (
            [{**ACTION, "payload": {"a": "b" * MAX_PAYLOAD}}],
            "kv_hints.actions.0.payload: has 65545 ",
        ),
    ],
)
def test_an_envelope_has_bounds(actions: list[dict], problem: str) -> None:
    head = {"protocol_version": "1", "message_id": "m"}
    assert Hints.parse({**head, "actions": [ACTION] * MAX_ACTIONS}).session_over
    with pytest.raises(BadHint) as refused:
        Hints.parse({**head, "actions": actions})
    assert str(refused.value).startswith(problem)
