"""Bodies that name a prompt: what every route of ours refuses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_importance.http import server_state
from sglang_importance.http.pins_route import PinBody
from sglang_importance.http.prewarm_route import PrewarmRequest
from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.requests.fields.text_rules import MAX_NAME
from sglang_importance.http.scheduler_client import TOLD_ERRORS, validated

KINDS = (Prompt, PinBody, PrewarmRequest)
MANY = 100_000
CONTEXT = 50_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_namespace_is_a_short_text_that_answers_can_name(kind: type[Prompt], field: str) -> None:
    for name in ("\ud800", "x" * (MAX_NAME + 1)):
        with pytest.raises(HTTPException) as refused:
            validated(kind, {"text": "a", field: name})
        assert refused.value.status_code == 400
        assert refused.value.detail.startswith(f"{field}: ")
    for name in ("\U0001f511", "x" * MAX_NAME, ""):
        assert getattr(validated(kind, {"text": "a", field: name}), field) == name


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input_ids": ["a"] * MANY}, "input_ids.0: "),
        ({"messages": ["a"] * MANY}, "messages.0: "),
        ({"messages": [{}], "tools": [7] * MANY}, "tools.0: "),
        ({"text": "a"} | {f"field {number}": 1 for number in range(MANY)}, f"{MANY} fields or elements are"),
    ],
)
def test_a_huge_body_is_refused_in_a_short_line_that_took_no_list_of_its_faults(
    body: dict[str, Any], problem: str
) -> None:
    for kind in KINDS:
        with pytest.raises(HTTPException) as refused:
            validated(kind, body)
        assert refused.value.detail.startswith(problem)
        assert len(refused.value.detail) < 200


def test_only_the_first_faults_of_a_body_are_told() -> None:
    with pytest.raises(HTTPException) as refused:
        validated(Prompt, {"text": "a"} | dict.fromkeys(map(str, range(100)), 1))
    assert refused.value.detail.count(";") == TOLD_ERRORS - 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (
            [{}] * MANY,
            f"messages: {MANY} messages, parts and tools are more than the {CONTEXT} tokens of the context",
        ),
        ([{"role": "user", "content": [7] * MANY}], "messages.0.content.0: must be an object"),
    ],
)
def test_messages_are_looked_at_before_sglangs_model_tries_each_as_each_kind(
    messages: list[dict[str, Any]], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    monkeypatch.setattr(server_state, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(openai_serving_chat=None)))
    with pytest.raises(HTTPException) as refused:
        asyncio.run(prompt_tokens(Prompt(messages=messages), request))
    assert refused.value.detail.startswith(problem)
